"""Every operator the bench knows: which cases to measure, and how to make one ready to run."""

from collections.abc import Iterator

from foretell.errors import unknown
from foretell_lab.bench.call import Build, Call, Place, use_precision
from foretell_lab.bench.case import Case
from foretell_lab.bench.ops import (
    attention,
    conv,
    lookup,
    move,
    norm,
    pointwise,
    pool,
    product,
    recurrent,
    reduce,
    update,
)

FAMILIES = {
    "product": product,
    "conv": conv,
    "norm": norm,
    "pointwise": pointwise,
    "reduce": reduce,
    "move": move,
    "pool": pool,
    "lookup": lookup,
    "attention": attention,
    "recurrent": recurrent,
    "update": update,
}
_BUILD: dict[str, Build] = {op: make for f in FAMILIES.values() for op, make in f.BUILD.items()}


def cases() -> Iterator[Case]:
    """Every case of every family, each once."""
    yield from dict.fromkeys(c for family in FAMILIES.values() for c in family.cases())


def build(case: Case, place: Place) -> Call:
    """Make a case ready: tensors in place, precision set, gradients at hand."""
    if case.op not in _BUILD:
        raise unknown("operator to measure", case.op, _BUILD)
    use_precision(case.dtype)
    return _BUILD[case.op](case, place)


def family_of(op: str) -> str:
    """The family an operator belongs to."""
    return next(name for name, family in FAMILIES.items() if op in family.BUILD)
