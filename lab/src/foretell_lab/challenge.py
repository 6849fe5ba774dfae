"""Plans drawn at random against the joint search, on questions drawn at random.

    python -m foretell_lab.challenge [--questions 30] [--first 0] [--evaluations 200] [--draws 1500]
                                     [--workers 12] [-o FILE]

A question is a model, a cluster (alike, or of two or three kinds of device) and a batch, drawn from
its number. Drawn plans have any degrees, micro-batch, ZeRO, sharding group, recompute of any number
of blocks, schedule, chunks, cut of the blocks, framework, kernels, and on unlike devices stages of
their own kinds in any order, uneven shares of replicas, or some of the devices alone. Of those that
can be, the best by the closed form and some of the others are simulated, as many as the search may
simulate; so are walks of three random moves from the search's answer. A question is lost where one
of them is shorter.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.cluster import Cluster, load
from foretell.errors import ForetellError
from foretell.io import write_text
from foretell.plan import Plan
from foretell.plan.plan import Segment, plan_of_segments
from foretell.plan.program import FAMILIES, ONE_CHUNK
from foretell.search.joint import Joint
from foretell.search.partition import kinds
from foretell.search.refine import Evaluator, Found
from foretell.workload import Workload
from foretell.workload import load as load_workload
from foretell_lab.workers import answers

MODELS = (
    "gpt:layers={n},hidden={h},heads=16,seq={s}", "llama:layers={n},hidden={h},heads=16,seq={s}",
    "gpt:layers={n},hidden={h},heads=12,seq={s},vocab=5000".replace("{h}", "1536"),
    "mixtral-8x7b:layers={n},hidden={h},heads=16,seq={s}", "bert", "t5-large", "vit_l_16",
    "resnet50", "vgg16", "swin_t", "dlrm",
)  # fmt: skip
DEVICES = ("a100-80", "a100-40", "v100-16", "v100-32", "h100", "t4", "p100-pcie", "l4")
NICS = ("ethernet-25g", "ethernet-100g", "infiniband-hdr")
BOX = '[[node]]\ncount = {count}\ndevice = "{device}"\ndevices = {many}\nnic = "{nic}"\n'
FRAMEWORKS = (("", False), ("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True))
WALK = 3  # moves of a walk
LOST = 1 + 1e-9  # of a drawn plan's step: a longer answer is lost


def drawn(number: int, folder: Path) -> tuple[Workload, Cluster, int, str]:
    """Workload, cluster and batch of one question."""
    draw = random.Random(f"challenge {number}")
    model = draw.choice(MODELS).format(
        n=draw.choice((4, 7, 12, 18)), h=draw.choice((1024, 2048, 4096)), s=draw.choice((512, 2048))
    )
    some = draw.sample(DEVICES, draw.choice((1, 1, 2, 2, 3)))
    nic = draw.choice(NICS)
    boxes = [(device, draw.choice((1, 2, 3)), draw.choice((1, 2, 4, 8))) for device in some]
    rows = [BOX.format(device=d, count=c, many=m, nic=nic) for d, c, m in boxes]
    path = folder / f"question-{number}.toml"
    path.write_text(f'name = "question-{number}"\n' + "".join(rows))
    cluster = load(str(path))
    batch = cluster.size * draw.choice((1, 4, 12))
    name = f"{model} on {' + '.join(f'{c}×{m} {d}' for d, c, m in boxes)}, {nic}, {batch} samples"
    return load_workload(model), cluster, batch, name


@dataclass
class Drawer:
    """Draws plans of one question."""

    workload: Workload
    cluster: Cluster
    batch: int
    draw: random.Random

    def plans(self, many: int) -> list[Plan]:
        """So many plans, some of which cannot be."""
        mixed = len(kinds(self.cluster)) > 1
        ways = [self._in_degrees, self._in_segments, self._on_some] if mixed else [self._in_degrees]
        return [plan for k in range(many) for plan in ways[k % len(ways)]()]

    def _divisor(self, number: int, most: float = math.inf) -> int:
        return self.draw.choice([d for d in range(1, number + 1) if number % d == 0 and d <= most])

    def _again(self, blocks: int) -> dict[str, Any]:
        mode = self.draw.choice(("none", "none", "none", "selective", "full"))
        return {
            "recompute": mode,
            "recompute_layers": self.draw.randrange(blocks) if mode != "none" else 0,
        }

    def _kernels(self) -> dict[str, Any]:
        name, compiled = self.draw.choice(FRAMEWORKS)
        fused = self.draw.choice(("", "fused"))
        return {"framework": name, "compile": compiled, "optimizer_kernels": fused}

    def _in_degrees(self, size: int = 0) -> Iterator[Plan]:
        size, w, draw = size or self.cluster.size, self.workload, self.draw
        left, degrees = size, dict[str, Any]()
        for axis in draw.sample(("tp", "pp", "cp"), 3):
            most = w.num_blocks if axis == "pp" else w.most(axis)
            degrees[axis] = self._divisor(left, most) if draw.random() < 0.5 else 1
            left //= degrees[axis]
        if self.batch % left:
            return
        micro, pp = self._divisor(self.batch // left), degrees["pp"]
        schedule = draw.choice(tuple(FAMILIES)) if pp > 1 else "1f1b"
        kernels = self._kernels()
        zero = 3 if kernels["framework"] == "fsdp" else draw.choice((0, 0, 1, 1, 2, 3))
        ep = self._divisor(left * degrees["cp"], w.most("ep"))
        plan = Plan(
            **degrees, dp=left, ep=ep, sp=degrees["tp"] > 1 and draw.random() < 0.8, zero=zero,
            micro_batch=micro, global_batch=self.batch, schedule=schedule,
            chunks=draw.choice((2, 4)) if schedule == "interleaved" else 1,
            **self._again(-(-w.num_blocks // pp)), **kernels,
        )  # fmt: skip
        yield plan
        if pp > 1 and plan.chunks == 1:
            yield plan.but(layers=self._cut(pp))
        if zero and left > 1:
            yield plan.but(shard=self._divisor(left))

    def _cut(self, stages: int) -> tuple[int, ...]:
        """Blocks of stages, near an even share."""
        found = [self.workload.num_blocks // stages] * stages
        for _ in range(self.workload.num_blocks - sum(found)):
            found[self.draw.randrange(stages)] += 1
        a, b = self.draw.randrange(stages), self.draw.randrange(stages)
        if found[a] > 1:
            found[a], found[b] = found[a] - 1, found[b] + 1
        return tuple(found)

    def _in_segments(self) -> Iterator[Plan]:
        """Stages of one kind of device each, blocks by speed and a little off."""
        draw, every = self.draw, kinds(self.cluster)
        some = draw.sample(every, draw.randint(2, len(every)))
        if self.workload.num_blocks < len(some):
            return
        speed = [len(r) * self.cluster.devices[r[0]].peak("fp16") for r in some]
        total, blocks = self.workload.num_blocks, [1] * len(some)
        for _ in range(total - len(some)):
            wants = [(total * s / sum(speed) + draw.random() * 2) - n
                     for s, n in zip(speed, blocks, strict=True)]  # fmt: skip
            blocks[wants.index(max(wants))] += 1
        micro, kernels = self._divisor(self.batch), self._kernels()
        rows = []
        for ranks, n in zip(some, blocks, strict=True):
            tp = self._divisor(len(ranks), self.workload.most("tp"))
            dp = len(ranks) // tp
            if micro % dp:
                return
            zero = 3 if kernels["framework"] == "fsdp" else draw.choice((0, 1))
            own = Plan(dp=dp, tp=tp, sp=tp > 1, zero=zero, micro_batch=micro // dp,
                       global_batch=self.batch, **self._again(n))  # fmt: skip
            rows.append(Segment(n, ranks, own))
        common = Plan(global_batch=self.batch, schedule=draw.choice(ONE_CHUNK), **kernels)
        yield plan_of_segments(common, rows)

    def _on_some(self) -> Iterator[Plan]:
        """Degrees on some kinds of device alone, or on all in another order."""
        every = kinds(self.cluster)
        some = self.draw.sample(every, self.draw.randint(1, len(every)))
        ranks = tuple(rank for kind in some for rank in kind)
        for plan in self._in_degrees(len(ranks)):
            yield plan.but(placement=ranks)
            if plan.dp > 1 and plan.ep == 1 and self.batch > plan.dp:
                yield plan.but(placement=ranks, **self._shares(plan, ranks))

    def _shares(self, plan: Plan, ranks: tuple[int, ...]) -> dict[str, Any]:
        """Samples of replicas by the peak rate of their first device and a little off."""
        inner = len(ranks) // plan.dp // plan.pp
        firsts = [self.cluster.devices[ranks[k * inner]] for k in range(plan.dp)]
        speed = [one.peak("fp16") ** self.draw.choice((0.3, 0.6, 1.0)) for one in firsts]
        found = [max(int(self.batch * s / sum(speed)), 1) for s in speed]
        while sum(found) > self.batch:
            found[found.index(max(found))] -= 1
        for _ in range(self.batch - sum(found)):
            found[self.draw.randrange(plan.dp)] += 1
        return {
            "shares": tuple(found),
            "micro_batch": -(-max(found) // self.draw.choice((1, 2, 4))),
        }


def challenged(number: int, evaluations: int, draws: int, folder: Path) -> dict[str, Any]:
    """The answer of the search and the best of what was drawn."""
    workload, cluster, batch, name = drawn(number, folder)
    began = time.process_time()
    found = Joint(evaluations=evaluations, global_batch=batch).plan(workload, cluster)
    cpu = time.process_time() - began
    draw = random.Random(f"plans {number}")
    on = Evaluator(workload, cluster, budget=evaluations)
    every = dict.fromkeys(Drawer(workload, cluster, batch, draw).plans(draws))
    able = [plan for plan in every if on.is_valid(plan)]
    best = _simulated(able, on, draw) + _walked(found.plan, on, draw)
    least = min(best, key=Found.key, default=None)
    return {
        "question": name, "found_s": found.predicted, "found": str(found.plan), "cpu_s": cpu,
        "drawn_s": least.step if least else None, "drawn": str(least.plan) if least else "",
        "ratio": found.predicted / least.step if least else 0.0,
    }  # fmt: skip


def _simulated(able: list[Plan], on: Evaluator, draw: random.Random) -> list[Found]:
    """Half of the budget by the closed form, a quarter drawn; stages apart are not guessed."""
    guess = on.estimated([p for p in able if on.is_seen(p)])
    found = on.of(sorted(guess, key=lambda p: guess[p].cost)[: on.budget // 2])
    rest = [p for p in able if p.segments or len(on.cluster.devices_by_kind()) > 1]
    rest = rest or able
    return found + on.of(draw.sample(rest, min(len(rest), on.budget // 4)))


def _walked(start: Plan, on: Evaluator, draw: random.Random) -> list[Found]:
    """Plans that walks of random moves end at."""
    ends = []
    for _ in range(on.budget):
        plan = start
        for _ in range(draw.randint(1, WALK)):
            near = list(on.neighbours(plan))
            draw.shuffle(near)
            plan = next((p for p in near if on.is_valid(p)), plan)
        ends.append(plan)
    return on.of(ends)


def main() -> None:
    """Challenge the search and print what was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0, help="of workers; all the time if 0")
    parser.add_argument("-o", "--output", type=Path, help="a file of rows: those it has are left")
    given = parser.parse_args()
    rows = json.loads(given.output.read_text()) if given.output and given.output.is_file() else {}
    left = [
        (number, given.evaluations, given.draws)
        for number in range(given.first, given.first + given.questions)
        if str(number) not in rows
    ]
    if given.workers > 1:
        left.sort(key=_size, reverse=True)
    for (number, *_), row in answers(_row, left, given.workers, given.seconds):
        rows[str(number)] = row
        print("\n".join(_lines(number, row)), flush=True)
        if given.output:
            write_text(given.output, json.dumps(rows, indent=1))
    every = [row["ratio"] for row in rows.values() if "ratio" in row]
    lost = [ratio for ratio in every if ratio > LOST]
    print(
        f"{len(every)} questions, {len(lost)} lost to a plan drawn at random, "
        f"{sum(ratio > 1.03 for ratio in lost)} by more than 3 %"
    )


def _size(question: tuple[int, int, int]) -> int:
    """What the time of a question goes by, roughly."""
    with tempfile.TemporaryDirectory() as folder:
        workload, cluster, _, _ = drawn(question[0], Path(folder))
    return len(workload.layers) * (1 + len(cluster.devices_by_kind())) * cluster.size


def _row(question: tuple[int, int, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return challenged(*question, Path(folder))
        except ForetellError as error:
            return {"error": error.message}


def _lines(number: int, row: dict[str, Any]) -> list[str]:
    """A row, and both plans where the search lost."""
    if "error" in row:
        return [f"{number:4d} {row['error']}"]
    lines = [f"{number:4d} {row['ratio']:.4f} {row['cpu_s']:.1f} CPU-s {row['question']}"]
    if row["ratio"] > LOST:
        lines += [f"     {name} {row[f'{name}_s']:.5g} {row[name]}" for name in ("found", "drawn")]
    return lines


if __name__ == "__main__":
    main()
