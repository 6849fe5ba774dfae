"""Plans as text and as files, and what no plan can be."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.cluster import load as load_cluster
from foretell.errors import ForetellError, InfeasibleError, InputError
from foretell.plan import Plan, check, load, read, save
from foretell.workload import load as load_workload

names = st.text("abc.+/%, é", min_size=1, max_size=6)
groups = st.lists(st.lists(names, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
degrees = st.integers(1, 64)


@st.composite
def plans(draw):
    return Plan(
        dp=draw(degrees),
        tp=draw(degrees),
        pp=draw(degrees),
        sp=draw(st.booleans()),
        zero=draw(st.integers(0, 3)),
        micro_batch=draw(st.integers(0, 8)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        overlap=draw(st.sampled_from([None, True, False])),
        bucket_mb=draw(st.floats(0.5, 1e4)),
        spatial=tuple(draw(st.lists(degrees, max_size=3))),
        buckets=draw(groups),
        regions=draw(groups),
        whatifs=tuple(draw(st.lists(st.sampled_from(["tf32", "amp:dtype=bf16"]), max_size=2))),
    )


@given(plans())
def test_text_reads_back(plan):
    assert Plan.parse(str(plan)) == plan


def test_a_rank_without_actions_stays_in_the_text():
    plan = Plan(stages=(("1", "block"),), actions=((), ("0F0", "0B0"), ()))
    assert Plan.parse(str(plan)) == plan


@given(plans(), st.sampled_from(["a.plan", "a.json", "a.toml"]))
def test_files_read_back(plan, name):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save(plan, path)
        assert load(path) == plan
        assert read(str(path)) == plan


def test_other_programs_words():
    assert Plan.parse("fsdp=8") == Plan(dp=8, zero=3)
    assert Plan.parse("dp_replicate=2,dp_shard=8") == Plan(dp=16, zero=3, shard=8)
    assert Plan.parse("dp_replicate=4") == Plan(dp=4)
    assert Plan.parse("mbs=2,gbs=64") == Plan(micro_batch=2, global_batch=64)


def test_degrees_multiply():
    plan = Plan(dp=2, tp=4, pp=3, spatial=(2, 2))
    assert plan.ranks == 2 * 4 * 3 * 4
    assert plan.degrees()["width"] == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dpp=2", "unknown field of a plan: `dpp`"),
        ("dp=two", "not a whole number"),
        ("dp=0", "a degree is 1 or more"),
        ("zero=4", "it is 0, 1, 2 or 3"),
        ("recompute=some", "unknown value"),
        ("dp=2,dp_shard=4", "dp is their product"),
        ("dp", "is not `field=value`"),
        ("dp=2,dp=4", "given twice"),
    ],
)
def test_bad_texts_are_refused(text, match):
    with pytest.raises(InputError, match=match):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"dp": "two"}', "which it cannot be"),
        ('{"dpp": 2}', "unknown field"),
        ("[1]", "one table of fields"),
        ("{", "is no plan"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, match):
    path = tmp_path / "bad.plan"
    path.write_text(text)
    with pytest.raises(InputError, match=match):
        read(str(path))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dp=2,tp=2,pp=4", "dp=2 × tp=2 × pp=4 makes 16 ranks.* has 8.*multiply to 8"),
        ("dp=3,tp=2", "dp=3 × tp=2 makes 6 ranks.*dp=4 with the others"),
        ("tp=8", "tp=8, but .* can be split 4 ways"),
        ("pp=8", "pp=8 × chunks=1 = 8 pieces of 6 blocks"),
        ("dp=8,global_batch=4", "global_batch=4 for dp=8"),
        ("dp=8,global_batch=12,micro_batch=1", "no multiple of dp=8 × micro_batch=1 = 8"),
        ("dp=8,stack=megatorn", "did you mean `megatron"),
        ("dp=8,schedule=2f2b", "unknown schedule"),
        ("dp=8,shard=3", "shard=3 does not divide dp=8"),
        ("dp=2,pp=4,layers=1+2+3", "give 4 numbers that add up to 6"),
        ("dp=8,shares=1+2,global_batch=8", "give 8 numbers that add up to global_batch=8"),
        ("dp=8,ep=3", "ep=3"),
    ],
)
def test_impossible_plans_name_their_factors(text, match):
    model = load_workload("gpt:layers=6,hidden=64,heads=4")
    with pytest.raises(ForetellError) as caught:
        check(Plan.parse(text), model, load_cluster("dgx-a100:nodes=1"))
    import re

    assert re.search(match, str(caught.value).replace("\n", " "))


def test_batches_are_filled_in():
    model = load_workload("gpt:layers=6,hidden=64,heads=4,batch=3")
    plan = check(Plan(dp=8), model, load_cluster("dgx-a100:nodes=1"))
    assert (plan.global_batch, plan.micro_batch) == (24, 3)


@pytest.mark.parametrize(
    ("model", "text", "stack"),
    [
        ("gpt:layers=6,hidden=64,heads=4", "dp=8", "megatron-deepspeed"),
        ("gpt:layers=6,hidden=64,heads=4,dtype=bf16", "dp=8", "megatron-core"),
        ("gpt:layers=6,hidden=64,heads=4", "dp=8,zero=3", "fsdp"),
        ("gpt:layers=6,hidden=64,heads=4", "dp=8,stack=megatron-lm", "megatron-lm"),
        ("resnet50", "dp=8", "ddp"),
    ],
)
def test_a_usual_program_where_none_is_named(model, text, stack):
    cluster = load_cluster("dgx-a100:nodes=1")
    assert check(Plan.parse(text), load_workload(model), cluster).framework == stack


def test_infeasible_is_its_own_error():
    model = load_workload("gpt:layers=6,hidden=64,heads=4")
    with pytest.raises(InfeasibleError):
        check(Plan(tp=8), model, load_cluster("dgx-a100:nodes=1"))


def test_a_file_may_be_read_with_fields_changed(tmp_path):
    path = tmp_path / "best.plan"
    save(Plan(dp=48, zero=3, micro_batch=2, global_batch=96), path)
    found = read(f"{path}:dp=24,global_batch=48")
    assert found == Plan(dp=24, zero=3, micro_batch=2, global_batch=48)
    assert read(f"{path}:dp_replicate=2,dp_shard=4").shard == 4
    with pytest.raises(InputError, match="dq"):
        read(f"{path}:dq=24")
    with pytest.raises(InputError, match="cannot read"):
        read(f"{tmp_path / 'none.plan'}:dp=2")


@pytest.mark.parametrize(
    ("text", "is_so"), [("pp=2,zero=2,shard=2", True), ("dp=4,zero=3,shard=2", False)]
)
def test_a_sharding_group_that_does_not_divide_the_replicas_is_not_run(text, is_so):
    from foretell.plan.unsupported import unsupported

    assert ("shard=2 does not divide dp=1" in unsupported(Plan.parse(text))) is is_so
