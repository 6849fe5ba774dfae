"""Regions from models and at random: whole, convex, runnable, told in columns and measured."""

from functools import partial
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from foretell.cost.fused_regions import (  # noqa: E402
    DTYPES,
    KINDS,
    WORDS,
    is_fusible,
    kind_of,
    word_of,
)
from foretell_lab.fused import draw, gather, make  # noqa: E402
from foretell_lab.fused.__main__ import main  # noqa: E402
from foretell_lab.fused.build import graph_of, real_entry  # noqa: E402
from foretell_lab.fused.capture import capture_step  # noqa: E402
from foretell_lab.fused.columns import columns, described  # noqa: E402
from foretell_lab.fused.cut import Net, cut, grow, regions  # noqa: E402
from foretell_lab.fused.draw import drawn  # noqa: E402
from foretell_lab.fused.measure import read_regions  # noqa: E402
from foretell_lab.fused.models import HELD_OUT, MODELS  # noqa: E402
from foretell_lab.fused.region import Entry, Op, Region, dumps, loads, references  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own tracing deprecates itself


def net_of(name: str, precision: str = "fp32", seed: int = 3) -> Net:
    return Net(capture_step(partial(MODELS[name], Random(seed), precision)))


def gelu_of_sum(shape: tuple[int, ...] = (64, 32)) -> Region:
    stride = (shape[1], 1)
    entries = (Entry(shape, stride, "float32"), Entry(shape[1:], (1,), "float32"))
    add = Op("aten.add.Tensor", [["%", 0, -1], ["%", 1, -1]], {})
    return Region("test", entries, (add, Op("aten.gelu.default", [["%", 2, -1]], {})), ((3, -1),))


def test_a_region_is_text_and_back():
    region = gelu_of_sum()
    assert loads(dumps(region)) == loads(dumps(loads(dumps(region))))
    assert loads(dumps(region)).key == region.key
    assert gelu_of_sum((32, 32)).key != region.key


def test_a_region_runs_as_torch_does():
    region = gelu_of_sum()
    x, bias = (real_entry(e, "cpu") for e in region.entries)
    (out,) = graph_of(region, "cpu")(x, bias)
    torch.testing.assert_close(out, torch.nn.functional.gelu(x + bias))


def test_columns_tell_sizes_and_what_leaves():
    made = columns([gelu_of_sum()], [[1e-6, 2e-6]])
    assert [WORDS[o] for o in made.op] == ["fresh", "input", "add", "gelu"]
    assert made.writes.tolist() == [0, 0, 0, 64 * 32 * 4]
    assert made.pattern.tolist() == [0, 1, 0]
    assert made.seconds[2:].tolist() == [1e-6, 2e-6]
    assert {DTYPES[d] for d in made.dtype} == {"fp32"}


def test_columns_tell_reductions():
    entry = Entry((8, 16), (16, 1), "float32")
    across = Op("aten.sum.dim_IntList", [["%", 0, -1], [0]], {})
    softmax = Op("aten._softmax.default", [["%", 0, -1], -1, False], {})
    nodes, _ = described(Region("test", (entry,), (across, softmax), ((1, -1), (2, -1))))
    inner, apart = [n[4] for n in nodes[1:]], [n[5] for n in nodes[1:]]
    assert inner == [8.0, 16.0]
    assert apart == [1, 0]


def some(values, step):
    """Every so many of some values; the others are slow together."""
    return [
        v if k % step == 0 else pytest.param(v, marks=pytest.mark.slow)
        for k, v in enumerate(values)
    ]


@pytest.mark.parametrize("name", some(sorted(MODELS), 8))
def test_every_model_is_captured_and_cut(name):
    net = net_of(name, "amp")
    kinds = set(net.kinds)
    assert "pointwise" in kinds
    assert "template" in kinds
    found = list(regions(net, Random(0), name, 12))
    assert found
    for region in found:
        assert region.family == name
        assert region.outputs
        assert all(is_fusible(kind_of(word_of(op.name))) for op in region.ops)


def test_regions_are_convex():
    net, chance = net_of("bert"), Random(1)
    starts = [i for i, k in enumerate(net.kinds) if k == "pointwise"]
    for _ in range(60):
        chosen = grow(net, chance.choice(starts), 12, chance, loose=True)
        inside = sum(1 << i for i in chosen)
        for i in range(len(net.kinds)):
            if i not in chosen and net.ancestors[i] & inside:
                assert not any(net.ancestors[c] >> i & 1 for c in chosen)


def test_a_product_begins_its_region():
    net, chance = net_of("gpt2"), Random(2)
    products = [i for i, k in enumerate(net.kinds) if k == "template"]
    for _ in range(30):
        start = chance.choice(products)
        region = cut(net, grow(net, start, 8, chance, loose=False), "gpt2")
        products_in = [op for op in region.ops if kind_of(word_of(op.name)) == "template"]
        assert len(products_in) == 1


@pytest.mark.parametrize("seed", some(range(4), 2))
def test_drawn_regions_run(seed):
    found = [r for r in drawn(Random(seed), 12) if _elements(r) < 2e6]
    for region in found:
        entries = [real_entry(e, "cpu") for e in region.entries]
        with torch.no_grad():
            outs = graph_of(region, "cpu")(*entries)
        assert len(outs) == len(region.outputs)


def _elements(region: Region) -> float:
    return sum(np.prod(e.shape, dtype=float) for e in region.entries)


def test_references_see_into_lists():
    assert references([["%", 1, -1], [["%", 2, 0]], {"a": ["%", 3, -1]}, 4]) == [
        (1, -1),
        (2, 0),
        (3, -1),
    ]


def test_held_out_models_exist():
    assert set(HELD_OUT) < set(MODELS)


@pytest.mark.parametrize(
    "name", some(["maxvit", "generator", "palm", "sru", "critic", "arriving", "electra", "sage"], 3)
)
def test_wider_models_are_cut_to_regions(name):
    net = Net(capture_step(partial(MODELS[name], Random(1), "amp")))
    found = list(regions(net, Random(2), name, 6))
    assert found
    assert len(columns(found)) == len(found)


def test_an_update_is_cut_from_the_backward_pass_of_its_layer():
    words = set()
    for seed in range(24):  # enough that each of the four updates is drawn
        net = Net(capture_step(partial(MODELS["optimizer"], Random(seed), "amp")))
        words |= {word_of(s.name) for s in net.captured.steps}
    assert {"lerp", "addcdiv", "sign", "linalg_vector_norm", "rsqrt"} < words


def test_a_region_that_eager_mode_refuses_gives_no_row():
    row = {"s": 1e-6, "spread": 0.0, "kernels": 1}
    turned, flat = Entry((4, 8), (1, 4), "float32"), Entry((4, 8), (8, 1), "float32")
    view = Op("aten.view.default", [["%", 0, -1], [32]], {})
    rows = [
        list(gather._region(Region("a", (e,), (view,), ((1, -1),)), row)) for e in (turned, flat)
    ]
    assert [len(r) for r in rows] == [0, 1]


def test_images_drawn_narrow_are_not_pooled():
    narrow = torch.zeros(2, 3, 28, 1)
    program = draw.Program(Random(1))
    shapes = {tuple(draw._resize(program, narrow).shape) for _ in range(20)}
    assert shapes == {(2, 3, 56, 2)}


def test_more_of_a_family_means_none_of_models_kept_out():
    weights = {name: make._weight(name, ["twins"]) for name in MODELS}
    assert weights["twins"] > weights["resnet"] > weights["swin"] == 0
    assert make._weight("swin", ()) > 0


@pytest.mark.slow
def test_named_families_alone_come_in_turn(tmp_path):
    path, names = tmp_path / "r.txt.gz", ["crf", "nbeats", "arcface"]
    count = make.make_only(path, 40, 1, names)
    families = [loads(line).family for line in read_regions(str(path))]
    assert count == len(families) >= 40
    assert set(families) == set(names)
    assert set(families[: 3 * make._PIECE]) == set(names)
    assert make.make_only(tmp_path / "again.txt.gz", 40, 1, names) == count
    assert (tmp_path / "again.txt.gz").read_bytes() == path.read_bytes()


def test_there_are_kinds():
    assert len(KINDS) == 13


@pytest.mark.parametrize("name", ["resnett", "llama"])
def test_a_family_that_is_unknown_or_kept_out_is_refused(tmp_path, capsys, name):
    for option in ("--only", "--more-of"):
        assert main(["make", "-o", str(tmp_path / "r.gz"), option, name]) == 2
        assert f"`{name}`" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
