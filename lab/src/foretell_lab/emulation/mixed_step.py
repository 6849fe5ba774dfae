"""The graph of a step on ranks of unequal speed, from one rank by itself and what bench found.

Any plan is runs of layers on ranks (→ foretell.plan.check); data parallelism is one run on all.
Work takes its core seconds times what a second costs the rank (`RankSpeed.stretch`, measured under
its share of a core). Messages take what bench measured between these ranks, on these links, and
core seconds of both ends besides: where a core is slow, those stand in the way of its work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from foretell.graph import Builder, Graph
from foretell.plan import Plan
from foretell.plan.check import sync_methods
from foretell.plan.layer_ranges import Action, orders, redistribute
from foretell.pytorch.deploy.buckets import Layout, by_size
from foretell_lab.emulation.mixed_parts import Piece, RankSpeed, parts
from foretell_lab.emulation.pieces import Pieces, pieces
from foretell_lab.emulation.step import MESSAGES

_SMALL = 4096.0  # bytes of a message that costs nothing but being sent


def step(plan: Plan, profile: dict[str, Any], worth: RankSpeed) -> Graph:
    """The step of every rank as one graph."""
    made = _Step(plan, profile, worth)
    made.write_acts()
    made.write_end()
    return made.builder.graph(plan=str(plan), model=profile["model"])


class _Step:
    """Puts the tasks of a step in, as soon as what they wait for is in."""

    def __init__(self, plan: Plan, profile: dict[str, Any], worth: RankSpeed) -> None:
        self.plan, self.profile, self.worth = plan, profile, worth
        self.parts, self.builder = parts(plan, profile), Builder()
        self.ranks = sorted({r for part in self.parts for r in part.ranks})
        self.work = {r: self._lane(f"rank {r}", r, "compute") for r in self.ranks}
        self.up = {r: self.builder.link(f"up {r}", 1.0) for r in self.ranks}
        self.down = {r: self.builder.link(f"down {r}", 1.0) for r in self.ranks}
        self.core = {r: self.builder.link(f"core {r}", 1.0) for r in self.ranks}
        self.lanes: dict[tuple[str, int, int], int] = {}
        self.turn: dict[str, int] = defaultdict(int)
        self.last = dict.fromkeys(self.ranks, -1)  # the task each rank's work goes on from
        self.done: dict[tuple[Action, int], int] = {}
        self.sent: dict[tuple[str, int, int, int, int], int] = {}  # kind, run, batch, from, to
        self.ready: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
        self.waits: dict[int, list[int]] = {r: [] for r in self.ranks}  # what an update waits for
        usual = dict.fromkeys(profile["parameters"], "all-reduce")
        self.ways: dict[str, str] = usual | sync_methods(plan)
        self.layouts = [self._layout(part) for part in self.parts]

    def _lane(self, name: str, rank: int, kind: str) -> int:
        return self.builder.lane(name, rank=rank, kind=kind)

    def _layout(self, part: Piece) -> Layout:
        sizes = {n: b for n, b in part.parameters.items() if self.ways[n] == "all-reduce"}
        return by_size(sizes, self.plan.bucket_mb * 2**20) if sizes else Layout(())

    # Work of one rank

    def _do(self, rank: int, name: str, core: float, after: Iterable[int] = ()) -> int:
        """Core seconds of a rank, behind what it did before."""
        waits = [*after, *([self.last[rank]] if self.last[rank] >= 0 else [])]
        self.last[rank] = self.builder.task(
            kind="host", op=name.split()[0], name=name, rank=rank, lanes=[self.work[rank]],
            seconds=core * self.worth.stretch[rank], after=waits, source="measured",
            uses={self.core[rank]: 1.0} if core > 0 else None,
        )  # fmt: skip
        return self.last[rank]

    def _pieces(self, samples: int) -> Pieces:
        return pieces(self.profile, samples)

    def write_acts(self) -> None:
        """Every rank's forwards and backwards in its order, as far as what they read is there."""
        todo = orders([part.ranks for part in self.parts], len(self.parts[0].samples))
        at = dict.fromkeys(todo, 0)
        while any(at[r] < len(todo[r]) for r in todo):
            for rank, acts in todo.items():
                while at[rank] < len(acts) and self._is_ready(rank, acts[at[rank]]):
                    act = acts[at[rank]]
                    (self._forward if act.kind == "F" else self._backward)(rank, act)
                    at[rank] += 1

    def _moves(self, run: int, m: int) -> list[Any]:
        before, behind = self.parts[run].samples[m], self.parts[run + 1].samples[m]
        return redistribute(before, behind)

    def _reads(self, rank: int, act: Action) -> list[tuple[str, int, int, int, int]]:
        """The messages that an action waits for."""
        kind, q, m = act
        if kind == "F":
            found = self._moves(q - 1, m) if q else []
            return [("F", q - 1, m, x.source, rank) for x in found if x.target == rank != x.source]
        found = self._moves(q, m) if q + 1 < len(self.parts) else []
        return [("B", q, m, x.target, rank) for x in found if x.source == rank != x.target]

    def _is_ready(self, rank: int, act: Action) -> bool:
        return all(key in self.sent for key in self._reads(rank, act))

    def _forward(self, rank: int, act: Action) -> None:
        _, q, m = act
        part, n = self.parts[q], self.parts[q].samples[m][rank]
        if not n:
            return
        found = self._pieces(n)
        own = sum(s for name, s in found.layers if name in part.layers)
        is_last = q + 1 == len(self.parts)
        rest = max(found.forward - sum(s for _, s in found.layers), 0.0) if is_last else 0.0
        core = found.forward if not part.layers else own + rest
        self._do(rank, f"forward {act}", core + self.worth.act, self._received(rank, act))
        if not is_last:
            sizes = [(x.target, x.last - x.first) for x in self._moves(q, m) if x.source == rank]
            self._send("F", q, m, rank, sizes)

    def _received(self, rank: int, act: Action) -> list[int]:
        """The messages that an action waits for."""
        return [self.sent[key] for key in self._reads(rank, act)]

    def _send(self, kind: str, run: int, m: int, rank: int, sizes: list[tuple[int, int]]) -> None:
        prices = self.worth.prices
        for to, samples in sizes:
            if to == rank:
                continue
            op, size = f"send {rank} {to}", samples * self.parts[run].handed
            begun = self._do(rank, f"send {kind}{run}.{m}", prices.core(op, _SMALL))
            wires = dict.fromkeys((self.up[rank], self.down[to]), prices.share(op, size))
            task = self.builder.task(
                kind="send", op="send", name=f"{kind}{run}.{m} {rank} to {to}", rank=rank,
                seconds=prices.seconds(op, size), comm_bytes=size, after=[begun],
                lanes=[self._line("p2p", rank, to)], source="measured",
                uses=wires | self._cores(op, size, (rank, to)),
            )  # fmt: skip
            self.sent[kind, run, m, rank, to] = task

    def _cores(self, op: str, size: float, ranks: Iterable[int]) -> dict[int, float]:
        """What of each rank's time a message takes while it is under way."""
        prices, stretch = self.worth.prices, self.worth.stretch
        busy = prices.core(op, size) / prices.seconds(op, size)
        return {self.core[r]: min(1.0, busy * stretch[r]) for r in ranks if busy}

    def _line(self, name: str, rank: int, number: int) -> int:
        key = (name, rank, number)
        if key not in self.lanes:
            self.lanes[key] = self._lane(f"{name} {number}", rank, "comm")
        return self.lanes[key]

    def _backward(self, rank: int, act: Action) -> None:
        _, q, m = act
        part, n = self.parts[q], self.parts[q].samples[m][rank]
        is_last = m + 1 == len(part.samples)
        if n:
            found = self._pieces(n)
            self._do(rank, "receive", self.worth.act, self._received(rank, act))
            mine = [(p, s) for p, s in found.backward if p in part.parameters]
            if is_last and len(part.ranks) > 1:
                self._last_backward(rank, q, mine)
            else:
                self._do(rank, f"backward {act}", sum(s for _, s in mine))
            if not q and found.rest:
                self._do(rank, "rest", found.rest)
            if q:
                moves = self._moves(q - 1, m)
                back = [(x.source, x.last - x.first) for x in moves if x.target == rank]
                self._send("B", q - 1, m, rank, back)
        if is_last:
            self._flush(rank, q)

    def _last_backward(self, rank: int, q: int, mine: list[tuple[str, float]]) -> None:
        """Gradient by gradient; what is ready leaves."""
        left = [set(bucket) for bucket in self.layouts[q].buckets]
        opened = 0
        for name, seconds in mine:
            factors = self.ways[name] == "factors"
            layer = name.rpartition(".")[0]
            is_sent = factors and name == self._first_of(layer, mine)
            less = self._factored(layer, sum(b[rank] for b in self.parts[q].samples), pack=True)
            self._do(rank, f"gradient {name}", max(seconds - less if is_sent else seconds, 0.0))
            if is_sent:
                self._launch(q, f"factors {layer}", rank)
            for bucket in left:
                bucket.discard(name)
            while opened < len(left) and not left[opened]:
                self._launch(q, f"bucket {opened}", rank)
                opened += 1

    def _factored(self, layer: str, samples: float, *, pack: bool) -> float:
        """Core seconds of a layer's product over some samples, less those of packing its rows."""
        if layer not in self.profile["factors"]:
            return 0.0
        packing, product = self.profile["factors"][layer]
        each = self.profile["linear"][layer][2]
        return float(samples * each * (product - packing if pack else product))

    def _first_of(self, layer: str, mine: list[tuple[str, float]]) -> str:
        return next(n for n, _ in mine if n.rpartition(".")[0] == layer)

    # What joins ranks

    def _flush(self, rank: int, q: int) -> None:
        """After the backward of a run: servers get their gradients."""
        if len(self.parts[q].ranks) > 1:
            for name in self.parts[q].parameters:
                if self.ways[name].startswith("ps"):
                    self._launch(q, f"reduce {name}", rank)

    def _launch(self, q: int, what: str, rank: int) -> None:
        """A rank begins a collective of its run; when all have, it is there."""
        part, prices = self.parts[q], self.worth.prices
        op, size = self._priced(q, what)
        self.ready[q, what][rank] = self._do(rank, f"launch {what}", prices.core(op, _SMALL))
        if len(self.ready[q, what]) == len(part.ranks):
            task = self._collective(q, op, size, list(self.ready[q, what].values()), what)
            for r in part.ranks:
                self.waits[r].append(task)

    def _priced(self, q: int, what: str) -> tuple[str, float]:
        """The op bench knows, and its bytes."""
        kind, _, name = what.partition(" ")
        part, layout = self.parts[q], self.layouts[q]
        if kind == "bucket":
            bucket = layout.buckets[int(name)]
            return "all_reduce", float(sum(part.parameters[n] for n in bucket))
        if kind == "factors":
            width, out, each = self.profile["linear"][name]
            most = max(sum(b[r] for b in part.samples) for r in part.ranks)
            return "all_gather", float(4 * most * each * (width + out))
        owner = self.ways[name].partition(":")[2]
        return f"{kind} {part.ranks[int(owner)]}", float(part.parameters[name])

    def _collective(self, q: int, op: str, size: float, after: list[int], what: str) -> int:
        prices, ranks = self.worth.prices, self.parts[q].ranks
        group = f"{'factors' if what.startswith('factors') else 'messages'} {q}"
        number, share = self.turn[group] % MESSAGES, prices.share(op, size)
        self.turn[group] += 1
        wires = {link: share for r in ranks for link in (self.up[r], self.down[r])}
        wires |= self._cores(op, size, ranks)
        return self.builder.task(
            kind="collective", op=op.split()[0], name=what, rank=ranks[0],
            lanes=[self._line(group, r, number) for r in ranks], seconds=prices.seconds(op, size),
            comm_bytes=size, after=after, uses=wires, source="measured",
        )  # fmt: skip

    def write_end(self) -> None:
        """Updates, when all gradients are there, and what servers send back."""
        for rank in self.ranks:
            self._do(rank, "update", self._updating(rank) + self._products(rank), self.waits[rank])
        self.waits = {r: [] for r in self.ranks}
        for q, part in reversed(list(enumerate(self.parts))):
            for name in part.parameters if len(part.ranks) > 1 else ():
                if self.ways[name].startswith("ps"):
                    for rank in part.ranks:
                        self._launch(q, f"broadcast {name}", rank)
        for rank, waited in self.waits.items():
            if waited:
                self._do(rank, "wait", 0.0, waited)

    def _updating(self, rank: int) -> float:
        """Core seconds of the optimizer: of the parameters that this rank updates."""
        total, mine = float(sum(self.profile["parameters"].values())), 0.0
        for part in self.parts:
            for name, size in part.parameters.items() if rank in part.ranks else ():
                word, _, owner = self.ways[name].partition(":")
                alone = word == "ps" and len(part.ranks) > 1
                mine += size if not alone or part.ranks[int(owner)] == rank else 0
        return self._pieces(int(self.profile["samples"])).update * mine / total

    def _products(self, rank: int) -> float:
        """Core seconds of gradients that are made of all ranks' factors, padded to the longest."""
        out = 0.0
        for part in self.parts:
            if rank in part.ranks and len(part.ranks) > 1:
                most = max(sum(b[r] for b in part.samples) for r in part.ranks)
                names = [n for n in part.parameters if self.ways[n] == "factors"]
                for layer in {n.rpartition(".")[0] for n in names}:
                    out += self._factored(layer, most * len(part.ranks), pack=False)
        return out


def seconds_alone(profile: Mapping[str, Any], samples: int) -> float:
    """Core seconds of a rank's step without others."""
    return pieces(dict(profile), samples).seconds
