"""Attention of a captured step, where the library of the model makes its masks."""

import pytest

from foretell.cluster.read import devices
from foretell.cost import kernel
from foretell.whatif import Setting, parse
from tests.whatif.traced import KERNEL, Step

SIDES = "32x12x128x64"
SIZES = "b=32,heads=12,sq=128,sk=128,d=64"


def call(mask="-", dropout="0.1", causal="False", scale="0.125"):
    """cuDNN's attention as a trace has it: queries, keys, values, mask, and nine more."""
    args = f"-+-+-+-+-+-+128+128+True+{dropout}+{causal}+False+{scale}"
    half = "+".join(["c10::BFloat16"] * 3)
    return f"in={SIDES}+{SIDES}+{SIDES}+{mask}+-+-+-+-+-+-+-+-+-,types={half},args={args}"


def captured(shape, *, words=True, seconds=1e-5):
    """The step's attention behind a capture: how many kernels are left of three, and their time."""
    s = Step()
    for part in (1e-6, 1e-6, seconds - 2e-6):
        s.op("_cudnn_attention_forward", shape, seconds=part, dtype="bf16")
    s.op("addmm", "in=768+4096x768+768x768")
    if words:
        s.op("embedding_dense_backward", "in=4096x768+4096")
    after = parse("cuda-graph").apply(s.graph(), Setting())
    left = after.select(kind="kernel", op="_cudnn_attention_forward")
    return len(left), float(after.seconds[left].sum())


def test_both_ways_it_is_written_out():
    """277 µs on an H200, a layer of BERT; an A100 has two fifths of its memory's speed."""
    count, seconds = captured(call())
    assert count == 1
    assert 400e-6 < seconds < 800e-6
    assert captured(call(dropout="0."))[1] < seconds


def test_what_takes_longer_than_written_out_stays():
    assert captured(call(), seconds=1e-2) == (1, pytest.approx(1e-2))


def test_a_causal_flag_becomes_a_mask_on_all_scores():
    count, seconds = captured(call(causal="True"))
    answer = f"{SIZES},dropout=1,direction=fwd,causal="
    price = kernel.seconds(devices()["a100-80"], "attention", "bf16", [answer + "1", answer + "0"])
    assert count == 1
    assert seconds == pytest.approx(1e-5 * price.seconds[1] / price.seconds[0])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (call(scale="-"), True),
        (call(mask="32x1x128x128"), True),
        (call(), False),
        (call().replace(SIDES, "32x12x1500x64"), True),
    ],
    ids=["PyTorch's own layers", "a mask already", "no words", "sounds beside words"],
)
def test_others_stay_as_they_are(shape, words):
    assert captured(shape, words=words) == (3, pytest.approx(1e-5))


def test_other_kernels_stay_as_they_are():
    s = Step()
    s.op("_cudnn_attention_forward", call(), dtype="bf16")
    s.op("addmm", "in=768+4096x768+768x768")
    s.op("embedding_dense_backward", "in=4096x768+4096")
    after = parse("cuda-graph").apply(s.graph(), Setting())
    assert after.seconds[after.select(kind="kernel", op="addmm")] == pytest.approx(KERNEL)
