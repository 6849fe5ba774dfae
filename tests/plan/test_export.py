"""Plans in the words of other programs, and back."""

import ast
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from foretell.cli.export import command
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.export import (
    EXPORTS,
    export,
    read_deepspeed,
    read_megatron,
    read_schedule,
    read_torchtitan,
    schedule_csv,
    with_messages,
)


def plan(text):
    return Plan.parse(text)


def test_torchtitan_says_degrees_batch_and_schedule():
    files = export(
        plan("dp_replicate=2,dp_shard=4,tp=2,pp=4,micro_batch=2,global_batch=256,recompute=full"),
        "torchtitan",
    )
    found = titan(files)
    assert found.parallelism.data_parallel_replicate_degree == 2
    assert found.parallelism.data_parallel_shard_degree == 4
    assert found.parallelism.pipeline_parallel_schedule == "1F1B"
    assert found.parallelism.enable_sequence_parallel is False
    assert found.parallelism.num_pp_microbatches == 16  # of 2 samples, on 8 ranks
    assert found.training.num_tokens_per_microbatch_per_dp_rank == 2 * LENGTH
    assert found.training.num_tokens_per_train_step == 256 * LENGTH
    assert found.activation_checkpoint == "FullAC"
    assert set(files) == {"torchtitan_plan.py"}


# Fields of config/configs.py in github.com/pytorch/torchtitan, commit b5bcd76 of 2026-08-21
PARALLELISM = {
    *("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"),
    *("fsdp_reshard_after_forward", "enable_fsdp_symm_mem", "enable_sequence_parallel"),
    *("spmd_backend", "pipeline_parallel_degree", "module_fqns_per_model_part"),
    *("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"),
    *("pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule"),
    *("pipeline_parallel_schedule_csv", "num_pp_microbatches", "context_parallel_degree"),
    *("context_parallel_load_balancer", "context_parallel_ptrr_mask_key"),
    "expert_parallel_degree",
}
TRAINING = {
    *("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step", "max_context_length"),
    *("max_norm", "steps", "enable_cpu_offload", "disable_cuda_graphs", "dtype"),
    *("mixed_precision_param", "mixed_precision_reduce", "gc_freq", "gc_debug"),
}
LENGTH = 2048
# what torchtitan 0.3.0, the one in the registry, has in place of three of them
PARALLELISM_0_3 = (PARALLELISM - {"num_pp_microbatches"}) | {"pipeline_parallel_microbatch_size"}
TRAINING_0_3 = {n for n in TRAINING if not n.startswith("num_")} - {"max_context_length"}
TRAINING_0_3 |= {"local_batch_size", "global_batch_size", "seq_len"}


def titan(files, fields=(PARALLELISM, TRAINING)):
    """What the written module makes of a configuration that has torchtitan's fields alone."""

    class Section(SimpleNamespace):
        def __setattr__(self, name, value):
            assert name in self.known, name
            super().__setattr__(name, value)

    ours = SimpleNamespace(parallelism=Section(), training=Section(), compile=SimpleNamespace())
    ours.parallelism.__dict__["known"], ours.training.__dict__["known"] = fields
    name = "max_context_length" if "max_context_length" in fields[1] else "local_batch_size"
    setattr(ours.training, name, LENGTH)
    text = files["torchtitan_plan.py"]
    lines = [line for line in text.splitlines() if not line.startswith("from torchtitan")]
    kinds = {n: SimpleNamespace(Config=lambda n=n: n) for n in ("FullAC", "SelectiveAC")}
    exec(compile("\n".join(lines), "torchtitan_plan.py", "exec"), kinds)
    return kinds["with_plan"](ours)


@pytest.mark.parametrize(
    ("text", "here", "part"),
    [
        ("dp=8,zero=3,micro_batch=2,global_batch=64,precision=bf16-mixed,compile=yes", 2, None),
        ("dp=2,pp=4,micro_batch=2,global_batch=64", 32, 2),
        ("pp=2,actions=F0+F1+B0+B1/F0+B0+F1+B1", 2, 1),
    ],
)
def test_torchtitan_of_the_registry_counts_samples(text, here, part):
    files = export(plan(text), "torchtitan")
    found = titan(files, (PARALLELISM_0_3, TRAINING_0_3))
    assert found.training.local_batch_size == here
    assert getattr(found.parallelism, "pipeline_parallel_microbatch_size", None) == part
    assert getattr(found.training, "global_batch_size", 0) == plan(text).global_batch


def test_torchtitan_gets_a_schedule_file():
    files = export(plan("pp=2,actions=F0+F1+B0+B1/F0+B0+F1+I1+W1"), "torchtitan")
    assert files["schedule.csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n"
    found = titan(files).parallelism
    assert found.pipeline_parallel_schedule == "_PipelineScheduleRuntime"
    assert found.pipeline_parallel_schedule_csv == "schedule.csv"
    assert found.num_pp_microbatches == 2


def test_schedule_files_come_back():
    rows = (("0F0", "3F0", "3I0", "3W0", "0B0"), ("1F0", "2F0", "2B0", "1B0"))
    assert read_schedule(schedule_csv(rows)) == rows
    lowered = "0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert read_schedule(lowered) == (("0F0", "0B0"), ("1F0", "1B0"))


def test_megatron_says_arguments_and_layout():
    text = export(
        plan(
            "dp=4,tp=8,pp=2,chunks=2,schedule=interleaved,layers=7+5,zero=1,sp=yes,dtype=bf16,"
            "micro_batch=1,global_batch=64,recompute=full"
        ),
        "megatron",
    )["arguments.txt"]
    lines = text.splitlines()
    assert "--tensor-model-parallel-size 8" in lines
    assert "--pipeline-model-parallel-layout 'Et*4|t*3|t*3|t*2L'" in lines
    for flag in ("--sequence-parallel", "--use-distributed-optimizer", "--bf16"):
        assert flag in lines
    assert "--recompute-granularity full" in lines
    assert not any(line.startswith("--num-virtual") for line in lines)


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,tp=8,pp=2,micro_batch=1,global_batch=512,recompute=selective,zero=1,sp=yes,dtype=bf16",
        "dp=2,pp=4,chunks=2,schedule=interleaved,micro_batch=2,global_batch=64",
        "dp=8,micro_batch=4,global_batch=32,optimizer=sgd",
    ],
)
def test_megatron_comes_back(text):
    wanted = plan(text)
    assert read_megatron(export(wanted, "megatron")["arguments.txt"], wanted.ranks) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "dp=8,zero=3,micro_batch=2,global_batch=64,dtype=bf16,bucket_mb=8",
        "dp=2,zero=2,offload=yes,micro_batch=1",
    ],
)
def test_deepspeed_comes_back(text):
    wanted = plan(text)
    files = export(wanted, "deepspeed")
    found = json.loads(files["deepspeed.json"])
    assert found["zero_optimization"]["stage"] == wanted.zero
    assert found["gradient_accumulation_steps"] == (4 if wanted.global_batch else 1)
    assert read_deepspeed(files["deepspeed.json"], wanted.dp) == wanted.but(optimizer="adam")


def test_snippets_are_python():
    for to, text in (
        ("ddp", "dp=4,bucket_mb=10,dtype=bf16"),
        ("fsdp2", "dp_replicate=2,dp_shard=4,dtype=bf16,recompute=full"),
    ):
        ((_, code),) = export(plan(text), to).items()
        ast.parse(code)
    assert "bucket_cap_mb=10)" in export(plan("dp=4,bucket_mb=10"), "ddp")["ddp.py"]
    assert (
        '(2, 4), mesh_dim_names=("dp_replicate", "dp_shard")'
        in export(plan("dp_replicate=2,dp_shard=4"), "fsdp2")["fsdp2.py"]
    )


@pytest.mark.parametrize(
    ("to", "text", "words"),
    [
        ("torchtitan", "spatial=2", "no words for `spatial`"),
        ("torchtitan", "dp=2,zero=1", "no zero=1"),
        ("torchtitan", "dp=2,placement=1+0", "no words for `placement`"),
        ("torchtitan", "dp=2,optimizer=sgd", "with AdamW, not sgd"),
        ("torchtitan", "pp=2,chunks=4,schedule=interleaved", "two chunks a rank"),
        ("deepspeed", "dp=2,micro_batch=1,dtype=tf32", "no word for the plan's tf32"),
        ("deepspeed", "dp=2", "has to say a batch"),
        ("megatron", "dp=2,zero=3", "not Megatron's distributed optimizer"),
        ("megatron", "pp=2,schedule=gpipe", "not gpipe"),
        ("megatron", "dp=2,buckets=a+b", "no words for `buckets`"),
        ("deepspeed", "tp=2", "no words for `tp`"),
        ("ddp", "dp=2,shares=3+1", "no words for `shares`"),
        ("fsdp2", "dp=2", "zero=0 is not FSDP2"),
        ("jax", "dp=2", "unknown program"),
    ],
)
def test_what_others_cannot_say(to, text, words):
    with pytest.raises(InputError, match=words):
        export(plan(text), to)


def test_micro_batches_reach_plain_pytorch():
    text = "dp=2,micro_batch=2,global_batch=16"
    assert "(loss(model(x), y) / 4).backward()" in export(plan(text), "ddp")["ddp.py"]
    lines = export(plan(f"{text},zero=3"), "fsdp2")["fsdp2.py"]
    assert "model.set_requires_gradient_sync(k + 1 == 4)" in lines


def test_every_export_takes_plain_data_parallel():
    for to in EXPORTS:
        kind = "zero=3" if to in ("fsdp2", "torchtitan") else "zero=0"
        files = export(plan(f"dp=4,micro_batch=2,{kind}"), to)
        assert files
        assert all(text.strip() for text in files.values())


def test_the_command(tmp_path):
    done = CliRunner().invoke(command, ["pp=2,actions=F0+B0/F0+B0", "--to", "torchtitan", "--json"])
    assert set(json.loads(done.stdout)) == {"torchtitan_plan.py", "schedule.csv"}
    CliRunner().invoke(
        command, ["dp=2,micro_batch=1", "--to", "deepspeed", "-o", str(tmp_path / "out")]
    )
    assert json.loads((tmp_path / "out" / "deepspeed.json").read_text())["zero_optimization"]
    shown = CliRunner().invoke(command, ["dp=2,tp=4", "--to", "megatron"]).stdout
    assert "--tensor-model-parallel-size 4" in shown.splitlines()


def test_files_that_are_none():
    with pytest.raises(InputError, match="no DeepSpeed configuration"):
        read_deepspeed("{", 2)
    with pytest.raises(InputError, match="not a whole number"):
        read_deepspeed('{"train_batch_size": "many"}', 2)
    with pytest.raises(InputError, match="`--micro-batch-size` of Megatron"):
        read_megatron("--micro-batch-size x")
    with pytest.raises(InputError, match="6 ranks are no multiple of the 4"):
        read_megatron("--tensor-model-parallel-size 4", 6)


# Stages that are placed one by one


LINE = (
    "stages=0+input+h.0*3/1+h.0*1+head,actions=0F0+0F1+0B0+0B1/1F0+1B0+1F1+1B1,"
    "micro_batch=1,global_batch=2,schedule=actions"
)


def test_torchtitan_gets_the_modules_of_placed_stages():
    files = export(plan(LINE), "torchtitan")
    found = titan(files).parallelism
    parts = [["tok_embeddings", "h.0", "h.1", "h.2"], ["h.3", "norm", "output"]]
    assert found.module_fqns_per_model_part == parts
    assert found.pipeline_parallel_degree == 2
    assert files["schedule.csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    wave = "stages=0+embedding+block*1/1+block*1/1+block*1/0+block*1+head,actions=0F0/1F0"
    found = titan(export(plan(wave), "torchtitan")).parallelism
    assert found.module_fqns_per_model_part[1:3] == [["layers.1"], ["layers.2"]]


def test_torchtitan_gets_uneven_layers():
    parts = titan(export(plan("pp=2,layers=3+2"), "torchtitan")).parallelism
    parts = parts.module_fqns_per_model_part
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1", "layers.2"]
    assert parts[1] == ["layers.3", "layers.4", "norm", "output"]


def test_megatron_gets_the_layout_of_placed_stages():
    words = LINE.replace("0F0+0F1+0B0+0B1", "0F0+0F1+0B0+0B1")
    text = export(plan(words), "megatron")["arguments.txt"]
    assert "--pipeline-model-parallel-layout 'Et*3|tL'" in text.splitlines()
    back = read_megatron(text, 2)
    assert (back.pp, back.layers, back.schedule) == (2, (3, 1), "1f1b")
    looped = (
        "stages=0+embedding+block*2/1+block*1/0+block*1/1+block*1+head,actions="
        "0F0+0F1+2F0+2F1+2B0+2B1+0B0+0B1/1F0+1F1+3F0+3B0+3F1+3B1+1B0+1B1,global_batch=2"
    )
    text = export(plan(looped), "megatron")["arguments.txt"]
    assert "--pipeline-model-parallel-layout 'Et*2|t|t|tL'" in text.splitlines()
    assert read_megatron(text, 2).chunks == 2


@pytest.mark.parametrize(
    ("to", "change", "words"),
    [
        ("megatron", ("0F0+0F1+0B0+0B1", "0F1+0F0+0B0+0B1"), "an order of its own"),
        ("torchtitan", ("1+h.0*1", "0-1+h.0*1"), "stage 1 on ranks 0-1"),
        ("torchtitan", ("+head,", "+frozen+head,"), "stage 1, done as frozen"),
        ("torchtitan", ("1+h.0*1", "1+input+h.0*1"), "two copies of the model"),
        ("megatron", ("1+h.0*1", "1+norm+h.0*1"), "no letter for"),
    ],
)
def test_what_a_line_of_stages_is_not(to, change, words):
    with pytest.raises(InputError, match=words):
        export(plan(LINE.replace(*change)), to)


@pytest.mark.parametrize(
    "text",
    [
        "dp=8,tp=2,sp=yes,zero=3,micro_batch=2,global_batch=64,dtype=bf16",
        "dp_replicate=2,dp_shard=4,recompute=selective,dtype=fp32",
        "dp=2,pp=4,micro_batch=2,global_batch=64,dtype=bf16,recompute=full",
        "dp=4,dtype=bf16,whatifs=compile",
    ],
)
def test_torchtitan_comes_back(text):
    wanted = plan(text)
    assert read_torchtitan(export(wanted, "torchtitan")["torchtitan_plan.py"]) == wanted


def test_torchtitan_comes_back_with_its_schedule_file():
    wanted = plan("pp=2,schedule=actions,actions=0F0+0B0/1F0+1B0,dtype=bf16,micro_batch=1")
    files = export(wanted, "torchtitan")
    assert read_torchtitan(files["torchtitan_plan.py"], files["schedule.csv"]) == wanted
    with pytest.raises(InputError, match=r"has its schedule in `schedule\.csv`"):
        read_torchtitan(files["torchtitan_plan.py"])
    with pytest.raises(InputError, match="no torchtitan configuration"):
        read_torchtitan("[")
    with pytest.raises(InputError, match="`ZBV` has no name"):
        read_torchtitan('parallelism.pipeline_parallel_schedule = "ZBV"')


@pytest.mark.parametrize(
    "text",
    [
        "pp=2,layers=7+5,micro_batch=1,global_batch=64",
        "pp=2,chunks=2,schedule=interleaved,layers=7+5,micro_batch=1,global_batch=64",
    ],
)
def test_megatrons_layout_comes_back(text):
    wanted = plan(text)
    assert read_megatron(export(wanted, "megatron")["arguments.txt"], 2) == wanted


def test_megatrons_own_ways_to_write_a_layout():
    text = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E(t|)*3tL'"
    assert read_megatron(text, 2).layers == (2, 2)
    with pytest.raises(InputError, match="has `m`"):
        read_megatron(text.replace("tL", "mL"), 2)
    with pytest.raises(InputError, match="3 stages for 2 ranks"):
        read_megatron(text.replace("*3", "*2"), 2)


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,micro_batch=1,optimizer=sgd,grad_dtype=bf16",
        "dp=4,global_batch=8,optimizer=momentum,overlap=no,zero=1",
        "dp=4,micro_batch=1,optimizer=adam,precision=bf16-mixed",
    ],
)
def test_deepspeed_brings_optimizer_and_formats_back(text):
    wanted = plan(text)
    assert read_deepspeed(export(wanted, "deepspeed")["deepspeed.json"], 4) == wanted


def test_messages_are_sent_and_asked_for_in_one_order():
    rows = with_messages([["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]])
    assert ",".join(rows[0]) == (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD"
    )
    back = with_messages([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1", "1B0"]])
    at = back[0].index("0B0")
    assert back[0][at - 2 : at] == ("0RECV_B1", "0RECV_B0")  # asked for as they were sent
    near = with_messages([["0F0", "1F0", "1B0", "0B0"]])
    assert not any("SEND" in cell for cell in near[0])
    assert read_schedule("\n".join(map(",".join, rows))) == (
        ("0F0", "0F1", "0B1", "0B0"),
        ("1F0", "1F1", "1B1", "1B0"),
    )
    with pytest.raises(InputError, match="`F0` of rank 0"):
        with_messages([["F0"]])


ACCELERATE = {  # fields of ClusterConfig, and of `accelerate launch`, in accelerate 1.15
    *("compute_environment", "distributed_type", "num_processes", "num_machines", "machine_rank"),
    *("mixed_precision", "use_cpu", "fsdp_config", "parallelism_config", "dynamo_config"),
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_offload_params"),
    *("fsdp_activation_checkpointing", "fsdp_state_dict_type", "fsdp_cpu_ram_efficient_loading"),
    *(f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp")),
    "dynamo_backend",
}


def rows(text):
    """Names and values of a YAML file of plain values."""
    lines = [line.split("#")[0] for line in text.splitlines() if ":" in line.split("#")[0]]
    return {name.strip(): value.strip() for name, value in (x.split(":", 1) for x in lines)}


def test_accelerate_gets_fsdp2_and_its_mesh():
    text = "dp=8,shard=4,zero=3,tp=2,precision=bf16-mixed,recompute=full,compile=yes,micro_batch=2"
    (file,) = export(plan(text + ",global_batch=64"), "accelerate").values()
    found = rows(file)
    assert set(found) <= ACCELERATE
    assert "gradient_accumulation_steps=4" in file
    wanted = {"distributed_type": "FSDP", "num_processes": "16", "mixed_precision": "bf16"}
    wanted |= {"fsdp_version": "2", "fsdp_reshard_after_forward": "true"}
    wanted |= {"parallelism_config_dp_replicate_size": "2", "parallelism_config_tp_size": "2"}
    wanted |= {"parallelism_config_dp_shard_size": "4", "dynamo_backend": "INDUCTOR"}
    assert wanted.items() <= found.items()


def test_accelerate_reads_it(tmp_path):
    args = pytest.importorskip("accelerate.commands.config.config_args")
    for text in ("dp=4", "dp=4,zero=3,dtype=bf16", "dp=4,zero=2,tp=2,compile=yes"):
        (file,) = export(plan(text), "accelerate").values()
        (tmp_path / "a.yaml").write_text(file)
        found = args.ClusterConfig.from_yaml_file(tmp_path / "a.yaml")
        assert found.num_processes == plan(text).ranks


def test_lightning_is_given_a_trainer():
    (file,) = export(plan("dp=4,zero=3,tp=2,precision=bf16-mixed"), "lightning").values()
    call = next(n for n in ast.walk(ast.parse(file)) if isinstance(n, ast.Call))
    found = {k.arg: ast.unparse(k.value) for k in call.keywords}
    assert found["devices"] == "8"
    assert found["precision"] == "'bf16-mixed'"
    assert "data_parallel_size=4, tensor_parallel_size=2" in found["strategy"]


def test_nanotron_gets_degrees_and_tokens():
    text = "dp=4,tp=8,pp=2,sp=yes,zero=1,micro_batch=2,global_batch=64,dtype=bf16"
    found = rows(export(plan(text), "nanotron")["nanotron.yaml"])
    wanted = {"dp": "4", "tp": "8", "pp": "2", "tp_mode": "REDUCE_SCATTER", "zero_stage": "1"}
    wanted |= {"micro_batch_size": "2", "batch_accumulation_per_replica": "8"}
    assert wanted.items() <= found.items()


@pytest.mark.parametrize(
    ("to", "text", "words"),
    [
        ("accelerate", "dp=2,zero=1", "no zero=1"),
        ("accelerate", "dp=2,tp=2", "under FSDP alone"),
        ("accelerate", "dp=2,pp=2", "`pp`"),
        ("lightning", "dp=2,zero=2", "no zero=2"),
        ("lightning", "dp=2,recompute=full", "`recompute`"),
        ("nanotron", "dp=2,zero=3", "zero=0 or 1"),
        ("nanotron", "dp=2,dtype=fp16", "no word for the plan's fp16"),
        ("nanotron", "dp=2,shares=3+1", "`shares`"),
    ],
)
def test_what_these_have_no_words_for(to, text, words):
    with pytest.raises(InputError, match=words):
        export(plan(text), to)


def test_what_a_framework_overlaps_is_exported_as_it_was_priced():
    query = Plan(dp=2, tp=2, sp=True, dtype="bf16", framework="megatron-core")
    words = " ".join(export(query, "megatron").values())
    assert "--overlap-grad-reduce" in words
    assert "--tp-comm-overlap" in words
    never = export(query.but(overlap=False, tp_overlap=False), "megatron")
    assert "overlap" not in " ".join(never.values())
    experts = Plan(dp=4, ep=4, framework="megatron-core", ep_overlap=True, ep_dispatch="node")
    words = export(experts, "megatron")["arguments.txt"]
    assert "--overlap-moe-expert-parallel-comm" in words
    assert "--moe-token-dispatcher-type flex" in words
    again = read_megatron(words, 4)
    assert (again.ep_overlap, again.ep_dispatch) == (True, "node")
    for how, said in (("layers", "moe_preprocess"), ("iteration", "full_iteration")):
        words = export(experts.but(cuda_graph=how), "megatron")["arguments.txt"]
        assert said in words
        assert read_megatron(words, 4).cuda_graph == how
    files = export(Plan(dp=2, micro_batch=1, framework="megatron-deepspeed"), "deepspeed")
    found = json.loads(files["deepspeed.json"])
    assert found["zero_optimization"]["overlap_comm"] is False


def test_no_argument_of_megatron_is_left_without_its_value():
    for text in ("dp=4,tp=2", "dp=4,tp=2,optimizer=sgd", "dp=4,tp=2,optimizer=adam"):
        lines = export(Plan.parse(text), "megatron")["arguments.txt"].splitlines()
        assert [line for line in lines if line.strip() == "--optimizer"] == []


@pytest.mark.parametrize("to", EXPORTS)
@pytest.mark.parametrize(
    ("base", "more"),
    [
        ("dp=4", "dtype=fp8"),
        ("dp=4", "dtype=bf16"),
        ("dp=4", "grad_dtype=bf16"),
        ("dp=4", "global_batch=32"),
        ("dp=4", "optimizer=sgd"),
        ("dp=4", "recompute=full"),
        ("dp=4", "cuda_graph=iteration"),
        ("dp=4", "shares=1+1+1+5"),
        ("dp=4,dtype=bf16", "precision=fp16-mixed"),
        ("dp=4,ep=2", "ep_overlap=yes"),
        ("dp=4,zero=3", "dtype=tf32"),
        ("dp=4,zero=3", "shard=2"),
        ("dp=4,zero=3", "offload=yes"),
        ("dp=2,tp=2", "sp=yes"),
        ("dp=2,pp=2,global_batch=16,micro_batch=2", "schedule=gpipe"),
        ("dp=2,pp=2,global_batch=16,micro_batch=2", "schedule=zb-h1"),
    ],
)
def test_no_field_is_dropped(to, base, more):
    """What is added to a plan is in the files, or refused."""
    try:
        before = export(Plan.parse(base), to)
    except InputError:
        return
    try:
        after = export(Plan.parse(f"{base},{more}"), to)
    except InputError:
        return
    assert after != before
