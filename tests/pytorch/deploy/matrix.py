"""The matrix of models and plans: each cell trained by its plan and on one process, compared.

    python -m tests.pytorch.deploy.matrix [--models mlp,gpt|usual|unusual] [--plans TEXT …] [-n 2]
    python -m tests.pytorch.deploy.matrix --drawn 100 [--seed 0] [-n 4]

All cells of one number of ranks run in one process group. Drawn cells have a model and pairs or
triples of kinds of plans, by chance.
"""

import argparse
import functools
import random
import sys
import time
import traceback
from collections import Counter
from unittest.mock import patch

from tests.pytorch.deploy import zoo
from tests.pytorch.deploy.ranks import on_ranks

ROW = "F0+F0.1+B0.1+B0+F1+F1.1+B1.1+B1"  # of a rank with two stages
PLANS = {
    1: ["dp=1", "micro_batch=2", "recompute=full", "recompute=selective", "dtype=bf16"],
    2: [
        "dp=2", "dp=2,micro_batch=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3",
        "dp=2,shares=5+3", "dp=2,bucket_mb=0.0001,update=by-message", "dp=2,recompute=full",
        "dp=2,zero=1,micro_batch=2", "dp=2,zero=3,micro_batch=2", "dp=2,zero=3,recompute=full",
        "dp=2,zero=2,shares=5+3", "dp=2,shares=6+2,micro_batch=2",
        "dp=2,zero=3,shares=6+2,micro_batch=2", "dp=2,overlap=no,micro_batch=2",
        "dp=2,placement=1+0", "dp=2,zero=2,overlap=no", "dp=2,zero=3,overlap=no,micro_batch=2",
        "tp=2", "tp=2,sp=yes", "tp=2,recompute=full", "cp=2", "cp=2,zero=3", "cp=2,recompute=full",
        "pp=2,micro_batch=2", "pp=2,micro_batch=2,schedule=gpipe",
        "pp=2,micro_batch=2,schedule=interleaved,chunks=2", "pp=2,micro_batch=2,recompute=full",
        "pp=2,micro_batch=2,schedule=zb-h1", "pp=2,micro_batch=2,recompute=selective",
        "pp=2,micro_batch=2,schedule=zb-v", "pp=2,micro_batch=2,schedule=dualpipev",
        "pp=2,micro_batch=2,schedule=v-half", "pp=2,micro_batch=2,schedule=zb-h2",
        f"pp=2,chunks=2,schedule=actions,actions={ROW}/{ROW}",
        "pp=2,chunks=2,actions=0F0+3F0+3B0+0B0+0F1+3F1+3B1+0B1/1F0+2F0+2B0+1B0+1F1+2F1+2B1+1B1",
        "pp=2,actions=F0+I0+F1+I1+W0+W1/F0+I0+W0+F1+I1+W1",
        "filter=2", "channel=2", "spatial=2", "ep=2,dp=2", "ep=2,dp=2,zero=1",
        "ep=2,dp=2,zero=3,micro_batch=2", "ep=2,dp=2,bucket_mb=0.0001",
        "dp=2,dtype=bf16", "dp=2,dtype=fp8",
        "dp=2,grad_dtype=bf16", "pp=2,micro_batch=2,dtype=fp16",
        "groups=@+all-reduce+0:5+1:3/@+all-reduce+1:8,micro_batch=4",
        "groups=@+factors+0:4+1:4/@+factors+1:5+0:3",
        "groups=@+ps+0:4+1:4/@+sharded+1:6+0:2", "groups=@+split+0:8+1:8/@+all-reduce+0:4+1:4",
    ],
    4: [
        "dp=2,tp=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3", "dp=2,tp=2,sp=yes,zero=2",
        "dp=2,pp=2,micro_batch=2", "dp=2,pp=2,micro_batch=2,zero=1",
        "dp=2,pp=2,micro_batch=2,zero=2", "dp=2,pp=2,micro_batch=2,zero=3",
        "dp=2,pp=2,micro_batch=2,schedule=interleaved,chunks=2",
        "dp=2,pp=2,micro_batch=1,shares=5+3",
        "dp=2,pp=2,micro_batch=2,shares=2+6,zero=2", "dp=2,pp=2,micro_batch=2,shares=6+2,zero=3",
        "tp=2,pp=2,micro_batch=2", "tp=2,pp=2",
        "tp=2,pp=2,micro_batch=2,sp=yes", "dp=2,cp=2", "dp=2,cp=2,zero=3", "cp=2,tp=2", "cp=2,pp=2",
        "cp=2,tp=2,sp=yes", "ep=2,dp=2,tp=2", "ep=2,dp=2,cp=2", "ep=2,dp=2,pp=2,micro_batch=2",
        "ep=2,dp=4,zero=2,shard=2",
        "ep=2,dp=2,pp=2,micro_batch=2,zero=3", "ep=4,dp=4,zero=3",
        "dp=4,zero=3,shard=2", "dp=4,zero=1", "dp=2,filter=2", "dp=2,channel=2",
        "dp=2,spatial=2", "dp=2,spatial=2,shares=5+3", "pp=4,micro_batch=2",
        "dp=2,spatial=2,zero=1",
        "dp=2,pp=2,micro_batch=2,recompute=full", "dp=2,cp=2,recompute=full,micro_batch=2",
        "dp=2,tp=2,recompute=full,zero=3", "dp=2,tp=2,placement=3+1+0+2,zero=1",
        "dp=4,zero=3,shard=2,placement=0+1+3+2", "dp=2,pp=2,micro_batch=2,placement=3+1+2+0",
        "segments=?+0-1/?+2-3+tp:2,micro_batch=4", "segments=?+0/?+1-2+zero:3/?+3,micro_batch=2",
        "segments=?+0-1+tp:2/?+2-3+zero:2+recompute:full,micro_batch=4",
        "segments=?+3+recompute:full/?+0-1+zero:1/?+2,micro_batch=4,schedule=zb-h1",
        "segments=?+0-1+shares:6x2/?+2-3+zero:3+shares:2x6,micro_batch=4",
        "segments=?+0/?+1-3+shares:4x2x2,micro_batch=4", "segments=?+0-1+shares:5x3/?+2-3+tp:2",
    ],
    8: [
        "dp=2,tp=2,pp=2,micro_batch=2", "dp=2,tp=2,pp=2,micro_batch=2,zero=1",
        "dp=2,tp=2,pp=2,micro_batch=2,zero=3", "dp=4,tp=2,zero=3,shard=2",
        "dp=4,pp=2,micro_batch=1,zero=2,shard=2",
        "segments=?+0-3+zero:3+shard:2/?+4-7,micro_batch=4",
        "dp=2,tp=2,cp=2", "dp=2,pp=2,cp=2,micro_batch=2",
    ],
}  # fmt: skip


# Kinds of plans that are drawn beside degrees; `{dp}`-like words are filled in.
BESIDE = (
    "zero=1", "zero=2", "zero=3", "micro_batch=1", "micro_batch=2", "micro_batch=4", "sp=yes",
    "recompute=full", "recompute=selective", "shares=5+3", "shares=6+2", "overlap=no",
    "bucket_mb=0.0001", "update=by-message", "grad_dtype=bf16", "dtype=bf16", "dtype=fp16",
    "dtype=fp8", "precision=bf16-mixed", "schedule=gpipe", "schedule=zb-h1", "schedule=zb-v",
    "schedule=interleaved,chunks=2", "schedule=dualpipev", "schedule=v-half", "schedule=zb-h2",
    "shard=2", "placement", "sync", "compile_off", "offload=yes", "whatifs=foreach-optimizer",
    "whatifs=channels-last", "whatifs=fused-optimizer", "whatifs=checkpoint",
)  # fmt: skip
AXES = ("dp", "dp", "tp", "pp", "pp", "cp", "filter", "channel", "spatial", "ep")
WAYS = ("all-reduce", "factors", "ps", "sharded", "split")


def drawn(size, number, seed):
    """So many (model, plan) of a number of ranks, by chance."""
    draw = random.Random(f"{seed} {size}")
    names = list(zoo.EVERY)
    found = []
    while len(found) < number:
        name = draw.choice(names)
        kind = draw.random()
        if kind < 0.2:
            text = _drawn_groups(name, size, draw)
        elif kind < 0.3 and size >= 4:
            text = _drawn_segments(size, draw)
        else:
            text = _drawn_degrees(name, size, draw)
        found.append((name, text))
    return list(dict.fromkeys(found))


def _drawn_degrees(name, size, draw):
    left, degrees = size, {}
    while left > 1:
        axis, n = draw.choice(AXES), draw.choice([f for f in (2, 4) if left % f == 0])
        degrees[axis] = degrees.get(axis, 1) * n
        left //= n
        if axis == "ep":  # among data-parallel ranks
            degrees["dp"] = degrees.get("dp", 1) * n
    words = {axis: str(n) for axis, n in degrees.items()}
    for one in draw.sample(BESIDE, draw.choice((1, 2, 2, 3))):
        if one == "placement":
            ranks = list(range(size))
            draw.shuffle(ranks)
            words[one] = "+".join(map(str, ranks))
        elif one == "sync":
            dp, chosen = degrees.get("dp", 1), _drawn_sync(name, degrees.get("dp", 1), draw)
            words |= {"sync": chosen} if chosen and dp > 1 else {}
        elif "=" in one:
            words |= dict(part.split("=", 1) for part in one.split(","))
    if degrees.get("dp", 1) != 2:
        words.pop("shares", None)
    if degrees.get("pp", 1) > 1:
        words.setdefault("micro_batch", "2")
    else:
        words.pop("schedule", None), words.pop("chunks", None)
    return ",".join(f"{k}={v}" for k, v in words.items())


def _drawn_sync(name, dp, draw):
    """A way for each of some layers; all parameters of a layer go one way."""
    rows = []
    for layer, module in zoo.make(name).named_modules():
        own = [p for p, x in module.named_parameters(recurse=False) if x.requires_grad]
        way = draw.choice(
            ("all-reduce", "factors", "factors", f"ps:{draw.randrange(dp)}", "sharded")
        )
        if own and layer and draw.random() < 0.7:
            rows += [f"{layer}.{p}+{way}" for p in own]
    return "/".join(rows)


def _drawn_groups(name, size, draw):
    rows = []
    for _ in range(2):
        ranks = draw.sample(range(size), draw.randint(1, size))
        way = draw.choice(WAYS) if len(ranks) > 1 else "all-reduce"
        cuts = sorted(draw.sample(range(1, zoo.BATCH), len(ranks) - 1))
        shares = [b - a for a, b in zip([0, *cuts], [*cuts, zoo.BATCH], strict=True)]
        if way == "split":
            shares = [zoo.BATCH] * len(ranks)
        each = "+".join(f"{r}:{n}" for r, n in zip(ranks, shares, strict=True))
        rows.append(f"@+{way}+{each}")
    more = draw.choice(("", ",micro_batch=4", ",micro_batch=2", ",grad_dtype=bf16"))
    return "groups=" + "/".join(rows) + more


def _drawn_segments(size, draw):
    first = draw.randint(1, size - 1)
    spans = [(0, first), (first, size)]
    draw.shuffle(spans)
    rows = []
    for low, high in spans:
        wide = high - low
        ways = ["", "+recompute:full", "+recompute:selective"]
        ways += ["+tp:2", "+tp:2+sp:yes"] * 2 if wide % 2 == 0 else []
        ways += ["+zero:1", "+zero:2", "+zero:3"] if wide > 1 else []
        ways += ["+shares:6x2", "+shares:2x6+zero:2", "+shares:2x6+zero:1"] if wide == 2 else []
        ranks = str(low) if wide == 1 else f"{low}-{high - 1}"
        rows.append(f"?+{ranks}{draw.choice(ways)}")
    more = draw.choice(("", ",schedule=gpipe", ",schedule=zb-h1", ",dtype=bf16"))
    return "segments=" + "/".join(rows) + f",micro_batch={draw.choice((2, 4, 8))}" + more


def optimizer(model):
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.01)


def filled(name, text):
    """A plan with the blocks of a model shared out to its segments, wherever it has a `?`, and its
    layers to two groups, wherever it has an `@`."""
    from foretell.pytorch.deploy.units import units

    if "@" in text:
        first, last = halves(name)
        return text.replace("@", first, 1).replace("@", last, 1) + f",global_batch={zoo.BATCH}"
    rows = text.count("?")
    blocks = sum(bool(unit) for unit in units(zoo.make(name))) if rows else 0
    for row in range(rows):
        text = text.replace("?", str(blocks // rows + (row < blocks % rows)), 1)
    return text


def halves(name):
    """The first and last layer of either half of a model; any words where it has no layers."""
    from foretell.errors import InputError
    from foretell.pytorch.deploy.units import layers

    try:
        found = layers(zoo.make(name)).items()
    except InputError:
        return "0+0", "1+1"
    heavy = [n for n, m in found if any(p.dim() > 1 for p in m.parameters())]
    middle = len(heavy) // 2
    return f"{heavy[0]}+{heavy[middle - 1]}", f"{heavy[middle]}+{heavy[-1]}"


def cell(name, text, steps=3):
    """What came of one cell: (equal | wrong | refused | crash, words)."""
    import torch

    from foretell.errors import ForetellError
    from foretell.plan import Plan
    from foretell.pytorch.deploy.verify import Case, verify

    began = time.process_time()

    plan = Plan.parse(filled(name, text))
    shares = list(plan.shares) or [zoo.BATCH // plan.dp] * plan.dp
    case = Case(
        lambda: zoo.make(name), optimizer, lambda step: zoo.parts(name, shares, step),
        zoo.EVERY[name][2],
    )  # fmt: skip
    # a scale at which no gradient overflows: one process may skip a step where sums of parts do not
    scaler = functools.partial(torch.amp.GradScaler, init_scale=256.0)
    try:
        with patch.object(torch.amp, "GradScaler", scaler):
            found = verify(case, plan, steps, in_fp32=False)
    except ForetellError as error:
        return "refused", error.message
    except Exception:
        return "crash", traceback.format_exc()
    if found.is_equal:
        took = time.process_time() - began
        return "equal", f"{found.loss_off:.1e} {found.gradient_off:.1e} {took:.1f} s of a core"
    return "wrong", "; ".join(map(str, found.differences[:3]))


def cells(pairs):
    """All cells of one process group; a crash may leave the group unusable, so it ends there."""
    import logging

    logging.disable(logging.ERROR)
    found = {}
    for pair in pairs:
        found[pair] = cell(*pair)
        if found[pair][0] == "crash":
            break
    return found


def run(size, pairs, limit=1200.0):
    """What came of each (model, plan) of a number of ranks; a new process group after a crash."""
    left, found = list(pairs), {}
    while left:
        try:
            ranks = on_ranks(size, cells, left, limit=limit)
        except AssertionError as error:
            if len(left) == 1:
                return found | {left[0]: ("crash", str(error))}
            each = [run(size, [pair], limit) for pair in left]  # to know which it was
            return found | {pair: answer for one in each for pair, answer in one.items()}
        for pair in list(left):
            each = [r[pair] for r in ranks if pair in r]
            if not each:
                continue
            order = {"crash": 0, "wrong": 2, "refused": 3, "equal": 4}
            found[pair] = min(each, key=lambda e: order[e[0]] + ("by peer" in e[1]))
            left.remove(pair)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(zoo.EVERY))
    parser.add_argument("--plans", nargs="*")
    parser.add_argument("--drawn", type=int, help="so many cells, by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int)
    parser.add_argument("--quiet", action="store_true")
    query = parser.parse_args()
    kinds = {"usual": zoo.MODELS, "unusual": zoo.UNUSUAL}
    names = list(kinds.get(query.models) or query.models.split(","))
    total = Counter()
    began = time.time()
    for size, plans in PLANS.items():
        if query.n and size != query.n:
            continue
        rows = [[(name, text) for name in names] for text in query.plans or plans]
        limit = 1200.0
        if query.drawn:
            every = drawn(size, query.drawn, query.seed)
            rows, limit = [every[k : k + 10] for k in range(0, len(every), 10)], 120.0
        for row in rows:
            for (name, text), (kind, words) in run(size, row, limit).items():
                total[kind] += 1
                if kind in ("wrong", "crash") or not query.quiet:
                    print(f"{kind:8}{name:9}{text:60}{words}", flush=True)
    print(f"{sum(total.values())} cells in {time.time() - began:.0f} s: {dict(total)}")
    return 1 if total["wrong"] + total["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
