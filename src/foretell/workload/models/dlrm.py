"""DLRM (Naumov et al. 2019): tables of categories beside a network of numbers, and their matmuls.

As it stands, MLPerf's model of Criteo's terabyte: 26 tables of at most 40 million rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from foretell.errors import InputError
from foretell.spec import Spec
from foretell.workload.models import transformer
from foretell.workload.workload import Exchange, Layer, Op, Tensor, Workload

# Rows of each table (mlcommons/training, recommendation_v2/torchrec_dlrm/README)
_CRITEO = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip


@dataclass(frozen=True)
class Dlrm(Spec):
    """A recommender."""

    name: ClassVar[str] = "dlrm"
    rows: tuple[int, ...] = _CRITEO  # of each table
    tables: int = 0  # this many tables of the first number of rows, where given
    dim: int = 128  # numbers that stand for a category
    dense: int = 13  # numbers given as they are
    bottom: tuple[int, ...] = (512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    batch: int = 2048
    dtype: str = "fp32"

    def workload(self) -> Workload:
        if self.bottom[-1] != self.dim:
            raise InputError(
                f"the bottom network ends with {self.bottom[-1]} numbers, tables have {self.dim}",
                hint="they are multiplied with each other: make them equal",
            )
        tables = self.rows[:1] * self.tables if self.tables else self.rows
        count = len(tables) + 1
        pairs = count * (count - 1) // 2
        layers = [_network("bottom", (self.dense, *self.bottom), is_last=False)]
        layers += [self._table(rows, many) for rows, many in Counter(tables).items()]
        layers.append(self._interaction(count, pairs))
        layers.append(_network("top", (self.dim + pairs, *self.top), is_last=True))
        return Workload(str(self), tuple(layers), self.batch, self.dtype)

    def _table(self, rows: int, many: int) -> Layer:
        """One look-up; tensor parallelism splits its rows, and sums what the ranks found."""
        dims = {"tokens": 1.0, "hidden": float(self.dim), "vocab": float(rows)}
        weight = (Tensor("table", ("vocab", "hidden")),)
        saved = (Tensor("output", ("batch", "hidden")),)
        split = {"tp": "vocab"} if 4 * rows >= max(self.rows) else {}  # small tables: replicated
        looked = Op("table", "embedding", dims, split, weight, saved, options={"dense": True})
        summed = transformer.leave("leave.table", 1, self.dim)[:1] if split else ()
        ops: tuple[Op | Exchange, ...] = (looked, *summed)
        carries, sizes = Tensor("row", ("batch", "hidden")), {"hidden": float(self.dim)}
        return Layer(f"table.{rows}", ops, carries, sizes, many, is_block=False)

    def _interaction(self, count: int, pairs: int) -> Layer:
        """Every pair of categories multiplied, and the upper half of that taken."""
        dims = {"m": float(count), "n": float(count), "k": float(self.dim)}
        whole = {"m": float(count), "k": float(self.dim)}
        copy = {"kernel": "copy", "passes": 2.0, "back": 2.0}
        kept = (Tensor("stacked", ("batch", "m", "k")),)
        ops = (
            Op("stack", "pointwise", whole, saved=kept, options=copy),
            Op("pairs", "product", dims),
            Op("half", "pointwise", {"n": float(pairs)}, options=copy),
            Op("cat", "pointwise", {"n": float(pairs + self.dim)}, options=copy),
        )
        sizes = {"n": float(pairs + self.dim)}
        return Layer("interaction", ops, Tensor("pairs", ("batch", "n")), sizes)


def _network(name: str, widths: tuple[int, ...], *, is_last: bool) -> Layer:
    """Linear layers with an activation behind each but the very last, in pairs under tp."""
    ops: list[Op | Exchange] = []
    for i, (role, (inner, out)) in enumerate(zip(_roles(widths), pairwise(widths), strict=True)):
        fc = f"{name}{i + 1}"
        weights = (Tensor(f"{fc}.weight", ("in", "out")), Tensor(f"{fc}.bias", ("out",)))
        dims = {"in": float(inner), "out": float(out)}
        options = {"first": True} if i == 0 and not is_last else {}
        split = {"tp": role} if role else {}
        ops += transformer.enter(f"enter.{fc}", 1, inner) if role == "out" else ()
        ops.append(Op(fc, "matmul", dims, split, weights, options=options))
        ops += transformer.leave(f"leave.{fc}", 1, out) if role == "in" else ()
        saved = (Tensor("output", ("batch", "n")),)
        acts = {"kernel": "relu", "passes": 2.0, "back": 3.0}
        inside = {"tp": "n"} if role == "out" else {}
        n = {"n": float(out)}
        ops.append(Op(f"relu{i + 1}", "pointwise", n, inside, saved=saved, options=acts))
    return Layer(name, tuple(ops), Tensor("y", ("batch", "n")), {"n": float(widths[-1])})


def _roles(widths: tuple[int, ...]) -> list[str]:
    """The dim of each linear layer that tp splits: column, then row, around each widest point."""
    roles = [""] * (len(widths) - 1)
    for i in range(len(roles) - 1):
        if not roles[i] and widths[i + 1] >= max(widths[i], widths[i + 2]):
            roles[i : i + 2] = ["out", "in"]
    return roles
