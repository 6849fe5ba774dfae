"""Sufficient factors: where sending what a gradient is the product of beats sending the gradient.

The weight gradient of a matmul is G = Aᵀ E with A (rows × N₁) and E (rows × N₂). Matmuls that read
one input (query, key and value) share A, which is then gathered once. Ranks that gather A and E
make the gradient of the whole batch themselves and need no all-reduce. In seconds of one rank of M,
R rows in all, the program chooses (→ `solve`)

    min  Σᵢ again_i·x_i + Σₜ gather_t·b_t − Σ_g reduce_g·x_g
    b_t ≥ x_j − x_i      tensor t is gathered where its consumer j has all rows and its maker i not

x_i: op i runs on all rows everywhere; again_i the seconds that adds, gather_t and reduce_g the
prices of the collectives on the real links. Ops are weight gradients and, in plain chains of
matmuls, the forwards and backwards upstream that make their factors: a rank that has the input of
one linear layer on all rows can run it on all rows and need not gather the input of the next.
On traffic alone factors win where
R·(N₁ + N₂) < 2·N₁·N₂ (→ `closed_form`): all-gather moves (M−1)/M·R(N₁+N₂), all-reduce twice
(M−1)/M·N₁N₂.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from itertools import product as every
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.errors import UnmodelledError
from foretell.plan.layer_ranges import (
    FactorMatmul,
    factor_matmuls,
    gathered,
    product_seconds,
    recompute_seconds,
    sharing,
)
from foretell.search.placement.problem import Fleet, Group, law
from foretell.workload import Workload

Array = npt.NDArray[np.float64]
ALL_REDUCE, ALL_GATHER = 0, 4  # rows of `laws.OPS`
NANO = 1e9  # the program counts in whole nanoseconds


def closed_form(rows: float, n1: float, n2: float) -> bool:
    """Whether factors move fewer bytes than an all-reduce of the gradient."""
    return rows * (n1 + n2) < 2 * n1 * n2


@dataclass(frozen=True)
class Node:
    """An op that may run on all rows everywhere; `saved` where it makes a gradient."""

    name: str
    again: float  # seconds that running it on all rows adds on each rank
    saved: float = 0.0  # seconds of the all-reduce that is then not needed
    fixed: bool = False  # it runs on its rank's own rows, whatever would be cheaper


@dataclass(frozen=True)
class Wire:
    """A tensor from one node to others."""

    source: str
    targets: tuple[str, ...]
    gather: float  # seconds to gather all its rows everywhere


def value(nodes: list[Node], wires: list[Wire], chosen: frozenset[str]) -> float:
    """Seconds a choice adds to a step of one rank (less than zero where it saves)."""
    total = sum(n.again - n.saved for n in nodes if n.name in chosen)
    for wire in wires:
        if wire.source not in chosen and any(t in chosen for t in wire.targets):
            total += wire.gather
    return total


def solve(nodes: list[Node], wires: list[Wire]) -> frozenset[str]:
    """The nodes that run on all rows in the best choice; an exact 0/1 program."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UnmodelledError(
            "placing factors needs OR-tools, which is not installed",
            hint="pip install 'foretell[solve]', or leave factors out: factors=no",
        ) from None
    model = cp_model.CpModel()
    x = {n.name: model.new_bool_var(n.name) for n in nodes}
    terms = [round((n.again - n.saved) * NANO) * x[n.name] for n in nodes]
    for n in nodes:
        if n.fixed:
            model.add(x[n.name] == 0)
    for i, wire in enumerate(wires):
        b = model.new_bool_var(f"wire{i}")
        for target in wire.targets:
            model.add(b >= x[target] - x[wire.source])
        terms.append(round(wire.gather * NANO) * b)
    model.minimize(sum(terms) * 4096 + sum(x.values()))  # of equals, the one with the fewest
    engine = cp_model.CpSolver()
    engine.parameters.num_workers = 1
    engine.parameters.random_seed = 1
    code = engine.solve(model)
    assert code == cp_model.OPTIMAL, "a program without limits has an optimum"
    return frozenset(name for name, var in x.items() if engine.value(var))


def brute(nodes: list[Node], wires: list[Wire]) -> frozenset[str]:
    """The best choice by trying all; for small graphs."""
    free = [n.name for n in nodes if not n.fixed]
    choices = (
        frozenset(name for name, bit in zip(free, bits, strict=True) if bit)
        for bits in every((0, 1), repeat=len(free))
    )
    return min(choices, key=lambda c: (round(value(nodes, wires, c) * NANO), len(c), sorted(c)))


def weights_of(workload: Workload, groups: tuple[Group, ...]) -> list[tuple[int, FactorMatmul]]:
    """Every product whose gradient has factors, with its group; tied ones have none."""
    return [
        (g, product)
        for g, group in enumerate(groups)
        for unit in group.units
        for product in factor_matmuls(workload, unit)
    ]


class Sent(NamedTuple):
    """What factors would do to each group on each set."""

    bytes: Array  # [s, g] bytes of factors of one sample
    saved: Array  # [s, g] bytes of gradients that need no all-reduce
    product: Array  # [k, g, b] seconds of the weight gradients in question
    ops: dict[tuple[int, int], dict[str, str]]


def tabled(
    workload: Workload,
    machines: Fleet,
    groups: tuple[Group, ...],
    batch: int,
    sizes: Array,
    laws: Array,
    grad: float,
) -> Sent:
    """For every set and group the matmuls that pay as factors, one by one, on its links."""
    count = len(machines.sets)
    sent, saved = np.zeros((count, len(groups))), np.zeros((count, len(groups)))
    product = np.zeros((len(machines.kinds), len(groups), batch + 1))
    ops: dict[tuple[int, int], dict[str, str]] = {}
    weights = weights_of(workload, groups)
    group_of = {w.name: g for g, w in weights}
    for s in range(count):
        alone = len(machines.ranks(s)) < 2
        chosen = [] if alone else _paying([w for _, w in weights], laws[s], batch, grad)
        for g, some in groupby(chosen, key=lambda w: group_of[w.name]):
            mine = list(some)
            sent[s, g] = gathered(mine) * grad
            saved[s, g] = sum(w.elements for w in mine) * grad
            ops[s, g] = {w.name: "factors" for w in mine}
    ever = {name for names in ops.values() for name in names}
    for k, device in enumerate(machines.kinds):
        for g, w in weights:
            if w.name in ever:
                product[k, g] += _filled(product_seconds(device, w, sizes), sizes, batch)
    return Sent(sent, saved, product, ops)


def _paying(
    weights: list[FactorMatmul], laws: Array, batch: float, grad: float
) -> list[FactorMatmul]:
    """Weights whose factors take less than their gradients; those of one input together."""
    known: dict[object, tuple[int, ...]] = {}
    found = []
    for some in sharing(weights):
        sizes = tuple((w.n1, w.n2, w.rows, w.elements) for w in some)
        if sizes not in known:
            best = brute(*program(some, laws, batch, grad, [0.0] * len(some)))
            known[sizes] = tuple(i for i, w in enumerate(some) if w.name in best)
        found += [some[i] for i in known[sizes]]
    return found


def program(
    weights: list[FactorMatmul], laws: Array, batch: float, grad: float, again: list[float],
    upstream: dict[str, float] | None = None,
) -> tuple[list[Node], list[Wire]]:  # fmt: skip
    """Gradients as nodes on the links of one set, what they are products of as wires.

    An input that several read is one wire; output gradients are one each. `upstream` has the
    seconds of each forward (`forward of …`) and backward (`backward of …`) that ranks may run on
    all rows to make a factor: a forward reads the input of its matmul, a backward the input and the
    output gradient of its own.
    """
    more = upstream or {}
    ahead = {w.maker: w for w in weights if f"forward of {w.maker}" in more}
    back = {w.reader: w for w in weights if f"backward of {w.reader}" in more}

    def seconds(op: int, numbers: float) -> float:
        return float(law(laws[op], np.array([numbers * grad]))[0])

    def readers(some: list[FactorMatmul], *, forward: bool) -> tuple[str, ...]:
        found = [w.name for w in some]
        found += [f"forward of {w.name}" for w in some if forward and w.name in ahead]
        return (*found, *(f"backward of {w.name}" for w in some if w.name in back))

    wires = []
    for some in sharing(weights):
        made = next((f"forward of {w.maker}" for w in some if w.maker in ahead), "")
        wires.append(
            Wire(made or f"input of {some[0].name}", readers(some, forward=True),
                 seconds(ALL_GATHER, batch * some[0].rows * some[0].n1))
        )  # fmt: skip
    for w in weights:
        made = f"backward of {w.reader}" if w.reader in back else f"output gradient of {w.name}"
        gather = seconds(ALL_GATHER, batch * w.rows * w.n2)
        wires.append(Wire(made, readers([w], forward=False), gather))
    nodes = [
        Node(w.name, took, seconds(ALL_REDUCE, w.elements))
        for w, took in zip(weights, again, strict=True)
    ]
    nodes += [Node(name, took) for name, took in more.items()]
    known = {n.name for n in nodes}
    own = [Node(wire.source, 0.0, fixed=True) for wire in wires if wire.source not in known]
    return [*nodes, *own], wires


def upstream_of(device: Any, weights: list[FactorMatmul], batch: float) -> dict[str, float]:
    """Seconds of every forward and backward that ranks may run on all rows to make a factor."""
    names, rows = {w.name for w in weights}, np.array([batch])
    out: dict[str, float] = {}
    for w in weights:
        for way, name in (("input", w.maker), ("output", w.reader)):
            if name in names:
                took = recompute_seconds(device, w._replace(recomputes=(way,)), rows)
                key = f"forward of {name}" if way == "input" else f"backward of {name}"
                out[key] = float(took[0])
    return out


def recomputing(w: FactorMatmul, chosen: frozenset[str]) -> FactorMatmul:
    """A matmul with the factors that a choice has each rank recompute."""
    ways = {"input": f"forward of {w.maker}", "output": f"backward of {w.reader}"}
    return w._replace(recomputes=tuple(way for way, node in ways.items() if node in chosen))


def word(w: FactorMatmul) -> str:
    """How a plan says in what way a matmul's gradient is sent."""
    ways = {(): "", ("input", "output"): ":recompute"}
    return "factors" + ways.get(w.recomputes, f":recompute-{(*w.recomputes, '')[0]}")


def _filled(values: Array, sizes: Array, batch: int) -> Array:
    every_size = np.interp(np.arange(batch + 1), sizes, values)
    every_size[0] = 0.0
    return every_size


def refined(problem: Any, placement: Any, *, recompute: bool = True) -> tuple[Any, Any]:
    """The placement with factors where the exact program puts them, and its problem.

    Matmuls that every rank makes for the whole batch are priced on the slowest device of the set.
    With `recompute` ranks may also make a factor themselves in place of gathering it.
    """
    from dataclasses import replace

    t = problem.tables
    chosen = _chosen(problem, placement, recompute=recompute)
    bytes_, rest, product = t.factors.copy(), t.rest.copy(), t.product.copy()
    recomputed = t.recompute.copy()
    ops, actions = dict(problem.factored), list(placement.actions)
    sizes: Array = np.unique(np.round(np.geomspace(1, t.batch, 24))).astype(np.float64)
    for g, mine in chosen.items():
        s = actions[g].devices
        grad = t.gradient[g] / max(_elements(problem, g), 1.0)
        bytes_[s, g] = gathered(mine) * grad
        rest[s, g] = t.gradient[g] - sum(w.elements * grad for w in mine)
        for k, device in enumerate(problem.fleet.kinds):
            product[k, g] = recomputed[k, g] = 0.0
            for w in mine:
                again = float(recompute_seconds(device, w, sizes[-1:])[0])
                made = _filled(product_seconds(device, w, sizes), sizes, t.batch)
                recomputed[k, g] += again * problem.slowdown
                product[k, g] += made * problem.slowdown
        ops[s, g] = {w.name: word(w) for w in mine}
        actions[g] = actions[g]._replace(way=3 if mine else 0)
    tables = t._replace(factors=bytes_, rest=rest, product=product, recompute=recomputed)
    return (
        replace(problem, tables=tables, factored=ops),
        replace(placement, actions=tuple(actions)),
    )


def _elements(problem: Any, g: int) -> float:
    from foretell.workload.workload import BYTES

    return float(problem.tables.gradient[g]) / BYTES[problem.run.grad_dtype]


def _chosen(
    problem: Any, placement: Any, *, recompute: bool
) -> dict[int, list[FactorMatmul]]:  # fmt: skip
    """For each group that reduces its gradients, the matmuls the program sends as factors."""
    t = problem.tables
    nodes: list[Node] = []
    wires: list[Wire] = []
    of: dict[int, list[FactorMatmul]] = {}
    weights = weights_of(problem.workload, problem.groups)
    for g, action in enumerate(placement.actions):
        mine = [w for where, w in weights if where == g]
        if not mine or action.way not in (0, 3) or t.size[action.devices] < 2:
            continue
        grad = t.gradient[g] / max(_elements(problem, g), 1.0)
        slow = problem.fleet.kinds[max(t.kind[c] for c in problem.fleet.sets[action.devices])]
        own = np.array([t.batch / t.size[action.devices], float(t.batch)])
        took = [product_seconds(slow, w, own) for w in mine]
        again = [float(seconds[1] - seconds[0]) for seconds in took]
        more = upstream_of(slow, mine, t.batch) if recompute else {}
        added = program(mine, t.laws[action.devices], t.batch, grad, again, more)
        nodes, wires, of[g] = nodes + added[0], wires + added[1], mine
    sent = solve(nodes, wires) if nodes else frozenset()
    return {g: [recomputing(w, sent) for w in mine if w.name in sent] for g, mine in of.items()}
