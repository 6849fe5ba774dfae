"""A plain step put under autocast holds what the trace of the step under autocast holds."""

from pathlib import Path

import pytest

from foretell.graph.graph import BufferKind
from foretell.memory.change import Autocast, half_precision, written_attention
from foretell.memory.tape import FACT, Op, Storage, Tape, decode, peak_bytes
from foretell.trace import read

MEASURED = Path(__file__).parents[2] / "benchmarks" / "measured" / "h200"
TRUTH = Path(__file__).parents[2].parent / "shared" / "truth" / "h200"


def tape(path):
    return decode(read(path).graph.facts[FACT])


def off(before, after):
    return peak_bytes(half_precision(tape(before))) / peak_bytes(tape(after)) - 1


# A cross entropy keeps its format (distilbert, rnnlm) unless the model asks for fp32 before it
# (llama); attention written out becomes one kernel (llama) unless its bias is learned (t5).
@pytest.mark.parametrize(
    ("model", "bound"),
    [("distilbert", 0.005), ("densenet121", 0.005), ("rnnlm", 0.01), ("encoder", 0.015),
     ("llama_110m", 0.01), ("t5_small", 0.005), ("convnext_tiny", 0.005), ("vit_b_16", 0.035)],
)  # fmt: skip
def test_autocast_of_a_plain_step(model, bound):
    own = MEASURED / f"{model}.base.json.gz"
    before = own if own.exists() else MEASURED / "half" / f"{model}.base.json.gz"
    assert abs(off(before, MEASURED / "half" / f"{model}.amp_bf16.json.gz")) <= bound


@pytest.mark.truth
@pytest.mark.skipif(not TRUTH.is_dir(), reason="no folder of measured data beside the project")
@pytest.mark.parametrize("model", ["bert_base", "gpt2", "resnet50", "swin_t", "vgg16", "dlrm"])
def test_autocast_of_a_shared_step(model):
    assert abs(off(TRUTH / f"{model}.base.json.gz", TRUTH / f"{model}.amp_bf16.json.gz")) <= 0.002


def test_attention_with_a_learned_bias_stays_wide():
    forward = [Op("bmm"), Op("add"), Op("_safe_softmax", node=7), Op("bmm")]
    back = [Op("_softmax_backward_data", 4, 7), Op("SafeSoftmaxBackward0", 4, 7, ends=True)]
    assert written_attention([*forward, *back, Op("sum", 4, 6)]).wide == {0, 3}
    assert written_attention([*forward, *back, Op("mul", 4, 6)]).gone == {2}


def follow(ops, storages):
    found = Autocast(Tape(tuple(storages), tuple(ops)))
    found.run()
    return found.decisions


INPUT, WEIGHT, MADE = (Storage(64.0, kind=int(k)) for k in (
    BufferKind.INPUT, BufferKind.PARAMETER, BufferKind.ACTIVATION))  # fmt: skip


def test_a_parameter_is_cast_once_and_its_gradient_cast_back():
    ops = [Op("mm", node=1, reads=(0, 1), makes=(2,)), Op("mm", node=2, reads=(2, 1), makes=(3,))]
    first, second = follow(ops, [INPUT, WEIGHT, MADE, MADE])
    assert [(c.of_parameter, c.has_gradient) for c in first.casts] == [(False, False), (True, True)]
    assert second.casts == ()


def test_without_gradients_a_parameter_read_again_is_another_networks():
    """Q-learning reads a network of one shape three times: twice its own, once its target's."""
    reads = [Op("mm", node=1, reads=(0, 1), makes=(2,))]
    reads += [Op("mm", reads=(0, 1), makes=(3 + k,)) for k in range(2)]
    own, ahead, target = follow(reads, [INPUT, WEIGHT, MADE, MADE, MADE])
    weights = [[c for c in d.casts if c.of_parameter] for d in (own, ahead, target)]
    assert [len(w) for w in weights] == [1, 0, 1]
    assert not weights[2][0].has_gradient


def test_the_gradient_of_a_sum_of_both_formats_is_cast_for_the_narrow_one():
    ops = [
        Op("native_layer_norm", node=1, reads=(0,), makes=(2,)),
        Op("mm", node=2, reads=(2, 1), makes=(3,)),
        Op("add", node=3, reads=(2, 3), makes=(4,)),
    ]
    total = follow(ops, [INPUT, WEIGHT, MADE, MADE, MADE])[-1]
    assert total.is_mixed
    assert total.returned == (64.0,)


def test_what_an_index_adds_to_keeps_its_format():
    ops = [
        Op("mm", node=1, reads=(0, 1), makes=(2,)),
        Op("index_add", node=2, reads=(2, 0), makes=(3,)),
    ]
    assert follow(ops, [INPUT, WEIGHT, MADE, MADE])[-1].is_narrow


MODELS = ("conformer", "dqn", "latent_diffusion", "molecules", "segformer", "slowfast", "switch")


@pytest.mark.parametrize("model", MODELS)
def test_as_many_casts_as_the_trace_under_autocast_has(model):
    folder = MEASURED.parent / "blind" / "h200"
    plain, half = (read(folder / f"{model}.{v}.json.gz").graph for v in ("base", "amp_bf16"))
    copies = [len(g.select(kind="kernel", op="copy_", phase="forward")) for g in (plain, half)]
    found = Autocast(decode(plain.facts[FACT]))
    found.run()
    casts = sum(c.elements > 1 for d in found.decisions for c in d.casts)
    assert casts == pytest.approx(copies[1] - copies[0], rel=0.25)


def test_a_copy_for_the_layout_goes_where_a_cast_makes_one():
    """A cast makes its result dense; what half precision reads as it is, is copied as before."""
    copy = Storage(32.0, kind=int(BufferKind.WORKSPACE))
    ops = [Op("convolution", 2, 1, (0, 1), (2, 3)), Op("convolution", 2, 2, (2, 1), (4, 5))]
    first, second = (d.op for d in follow(ops, [INPUT, WEIGHT, MADE, copy, MADE, copy]))
    assert (first.makes, second.makes) == ((2,), (4, 5))


def test_images_are_enlarged_in_fp32():
    ops = [Op("convolution", 2, 1, (0, 1), (2,)), Op("upsample_bilinear2d", 2, 2, (2,), (3,))]
    large = follow(ops, [INPUT, WEIGHT, MADE, MADE])[1]
    assert not large.is_narrow
    assert [c.to_half for c in large.casts] == [False]
