"""Recorded operator calls made into storages and the ops on them.

A call that a rule knows is one op; any other is made of the calls inside it. In the backward pass
an operator that only passes its gradient on gives it to as many as it had inputs. What is stored
with a parameter is its gradient, and the sizes of those are the sizes of the parameters.

A trace records sizes, not identities. An input is taken for the tensor of its size and format that
was made last and not used yet, or else for the last of all; views share the storage of what they
view. Where this mistakes one tensor for another of the same size, the sum of what is held is the
same. In the backward pass a gradient is taken by one reader each (`tokens`), and a node is given
or has made itself all that it reads but what was saved for it.

What an operator saves for its backward follows PyTorch's derivative formulas
(tools/autograd/derivatives.yaml): a formula that reads `self` saves the input, one that reads
`result` the output. Where two inputs are multiplied each is saved for the gradient of the other,
so only if the other needs one. Numbers are places among the inputs; `out` marks results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from foretell.graph.graph import NONE, BufferKind, Phase
from foretell.memory.outputs import RULES, broadcast, workspace
from foretell.memory.recurrent import ALIASES
from foretell.memory.recurrent import BACKWARD as RECURRENT_BACKWARD
from foretell.memory.tape import FLOATS, ITEMS, WIDENED, Call, Dims, Key, Op, Storage
from foretell.operators import having, places


@dataclass(frozen=True)
class Kept:
    """Saved for backward: inputs, results, and pairs of inputs saved for each other."""

    inputs: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    pair: tuple[int, int] | None = None
    lists: bool = False  # the parameters given as a list, too

    @classmethod
    def read(cls, text: str) -> Kept:
        """`in 0 1, out 0`, `pair 0 1` or `nothing`, as the table of operators says it."""
        fields = dict(part.partition(" ")[::2] for part in text.split(", "))
        pair = places(fields.get("pair", ""))
        inputs, out = (places(fields.get(key, "")) for key in ("in", "out"))
        return cls(inputs, out, (pair[0], pair[1]) if pair else None, "lists" in fields)


_NOTHING = Kept()
KEPT = {name: Kept.read(text) for name, text in having("saves").items()}

# In place, these have formulas that read their result; others that read their input copy it first.
OF_RESULT = frozenset({"leaky_relu", "hardtanh"})


# Inputs that are parameters whatever else has their size.
_PARAMETERS = {name: places(text) for name, text in having("parameters").items()}
_FORMULA = 6  # tensors that a backward node makes, from which on it is a formula of several steps
_LOOK_BACK = 24  # tensors of one size among which an input is looked for


@dataclass(slots=True, eq=False)
class Tensor:
    """A view of a storage."""

    storage: int
    needs: bool = False  # a gradient
    uses: int = 0
    tokens: int = 1  # readers that a gradient still has
    scaled: Tensor | None = None  # of which it is a scaled copy
    is_renamed: bool = False  # the model went on without it, or with a view of it
    by: str = ""  # the operator that made it
    is_reduced: bool = False  # a sum over some of its dims has read it
    part_of: int = NONE  # the larger storage of which it is one part
    beside: int = NONE  # the larger storage of which one part was made into it


class Tensors:
    """All tensors met so far, by size and format."""

    def __init__(self, gradients: Iterable[Dims]) -> None:
        self.storages: list[Storage] = []
        self.sizes: list[Dims] = []
        self.left = Counter(gradients)  # parameters not met yet, by size
        self.known: dict[Dims, Tensor] = {}  # the last parameter of each size
        self.kept: set[int] = set()  # storages
        self.forward: dict[Key, list[Tensor]] = {}
        self.backward: dict[Key, list[Tensor]] = {}
        self.inside: dict[Key, list[Tensor]] = {}  # of the backward node at hand
        self.phase = int(Phase.FORWARD)
        self.summed = 0  # the storage of the last sum of two tensors

    # What is made

    def storage(self, key: Key, kind: int = BufferKind.ACTIVATION) -> int:
        """A new storage; its number."""
        dims, dtype = key
        size = ITEMS.get(dtype, 4)
        self.storages.append(Storage(prod(dims), size, int(kind), dtype in FLOATS))
        self.sizes.append(dims)
        return len(self.storages) - 1

    def made(self, key: Key, needs: bool = False, storage: int = NONE) -> Tensor:
        """A new tensor that others can find; of a new storage where none is named."""
        tensor = Tensor(self.storage(key) if storage == NONE else storage, needs)
        self.add(key, tensor)
        return tensor

    def add(self, key: Key, tensor: Tensor) -> None:
        """Let others find a tensor under a size and format."""
        if self.phase == Phase.BACKWARD:
            self.backward.setdefault(key, []).append(tensor)
            self.inside.setdefault(key, []).append(tensor)
        else:
            self.forward.setdefault(key, []).append(tensor)

    # Which tensor an input is

    def given(self, call: Call, k: int, taken: Sequence[Tensor]) -> Tensor | None:
        """The tensor that is an input of a call; in the backward pass none where it was kept."""
        key = call.tensor(k)
        if key is None or not key[0] or k in ALIASES.get(call.name, ()):
            return None
        if self.phase == Phase.BACKWARD:
            return self.gradient(key, taken)
        is_own = k in _PARAMETERS.get(call.name, ()) and self.left[key[0]] > 0
        if is_own and not self.was_cast(key):
            return self.parameter(key)
        is_sum = KEPT.get(call.name) == _NOTHING and bool(taken)
        found = self.found(key, taken, is_sum=is_sum)
        if found is not None and found.beside != NONE and len(call.tensors()) == 1:
            found = self.sibling(key, found)
        is_data = call.name in _PARAMETERS and k not in _PARAMETERS[call.name]
        return found or self.external_tensor(key, is_data=is_data)

    def sibling(self, key: Key, other: Tensor) -> Tensor:
        """The unread part beside the one that was made into another: gates are made one by one."""
        near = reversed(self.forward.get(key, ())[-_LOOK_BACK:])
        parts = (t for t in near if t.part_of == other.beside and not t.uses)
        return next(parts, other)

    def found(self, key: Key, taken: Sequence[Tensor], *, is_sum: bool = False) -> Tensor | None:
        """The tensor of a size: the last unused one, else the last of that first name.

        What is added to something else is rather kept (a residual) than thrown away or a scaled
        copy, which that was made to multiply with.
        """
        near = _excluding(self.forward.get(key, ())[-_LOOK_BACK:], taken)
        best = [t for t in near if not t.uses and not (is_sum and t.scaled)]
        near = [t for t in near if not t.is_renamed] or near
        best = best or (self.residual_input(near) if is_sum else self.saved_earlier(near)) or near
        if best:
            return best[0]
        return taken[-1] if taken and self.sizes[taken[-1].storage] == key[0] else None

    def residual_input(self, near: Sequence[Tensor]) -> list[Tensor]:
        """The first saved tensor since the last residual sum: a block's input."""
        kept = [t for t in near if t.storage in self.kept]
        return sorted((t for t in kept if t.storage >= self.summed), key=_number) or kept

    def saved_earlier(self, near: Sequence[Tensor]) -> list[Tensor]:
        """Earlier inputs that are held anyway; those of a sum are not."""
        return [t for t in near if t.storage in self.kept] if near and near[0].is_reduced else []

    def was_cast(self, key: Key) -> bool:
        """Whether the last tensor of the size is a copy that autocast made for what comes now."""
        met = self.forward.get(key, [])
        return bool(met) and met[-1].by == "_to_copy" and not met[-1].uses

    def parameter(self, key: Key) -> Tensor:
        """A parameter met for the first time; the last of its size where all have been met."""
        if self.left[key[0]] > 0 or key[0] not in self.known:
            self.left[key[0]] -= 1
            self.known[key[0]] = Tensor(self.storage(key, BufferKind.PARAMETER), needs=True)
        return self.known[key[0]]

    def external_tensor(self, key: Key, *, is_data: bool = False) -> Tensor:
        """A tensor that no op made: a parameter, a buffer of the model or an input of the step.

        What the first of all operators has in the place of its data is no parameter.
        """
        is_input = is_data and not self.forward
        if not is_input and (key[0] in self.known or self.left[key[0]] > 0):
            return self.parameter(key)
        return self.made(key, storage=self.storage(key, BufferKind.INPUT))

    def list_inputs(self, call: Call, taken: Sequence[Tensor]) -> list[Tensor]:
        """Inputs that come as a list of tensors; their format is that of what is there."""
        found: list[Tensor] = []
        if self.phase != Phase.BACKWARD and KEPT.get(call.name, _NOTHING).lists:
            return [self.parameter((d, "float")) for d, t in call.tensors() if d and not t]
        where = self.gradient if self.phase == Phase.BACKWARD else self.found
        for sizes, dtype in call.tensors():
            if dtype or not sizes:
                continue
            each = (where((sizes, kind), [*taken, *found]) for kind in FLOATS)
            found += [t for t in each if t is not None][:1]
        return found

    # Gradients

    def gradient(self, key: Key, taken: Sequence[Tensor]) -> Tensor | None:
        """In a backward node: the last of the size that it was given or made."""
        return next(iter(_excluding(self.inside.get(key, ()), taken)), None)

    def pending_gradient(self, key: Key, *besides: Tensor | None) -> Tensor | None:
        """The last gradient of the size that some node still has to read."""
        near = reversed(self.backward.get(key, ())[-_LOOK_BACK:])
        return next((t for t in near if t.tokens > 0 and t not in besides), None)


def _number(tensor: Tensor) -> int:
    return tensor.storage


def _excluding(tensors: Sequence[Tensor], taken: Sequence[Tensor]) -> list[Tensor]:
    """The last first, without some."""
    return [t for t in reversed(tensors) if t not in taken]


EVALUATE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
_SIZED_VIEWS, _PLAIN_VIEWS = having("views", "sized"), having("views", "plain")
_CASTS, _SUMS = ("to", "float"), ("add", "add_")
_SCALES = ("mul", "div")  # by a number, where there is one tensor only
_HANDS_ON = re.compile(rf"{EVALUATE}(Add|Sub)Backward")  # one gradient for two inputs
_NODE = re.compile(r"Backward\d*$")


class Flow(Tensors):
    """Goes along the calls of a step and notes its storages and ops."""

    def __init__(self, gradients: Iterable[Dims], nodes: dict[int, Call]) -> None:
        super().__init__(gradients)
        self.ops: list[Op] = []
        self.nodes = nodes  # backward calls by sequence number
        self.node = NONE
        self.depth = 0  # operators around the one at hand
        self.copies = set[int]()  # that an operator makes of its inputs, for itself

    def visit(self, call: Call) -> None:
        """One call, or the calls inside it."""
        name = call.name
        if name.startswith(EVALUATE):
            self.evaluate(call)
        elif name == "t":
            turned = call.tensor(0)
            self.view(call, [*reversed(turned[0])] if turned else None)
        elif name in _SIZED_VIEWS and not call.inner:
            self.view(call, call.ints(1))
        elif name in _PLAIN_VIEWS and not call.inner:
            self.view(call, None)
        elif (name in RULES or name.rstrip("_") in KEPT) and not _wraps_itself(call):
            self.run(call)
        elif call.inner and not name.endswith("_"):
            self.depth += 1
            for inner in call.inner:
                self.visit(inner)
            self.depth -= 1
        else:
            self.run(call)

    def view(self, call: Call, sizes: list[int] | None) -> None:
        """Another look at a tensor, of other sizes maybe."""
        key, base = call.tensor(0), self.given(call, 0, [])
        if key is None or base is None:
            return
        base.uses += 1
        base.is_renamed |= self.depth == 0
        if call.name in _CASTS and call.code(1) == "float" and self.depth == 0:
            self.ops.append(Op(WIDENED, self.phase, NONE, (base.storage,)))
        dims = key[0] if sizes is None else _resolved_sizes(sizes, prod(key[0]))
        is_part = 0 < prod(dims) < prod(key[0])
        part_of = base.storage if is_part else base.part_of
        self.add((dims, key[1]), Tensor(base.storage, base.needs, part_of=part_of))
        if self.phase == Phase.BACKWARD:
            base.tokens = 0  # who reads it reads the view

    def run(self, call: Call) -> None:
        """An operator that reads and makes tensors itself."""
        places = self.places(call)
        taken = list(places.values())
        taken += self.list_inputs(call, taken)
        node = self.nodes.get(call.sequence) if self.phase != Phase.BACKWARD else None
        if node is not None and not _same_node(call.name, node.name):
            node = None
        first = call.tensor(0)
        if _in_place(call.name) and 0 in places and first is not None:
            makes, keeps = self.written(call, first, places, node)
        else:
            made = [self.made(key, needs=node is not None) for key in self.results(call, taken)]
            for tensor in made:
                tensor.by = call.name
            if call.name in _SCALES and len(taken) == len(made) == 1:
                made[0].scaled = taken[0]
            if len(taken) == len(made) == 1 and taken[0].part_of != NONE:
                made[0].beside = taken[0].part_of
            makes = tuple(t.storage for t in made)
            keeps = self.keeps(call, node, places, made) if node is not None else ()
            if keeps and KEPT.get(call.name, Kept()).lists:
                keeps += tuple(t.storage for t in taken if t not in places.values())
        for tensor in taken:
            tensor.uses += 1
            tensor.is_renamed |= (tensor.by, call.name) == ("pow", "mean")  # the mean is meant
            tensor.is_reduced |= call.name == "sum"
        if call.name in _SUMS and first is not None and first == call.tensor(1):
            self.summed = makes[0] if makes else taken[0].storage
        self.kept.update(keeps)
        copies = tuple(self.storage(key, BufferKind.WORKSPACE) for key in _copies(call))
        self.copies.update(copies)
        number = NONE if node is None else call.sequence
        self.note(call, taken, makes + copies, keeps, number)

    def note(
        self, call: Call, taken: Sequence[Tensor], makes: tuple[int, ...], keeps: tuple[int, ...],
        number: int,
    ) -> None:  # fmt: skip
        """The op of a call."""
        reads = tuple(dict.fromkeys(t.storage for t in taken))
        number = self.node if self.phase == Phase.BACKWARD else number
        size, where = workspace(call)
        self.ops.append(Op(call.name, self.phase, number, reads, makes, keeps, size, False, where))

    def places(self, call: Call) -> dict[int, Tensor]:
        """The tensors a call is given, by place among its inputs."""
        found: dict[int, Tensor] = {}
        for k in range(len(call.dims)):
            tensor = self.given(call, k, list(found.values()))
            if tensor is not None and tensor.scaled is not None and _keeps_input(call.name):
                tensor = tensor.scaled  # the copy is for what comes later
            if tensor is not None:
                found[k] = tensor
        return found

    def written(
        self, call: Call, key: Key, places: dict[int, Tensor], node: Call | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """An operator in place: what it makes and keeps. Its input, if kept, is copied before."""
        own = places[0]
        own.uses = -1  # as good as new
        own.needs |= node is not None
        self.add(key, own)
        if node is None:
            return (), ()
        plain = call.name.rstrip("_")
        if plain in OF_RESULT:
            return (), (own.storage,)
        if 0 in KEPT.get(plain, Kept()).inputs:
            copy = self.storage(key)
            return (copy,), (copy,)
        return (), self.keeps(call, node, places, [own])

    def results(self, call: Call, taken: Sequence[Tensor]) -> list[Key]:
        """Sizes and formats of what a call makes; of an unknown one as its gradients say."""
        if call.name in RULES:
            items = [self.storages[t.storage].item for t in taken]
            joined = "float" if not items or max(items) >= 4 else "c10::BFloat16"
            return [(dims, dtype or joined) for dims, dtype in RULES[call.name](call)]
        node = self.nodes.get(call.sequence) if self.phase != Phase.BACKWARD else None
        is_open = call.name not in KEPT or _is_size_unrecorded(call)
        if node is not None and is_open and _same_node(call.name, node.name):
            known = [t for t in (c.tensor(0) for c in node.inner) if t and t[0]]
            if known:
                return known[:1]
        return broadcast(call)

    def keeps(
        self, call: Call, node: Call, places: dict[int, Tensor], made: Sequence[Tensor]
    ) -> tuple[int, ...]:
        """Storages that a forward op keeps."""
        kept = KEPT.get(call.name.rstrip("_"))
        if kept is None:
            return self.read_by(node, places.values(), made)
        found = [places[k] for k in kept.inputs if k in places]
        found += [made[k] for k in kept.out if k < len(made)]
        if kept.pair:
            a, b = (places.get(k) for k in kept.pair)
            found += [t for t, o in ((a, b), (b, a)) if t is not None and o is not None and o.needs]
        return tuple(dict.fromkeys(t.storage for t in found))

    def read_by(
        self, node: Call, given: Iterable[Tensor], made: Iterable[Tensor]
    ) -> tuple[int, ...]:
        """Tensors that an operator without a rule saves: those its backward reads besides."""
        grads = {t for c in node.inner for t in c.tensors()}
        inputs = [t for c in node.inner for o in c.inner for t in o.tensors()]
        read = {t[0] for t in inputs if t not in grads}
        same = [t for t in [*given, *made] if self.sizes[t.storage] in read]
        return tuple(dict.fromkeys(t.storage for t in same))

    # The backward pass

    def evaluate(self, call: Call) -> None:
        """One backward node: takes its gradients, runs, lets go of what was kept, sends on."""
        self.node, self.inside = call.sequence, {}
        if call.name.endswith(ACCUMULATE):
            self.accumulate(call)
        elif call.inner:
            entered, before = self.enter(call.inner[0]), len(self.storages)
            for inner in call.inner[0].inner:
                self.visit(inner)
            name = call.name.removeprefix(EVALUATE)
            reads = tuple(t.storage for _, t in entered)
            made = [k for k in range(before, len(self.storages)) if k not in self.copies]
            reads += tuple(made) if len(made) >= _FORMULA else ()  # named values live to its end
            self.ops.append(Op(name, self.phase, self.node, reads, ends=True))
            is_same = all(self.inside[key][-1] is t for key, t in entered)
            if is_same and len(self.storages) == before:
                for _, tensor in entered:
                    tensor.tokens += 2 if _HANDS_ON.match(call.name) else 1
            for later in call.inner[1:]:
                self.sum_gradients(later)
        self.node = NONE

    def enter(self, function: Call) -> list[tuple[Key, Tensor]]:
        """The gradients a node is given."""
        entered = []
        for key in function.tensors():
            if key[0] and (tensor := self.pending_gradient(key)) is not None:
                tensor.tokens -= 1
                tensor.uses += 1
                entered.append((key, tensor))
                self.inside.setdefault(key, []).append(tensor)
        return entered

    def sum_gradients(self, call: Call) -> None:
        """Work of the engine after a node: sums over expanded dims, accumulated gradients."""
        key = call.tensor(0)
        if call.name not in ("add", "add_") or key is None or key != call.tensor(1):
            self.visit(call)
            return
        mine = self.gradient(key, [])
        both = [t for t in (mine, self.pending_gradient(key, mine)) if t is not None]
        for t in both:
            t.tokens, t.uses = 0, t.uses + 1
        makes = (self.made(key).storage,) if call.name == "add" else ()
        if not makes and both:
            both[-1].tokens = 1
        reads = tuple(t.storage for t in both)
        self.ops.append(Op(call.name, self.phase, self.node, reads, makes))

    def accumulate(self, call: Call) -> None:
        """A gradient is stored with its parameter: taken over, or copied where there are ops."""
        function = call.inner[0] if call.inner else call
        key = function.tensor(0)
        if key is None:
            return
        tensor = self.pending_gradient(key) if key[0] else None
        copies = any(c.name in ("clone", "new_empty_strided", "copy_") for c in function.inner)
        if tensor is not None:
            tensor.tokens -= 1
            own = self.storages[tensor.storage]
            if not copies and own.count == prod(key[0]):
                self.storages[tensor.storage] = replace(own, kind=int(BufferKind.GRADIENT))
                return
        new = self.storage(key, BufferKind.GRADIENT)
        reads = (tensor.storage,) if tensor is not None else ()
        self.ops.append(Op("AccumulateGrad", self.phase, NONE, reads, (new,)))


def _resolved_sizes(sizes: Sequence[int], total: int) -> Dims:
    """Sizes with the one that is left open worked out."""
    known = 1
    for n in sizes:
        known *= n if n > 0 else 1
    return tuple(n if n >= 0 else total // max(known, 1) for n in sizes)


def _wraps_itself(call: Call) -> bool:
    """Whether an operator only prepares for another of its name, as autocast's casts do."""
    return any(c.name == call.name for c in call.inner)


def _copies(call: Call) -> list[Key]:
    """Inputs in another format or layout that an operator makes for itself, as `sum` of booleans.

    Gradients of recurrent weights come after those of inputs, when the copies for these are gone.
    """
    found = []
    for inner in call.walk():
        x = inner.tensor(0)
        if inner is not call and x is not None and inner.name in ("_to_copy", "clone"):
            found.append((x[0], inner.code(1) or x[1] if inner.name == "_to_copy" else x[1]))
    return found[-1:] if call.name == RECURRENT_BACKWARD else found


def _is_size_unrecorded(call: Call) -> bool:
    """Whether the size of the result depends on an argument that traces do not record.

    The indices of `x[index]` are a list of optional tensors, whose sizes are not recorded.
    """
    return call.name == "index" and call.tensor(1) is None


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in RULES


def _keeps_input(name: str) -> bool:
    kept = KEPT.get(name)
    return kept is not None and kept.inputs == (0,)


def _same_node(op: str, node: str) -> bool:
    """Whether an operator is the one that made a backward node: `addmm`, `AddmmBackward0`."""
    node = _NODE.sub("", node.removeprefix(EVALUATE)).lower()
    word = op.strip("_").replace("_", "").lower()
    return word == node or (len(node) > 3 and word.startswith(node))
