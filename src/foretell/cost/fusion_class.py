"""Which ops may become one kernel, as data: what a compiler such as Inductor does with each.

    kind        what it is                                   fuses
    pointwise   one result for one place                     with what loops over its places
    gather      reads at an index (embedding, select)        like pointwise
    random      draws numbers (dropout)                      like pointwise
    constant    writes a value, reads nothing                like pointwise
    view        another way to look at memory                with everything, free
    cat         several tensors one behind the other         like pointwise
    reduction   many places to one                           with what loops over its rows
    norm        reductions and what uses their results       like a reduction
    window      reads a neighbourhood (pooling)              like pointwise
    template    matmul or convolution                takes pointwise consumers where the
                                                             compiler writes it, else stays alone
    scatter     adds to places an index names                never: its order is a library's affair
    extern      a library's kernel                           never

Ops are named by their word: the name in torch's `aten` without `_`, `native_` and overload
(`aten::_softmax` is `softmax`, → `word_of`). Unknown words are `extern`: what is not known
to fuse is not fused.

Rules (→ `may_fuse`) follow what Inductor's scheduler allows for one producer and one consumer:
both loop over the same places, or the consumer loops over the rows of a reduction, or reads the
producer broadcast. A cycle through an op outside the region is the caller's to forbid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foretell.operators import having

KINDS = (
    "input", "pointwise", "gather", "random", "constant", "view", "cat", "reduction", "norm",
    "window", "template", "scatter", "extern",
)  # fmt: skip

_RENAMED: dict[str, str] = having("word")

# Kinds that loop over places and may join others in one loop.
_LOOPS = frozenset({"pointwise", "gather", "random", "constant", "cat", "window"})
_ROWS = frozenset({"reduction", "norm"})


def word_of(name: str) -> str:
    """The word of an op: `aten::_softmax` and `aten._softmax.default` are both `softmax`."""
    plain = name.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
    if plain in _RENAMED:
        return _RENAMED[plain]
    return plain.removeprefix("_").removeprefix("native_")


KIND_OF: dict[str, str] = {word_of(op): kind for op, kind in having("fusion", *KINDS).items()}
WORDS = tuple(KIND_OF)  # the order of the table of operators is the numbering of ops in a region


def kind_of(word: str) -> str:
    """What sort of op a word is; `extern` where it is unknown."""
    return KIND_OF.get(word, "extern")


def codes_of(words: Sequence[str]) -> npt.NDArray[np.int64]:
    """The numbers of words; unknown ones are `other`."""
    return np.array([_CODE.get(word, _CODE["other"]) for word in words], np.int64)


def is_fusible(kind: str) -> bool:
    """Whether an op of this kind ever shares a kernel with another."""
    return kind not in ("extern", "scatter", "input")


def may_fuse(
    producer: str, consumer: str, *, made: float, looped: float, rows: float, template: bool = False
) -> bool:
    """Whether a consumer may join its producer in one kernel.

    `made` elements the producer gives, `looped` places the consumer visits, `rows` results the
    consumer gives (of a reduction) or the producer's places (where the producer reduces);
    `template` says whether the compiler writes matmuls itself and so can add to their end.
    """
    if not (is_fusible(producer) and is_fusible(consumer)):
        return False
    if "view" in (producer, consumer):
        return True
    if consumer == "template":
        return False
    if producer == "template":
        return template and consumer in _LOOPS and made == looped
    if producer in _ROWS:
        # a result a row: used again over the same places, row by row, or reduced further
        return looped in (made, rows)
    return made <= looped


_CODE = {word: number for number, word in enumerate(WORDS)}
KIND_CODE = np.array([KINDS.index(KIND_OF[word]) for word in WORDS], np.int64)
