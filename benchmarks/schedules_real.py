"""Real models with priced blocks: what a searched schedule gains over fixed ones.

Sizes of Tessel's evaluation scripts: V100 of 32 GB, eight a node, fp16, recompute, 128 samples a
step, 8 bytes a parameter (weights, gradients, and as much again of optimizer state). Every way is
lowered with its messages and its update and played. A way that does not fit into memory is played
all the same on devices that hold more, and marked: that is what it would gain from more memory.
"""

from dataclasses import replace
from functools import cache

from table import Row

from foretell.cluster import Cluster, load
from foretell.errors import ForetellError
from foretell.plan import Plan
from foretell.search.schedule.find import SolvedModel, solve_model
from foretell.search.schedule.model import model
from foretell.workload import Workload
from foretell.workload import load as load_workload

GPT = "gpt:layers={},hidden={},heads={},vocab={},seq=2048,dtype=fp16"
MT5 = "mt5:layers={},hidden={},heads={},vocab={},seq=1024,target=1024,depth={},inner={},dtype=fp16"
FLAVA = "flava:layers=24,hidden=4096,heads=32,seq={}"
# layers, hidden, heads, vocabulary for 4, 8, 16 and 32 GPUs
SIZES = {
    "GPT": ((32, 4096, 32, 10**6), (40, 6144, 48, 10**6), (48, 8192, 64, 10**6),
            (80, 8192, 64, 1_500_000)),
    "mT5": ((24, 1024, 16, 10**6), (24, 3072, 24, 10**6), (32, 6144, 48, 1_500_000),
            (40, 8192, 64, 1_500_000)),
}  # fmt: skip
GPUS = (4, 8, 16, 32)
BATCH = 128
PLAN = Plan(framework="megatron-core-unfused", optimizer="sgd", grad_dtype="fp16")
FIXED = {  # what others call it: the placements it is for, and the order
    "1F1B": (("v",), "1f1b"),
    "1F1B+": (("m", "nn"), "1f1b+"),
    "Chimera": (("x",), "chimera"),
    "TP": (("tp",), "1f1b"),
}
NVLINK = "v100-32"  # a node of eight is a DGX-1
PLENTY = 64  # times the memory, for ways that do not fit


def workload(name: str, size: tuple[int, ...]) -> Workload:
    """A model of Tessel's sizes; mT5's feed-forward in the proportion of its published models."""
    layers, hidden, heads, vocab = size
    if name == "GPT":
        return load_workload(GPT.format(*size))
    inner = hidden * 2816 // 1024
    return load_workload(MT5.format(layers, hidden, heads, vocab, hidden // heads, inner))


@cache
def machines(gpus: int, plenty: bool, device: str) -> Cluster:
    """Nodes of eight; with plenty of memory or as they are."""
    found = load(f"{device}:gpus={gpus}")
    if not plenty:
        return found
    groups = tuple(
        (replace(n, devices=tuple(replace(d, memory=d.memory * PLENTY) for d in n.devices)), many)
        for n, many in found.groups
    )
    return replace(found, groups=groups, _ways={}, _levels={})


def one(
    what: Workload, gpus: int, shape: str, method: str, micro_batch: int, *, plenty: bool,
    batch: int = BATCH, mode: str = "train", device: str = NVLINK,
) -> SolvedModel:  # fmt: skip
    """One way to run a batch."""
    num = batch // micro_batch
    options = {"recompute": "yes" if mode == "train" else "no", "mode": mode}
    plan = PLAN.but(micro_batch=micro_batch)
    found = model(
        what, machines(gpus, plenty, device), shape, plan=plan, micro_batches=num, **options
    )
    return solve_model(found, num, method=method, work=4.0)


def fixed(
    what: Workload, gpus: int, shapes: tuple[str, ...], method: str, micro_batch: int
) -> tuple[float, bool]:
    """Seconds of a fixed way, and whether it fits into memory; inf where it cannot be at all."""
    for plenty in (False, True):
        steps = []
        for shape in shapes:
            try:
                found = one(what, gpus, shape, method, micro_batch, plenty=plenty)
            except ForetellError:
                continue
            steps.append(found.prediction.step)
        if steps:
            return min(steps), not plenty
    return float("inf"), False


def training() -> list[Row]:
    """Steps of GPT and mT5: ours, and how many times as long every fixed way takes."""
    rows: list[Row] = []
    gains: list[float] = []
    for name, sizes in SIZES.items():
        for gpus, size in zip(GPUS, sizes, strict=True):
            micro = 4 if name == "mT5" and gpus == 4 else 1
            row, gain = trained(name, workload(name, size), gpus, micro)
            rows.append(row)
            gains += gain
    fits = max(gains, default=0.0)
    rows.append(Row("most gained over a fixed way that fits", f"{fits:.2f} x", "5.5 x (paper)"))
    return rows


def trained(name: str, what: Workload, gpus: int, micro: int) -> tuple[Row, list[float]]:
    """One model on one cluster."""
    shapes = ("v", "m", "nn", "x", "tp") if name == "mT5" else ("v", "m", "x", "tp")
    ours: list[SolvedModel] = []
    for shape in shapes:
        try:
            ours.append(one(what, gpus, shape, "search", micro, plenty=False))
        except ForetellError:
            continue
    best = min(ours, key=lambda s: s.per_sample)
    step = best.prediction.step
    said, gains = [], []
    for label, (places, method) in FIXED.items():
        took, fits = fixed(what, gpus, places, method, micro)
        said.append(f"{label} {took / step:.2f}{'' if fits else ' (does not fit)'}")
        gains += [took / step] if fits else []
    gap = best.schedule.gap
    figure = f"{step:.2f} s, shape {best.model.shape}, {100 * gap:.1f} % above the bound"
    return Row(f"{name}, {gpus} GPUs", figure, ", ".join(said)), gains


def inference() -> list[Row]:
    """Latency of FLAVA on four GPUs: every way with its best micro-batch."""
    rows, gains = [], []
    # 77 words as published; as many as patches, so that branches are even; and without NVLink
    for words, device in ((77, NVLINK), (196, NVLINK), (196, "v100-pcie")):
        what = load_workload(FLAVA.format(words))
        for batch in (1, 4, 16, 64):
            times = {s: latency(what, device, s, batch) for s in ("k", "v", "tp", "x")}
            ours = min(times, key=lambda s: times[s])
            gains.append(1 - times[ours] / min(times["v"], times["tp"]))
            names = (("pipeline", "v"), ("TP", "tp"), ("K", "k"))
            said = ", ".join(f"{n} {1e3 * times[s]:.0f}" for n, s in names)
            figure = f"{1e3 * times[ours]:.0f} ms, shape {ours}: {100 * gains[-1]:.0f} % less"
            rows.append(Row(f"FLAVA, {words} words, {device}, batch {batch}", figure, said))
        label = f"{words} words, {device}: TP on 4 GPUs reaches of 4 times one"
        rows.append(Row(label, efficiency(what, device)))
    most = f"{100 * max(gains):.0f} %"
    rows.append(Row("most gained over pipeline and TP", most, "38 % (paper)"))
    return rows


def efficiency(what: Workload, device: str) -> str:
    """What four GPUs reach together, of four times one, for small and large batches."""
    said = []
    for batch in (1, 64):
        alone, four = (
            one(
                what,
                n,
                "tp",
                "search",
                batch,
                plenty=True,
                batch=batch,
                mode="infer",
                device=device,
            )
            for n in (1, 4)
        )
        said.append(f"{25 * alone.prediction.step / four.prediction.step:.0f} % (batch {batch})")
    return ", ".join(said)


def latency(what: Workload, device: str, shape: str, batch: int) -> float:
    """Seconds until a whole batch is through, with the best of its micro-batches."""
    times = [float("inf")]
    for num in (n for n in (1, 2, 4, 8, 16, 32) if n <= batch):
        try:
            found = one(
                what,
                4,
                shape,
                "search",
                batch // num,
                plenty=False,
                batch=batch,
                mode="infer",
                device=device,
            )
            times.append(found.prediction.step)
        except ForetellError:
            continue
    return min(times)
