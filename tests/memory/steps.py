"""Recorded calls of a small step, made by hand: so many layers, forward, backward, update."""

from foretell.graph.graph import Phase
from foretell.memory.flow import ACCUMULATE, EVALUATE
from foretell.memory.tape import Call

BATCH, WIDTH = 1024, 256
ACTIVATION = BATCH * WIDTH * 4  # bytes
WEIGHT = WIDTH * WIDTH * 4


def call(name, *inputs, values=(), sequence=-1, phase=Phase.FORWARD, inner=()):
    """A call on float tensors of some sizes."""
    types = tuple("float" if d is not None else "" for d in inputs)
    dims = tuple(d or () for d in inputs)
    found = Call(name, dims, types, tuple(values), sequence, phase=int(phase))
    found.inner = list(inner)
    return found


def forward(layers):
    """Each layer multiplies by a weight and takes what is above zero, in place."""
    x, w = (BATCH, WIDTH), (WIDTH, WIDTH)
    for k in range(layers):
        yield call("t", w, sequence=10 * k, inner=())
        yield call("mm", x, w, sequence=10 * k + 1)
        yield call("relu_", x, sequence=10 * k + 2)


def node(name, sequence, *inputs, inner=(), behind=()):
    """A backward node with the calls inside it and those the engine makes behind it."""
    function = call(name, *inputs, sequence=sequence, phase=Phase.BACKWARD, inner=inner)
    return call(EVALUATE + name, sequence=sequence, phase=Phase.BACKWARD,
                inner=[function, *behind])  # fmt: skip


def stored(*inputs):
    return call(EVALUATE + ACCUMULATE, phase=Phase.BACKWARD,
                inner=[call(ACCUMULATE, *inputs, phase=Phase.BACKWARD)])  # fmt: skip


def backward(layers):
    x, w = (BATCH, WIDTH), (WIDTH, WIDTH)
    back = Phase.BACKWARD
    yield node("SumBackward0", 10 * layers, inner=[
        call("expand", x, phase=back), call("mul", x, phase=back),
    ])  # fmt: skip
    for k in reversed(range(layers)):
        yield node("ReluBackward0", 10 * k + 2, x, inner=[
            call("threshold_backward", x, x, phase=back),
        ])  # fmt: skip
        products = [call("mm", (WIDTH, BATCH), x, phase=back)]
        if k:  # the input of the step needs no gradient
            products.append(call("mm", x, w, phase=back))
        yield node("MmBackward0", 10 * k + 1, x, inner=products)
        yield node("TBackward0", 10 * k, w, inner=[call("t", w, phase=back)])
        yield stored(w)


def update(layers, ops):
    """An optimizer that loops over parameters; `ops` are its operators and their inputs."""
    w = (WIDTH, WIDTH)
    for _ in range(layers):
        for name, count in ops:
            yield call(name, *[w] * count, phase=Phase.UPDATE)


SGD = (("mul_", 1), ("add_", 2), ("add_", 2))
ADAM = (("lerp_", 2), ("mul_", 1), ("addcmul_", 3), ("sqrt", 1), ("div", 1), ("add_", 1),
        ("addcdiv_", 3))  # fmt: skip


def step(layers=4, optimizer=SGD):
    """All calls of a step: layers, a sum, their backward, the optimizer."""
    loss = call("sum", (BATCH, WIDTH), sequence=10 * layers, phase=Phase.LOSS)
    return [*forward(layers), loss, *backward(layers), *update(layers, optimizer)]
