"""What the host spends on an optimizer's loop, and on the few kernels in its place."""

import pytest

from foretell.cost.price import constants
from foretell.graph import Builder
from foretell.graph.graph import Kind
from foretell.whatif import Setting, parse
from foretell.whatif.optimizer import loops

TENSORS = 100
ADAM = ("lerp_", "mul_", "addcmul_", "sqrt", "div", "add_", "addcdiv_")
SGD = ("add_", "add", "add_")


def looped(ops, seconds):
    """A step of one product whose optimizer goes from parameter to parameter."""
    step = Builder()
    thread, stream = step.lane("host", kind="host"), step.lane("stream")
    call = step.task(kind="host", lane=thread, op="mm", phase="forward", seconds=1e-5)
    step.task(kind="kernel", lane=stream, op="mm", phase="forward", seconds=1e-4, after=[call])
    for op in ops * TENSORS:
        own = {"op": op, "phase": "update", "shape": "in=64x64+64x64,types=float+float"}
        call = step.task(kind="host", lane=thread, seconds=seconds, **own)
        step.task(kind="kernel", lane=stream, seconds=2e-6, after=[call], **own)
    return step.graph()


def host_seconds(graph):
    mine = (graph.kind == Kind.HOST) & (graph.phase == graph.phase[graph.order.argmax()])
    return float(graph.seconds[mine].sum())


@pytest.mark.parametrize(("ops", "sort"), [(ADAM, "adam"), (SGD, "sgd")])
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_the_host_spends_what_was_measured_of_each_optimizer(ops, sort, how):
    usual = looped(ops, constants()["chain"]["update"])
    after = parse(f"{how}-optimizer").apply(usual, Setting())
    start, each = constants()["update"][f"{sort}-{how}"]
    assert host_seconds(after) == pytest.approx(start + each * TENSORS)


def test_a_host_is_as_slow_as_its_loop():
    quick, slow = (loops(looped(ADAM, seconds))[0] for seconds in (1e-5, 2e-5))
    assert slow.issuing("fused") == pytest.approx(2 * quick.issuing("fused"))
