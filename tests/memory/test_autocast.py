"""A plain step put under autocast holds what the trace of the step under autocast holds."""

from pathlib import Path

import pytest

from foretell.memory.change import half_precision, written_out
from foretell.memory.tape import FACT, Op, decode, peak_bytes
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
    assert written_out([*forward, *back, Op("sum", 4, 6)]).wide == {0, 3}
    assert written_out([*forward, *back, Op("mul", 4, 6)]).gone == {2}
