"""A tape from the recorded calls of one step: parameters, forward, backward, update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from foretell.graph.graph import NONE, BufferKind, Phase
from foretell.memory.flow import ACCUMULATE, EVALUATE, Flow
from foretell.memory.tape import BY_BLOCK, FORWARD, Call, Dims, Op, Storage, Tape
from foretell.operators import having

_GEMMS = [op for op, rule in having("makes").items() if rule.startswith("product")]
# Bytes of a cuBLAS workspace on devices of compute capability 9 (PyTorch documentation, CUDA
# semantics: cuBLAS workspaces), one for every thread that multiplies.
GEMM_WORKSPACE = 32.0 * 2**20
_SCALE = 6  # the place of an attention's scale


def tape_of(calls: Sequence[Call], *, is_zeroed_first: bool = True) -> Tape | None:
    """The tape of a step's calls; none where sizes or a backward pass are not recorded.

    `is_zeroed_first` says that the gradients of the step before are gone when the forward begins.
    """
    gradients = _gradients(calls)
    if not gradients:
        return None
    nodes = {c.sequence: c for c in calls if c.name.startswith(EVALUATE) and c.sequence != NONE}
    flow = Flow(gradients, nodes)
    for call in calls:
        known = (Phase.BACKWARD, Phase.UPDATE, Phase.LOSS)
        flow.phase = call.phase if call.phase in known else int(Phase.FORWARD)
        if call.name.startswith(EVALUATE):
            flow.phase = int(Phase.BACKWARD)
        if flow.phase != Phase.UPDATE:
            flow.visit(call)
    storages, ops = flow.storages, flow.ops
    _unused_parameters(flow, storages)
    storages = _batch_dependent(flow, storages, ops, gradients)
    storages, ops = _with_optimizer(calls, storages, ops, gradients)
    notes = (BY_BLOCK,) if any(map(_is_scaled, calls)) else ()
    return Tape(tuple(storages), tuple(ops), _libraries(calls), is_zeroed_first, notes)


def _is_scaled(call: Call) -> bool:
    """Whether some attention in a call is given a scale; PyTorch's own layers leave it out."""
    some = (c for c in call.walk() if c.name == "scaled_dot_product_attention")
    return any(len(c.values) > _SCALE and c.values[_SCALE] not in ("", "None") for c in some)


def _gradients(calls: Sequence[Call]) -> list[Dims]:
    """Sizes of all gradients that are stored with parameters, in their order."""
    found = []
    for call in calls:
        if call.name == EVALUATE + ACCUMULATE:
            key = (call.inner[0] if call.inner else call).tensor(0)
            if key is not None:
                found.append(key[0])
    return found


def _unused_parameters(flow: Flow, storages: list[Storage]) -> None:
    """Parameters that no forward op was seen to read are there all the same."""
    for dims, left in flow.left.items():
        for _ in range(max(left, 0)):
            flow.storage((dims, "float"), BufferKind.PARAMETER)


def _batch_dependent(
    flow: Flow, storages: list[Storage], ops: Sequence[Op], gradients: Sequence[Dims]
) -> list[Storage]:
    """Storages with a mark on those whose size follows the batch.

    Those are what depends on the batch and, in the backward pass, all but what is as large as some
    parameter.
    """
    follows = _batch_storages(flow, storages, [o for o in ops if o.phase in FORWARD])
    like = {_plain(d) for d in gradients}
    back = {k for o in ops if o.phase == Phase.BACKWARD for k in o.makes}
    follows |= {k for k in back if _plain(flow.sizes[k]) not in like}
    own = (BufferKind.PARAMETER, BufferKind.GRADIENT)
    return [replace(s, grows=k in follows and s.kind not in own) for k, s in enumerate(storages)]


def _plain(dims: Dims) -> Dims:
    """Sizes in whatever order, as views and transposes leave them."""
    return tuple(sorted(n for n in dims if n > 1))


def _batch_storages(flow: Flow, storages: Sequence[Storage], forward: Sequence[Op]) -> set[int]:
    """Storages that depend on the batch.

    The batch is the leading size of the input on which most of what is made depends.
    """
    inputs = [k for k, s in enumerate(storages) if s.kind == BufferKind.INPUT and flow.sizes[k]]
    below = {k: _derived_from(k, forward) for k in inputs}
    if not inputs:
        return set()
    first = max(inputs, key=lambda k: sum(storages[s].bytes for s in below[k]))
    batch = flow.sizes[first][0]
    alike = [k for k in inputs if batch > 1 and flow.sizes[k][0] % batch == 0]
    return set().union(*(below[k] for k in {first, *alike}))


def _derived_from(root: int, ops: Sequence[Op]) -> set[int]:
    """A storage and all that is made from it, or written to by an operator in place."""
    found = {root}
    for o in ops:
        if not found.isdisjoint(o.reads):
            found.update(o.makes or o.reads[:1])
    return found


def _with_optimizer(
    calls: Sequence[Call], storages: list[Storage], ops: list[Op], gradients: Sequence[Dims]
) -> tuple[list[Storage], list[Op]]:
    """With the optimizer's state, and what its loop makes on the way."""
    update = [c for call in calls if call.phase == Phase.UPDATE for c in call.walk()]
    names = Counter(c.name for c in update)
    states = _states(names, len(gradients))
    storages, ops = list(storages), list(ops)
    for dims in gradients:
        storages += [Storage(prod(dims), 4, int(BufferKind.OPTIMIZER))] * states
    ops += list(_temporaries(update, storages))
    return storages, ops


def _states(names: Counter[str], parameters: int) -> int:
    """Numbers that the optimizer keeps for each number of a parameter."""

    def has(word: str) -> bool:
        return any(word in name for name in names)

    if has("fused_adam"):
        return 2
    if has("fused_sgd") or has("fused_adagrad"):
        return 1
    if has("addcmul"):
        decayed = has("lerp") or names["mul_"] >= 2 * parameters
        return 1 + decayed + has("maximum")
    return int(has("mul_"))


def _temporaries(update: Sequence[Call], storages: list[Storage]) -> Iterator[Op]:
    """Temporary tensors of an optimizer per parameter: Adam's denominator and the like.

    A result is there until the next of the same operator takes its place, as a Python name keeps
    it; what only the next operator reads goes with that.
    """
    from foretell.memory.outputs import broadcast

    held: dict[str, int] = {}
    for call in update:
        if call.name not in ("sqrt", "div", "add", "mul", "neg") or call.inner:
            continue
        keys = broadcast(call)
        if not keys or not keys[0][0]:
            continue
        storages.append(Storage(prod(keys[0][0]), 4, int(BufferKind.WORKSPACE)))
        new = len(storages) - 1
        before = tuple(v for k, v in held.items() if k in (call.name, "sqrt"))
        held[call.name] = new
        if call.name == "div":
            held.pop("sqrt", None)
        yield Op(call.name, int(Phase.UPDATE), NONE, before, (new,))


def _libraries(calls: Sequence[Call]) -> float:
    """Bytes that cuBLAS holds: a workspace for each thread that multiplies matrices."""
    phases = {c.phase == Phase.BACKWARD for call in calls for c in call.walk() if c.name in _GEMMS}
    return GEMM_WORKSPACE * len(phases)
