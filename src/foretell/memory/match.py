"""Which tensor is which, in a trace that tells sizes but not identities.

An input is taken for the tensor of its size and format that was made last and that was not used
yet, or else for the last of all; views share the storage of what they view. Where this mistakes
one tensor for another of the same size, the sum of what is held is the same.

In the backward pass a gradient is taken by one reader each (`tokens`), and a node is given or has
made itself all that it reads but what was kept for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foretell.graph.columns import NONE, BufferKind, Phase
from foretell.memory.call import FLOATS, ITEMS, Call, Dims, Key, count
from foretell.memory.kept import KEPT, Kept
from foretell.memory.recurrent import ALIASES
from foretell.memory.tape import Storage

# Inputs that are parameters whatever else has their size.
_PARAMETERS = {
    "t": (0,), "convolution": (1, 2), "embedding": (0,), "_embedding_bag": (0,),
    "native_layer_norm": (2, 3), "native_batch_norm": (1, 2), "cudnn_batch_norm": (1, 2),
    "addmm": (0,),
}  # fmt: skip
_NOTHING = Kept()
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
        self.storages.append(Storage(count(dims), size, int(kind), dtype in FLOATS))
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
        return self.found(key, taken, is_sum=is_sum) or self.outside(key)

    def found(self, key: Key, taken: Sequence[Tensor], *, is_sum: bool = False) -> Tensor | None:
        """Of the size: the last that was not used, else the last that goes by its first name.

        What is added to something else is rather kept (a residual) than thrown away or a scaled
        copy, which that was made to multiply with.
        """
        near = _others(self.forward.get(key, ())[-_LOOK_BACK:], taken)
        best = [t for t in near if not t.uses and not (is_sum and t.scaled)]
        near = [t for t in near if not t.is_renamed] or near
        best = best or (self.carried(near) if is_sum else []) or near
        if best:
            return best[0]
        return taken[-1] if taken and self.sizes[taken[-1].storage] == key[0] else None

    def carried(self, near: Sequence[Tensor]) -> list[Tensor]:
        """Of what is kept, the first made since the last sum: a block's input goes around it."""
        kept = [t for t in near if t.storage in self.kept]
        return sorted((t for t in kept if t.storage >= self.summed), key=_number) or kept

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

    def outside(self, key: Key) -> Tensor:
        """A tensor that no op made: a parameter, a buffer of the model or an input of the step."""
        if key[0] in self.known or self.left[key[0]] > 0:
            return self.parameter(key)
        return self.made(key, storage=self.storage(key, BufferKind.INPUT))

    def listed(self, call: Call, taken: Sequence[Tensor]) -> list[Tensor]:
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
        return next(iter(_others(self.inside.get(key, ()), taken)), None)

    def waiting(self, key: Key, *besides: Tensor | None) -> Tensor | None:
        """The last gradient of the size that some node still has to read."""
        near = reversed(self.backward.get(key, ())[-_LOOK_BACK:])
        return next((t for t in near if t.tokens > 0 and t not in besides), None)


def _number(tensor: Tensor) -> int:
    return tensor.storage


def _others(tensors: Sequence[Tensor], taken: Sequence[Tensor]) -> list[Tensor]:
    """The last first, without some."""
    return [t for t in reversed(tensors) if t not in taken]
