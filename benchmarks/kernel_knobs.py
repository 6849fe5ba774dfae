"""The constants of the kernel formulas before any fit, and which a fit may turn.

`start` holds data sheets and round numbers. `stages` says in which order what is turned: memory
first (it tells how much of the bandwidth is reached), then products, then convolutions, which are
made of products, each on the vector lanes and on the matrix units, then attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foretell.cost.kernel import LINEAGE, Constants, nearest, pipe_of, shipped
from foretell_lab.validate.kernel_devices import device_named
from foretell_lab.validate.kernel_truth import Measured
from foretell_lab.validate.kernels import family

State = tuple[Constants, dict[str, float]]  # constants and clocks

CONV_OPS = ("conv", "conv_dgrad", "conv_wgrad")

# Process of each architecture, whose boards share an energy a flop: TSMC 28, 16 (GlobalFoundries
# 14 for Vega), 12, 7 (6 for CDNA 2) and 4-5 nm.
PROCESS = {
    28: ("kepler", "maxwell"),
    16: ("pascal", "vega"),
    12: ("volta", "turing"),
    7: ("ampere", "cdna", "cdna2"),
    4: ("ada", "hopper", "blackwell", "cdna3"),
}
# Joules a flop to start from: T4 and P4 sustain 3.2 Tflop/s of fp32 on 70 and 75 W, so 16 to 12 nm
# stands near 20 pJ; each full node since has taken off about two fifths (TSMC's own figures for
# power at speed: 7 nm −60 % against 16, 5 nm −30 % against 7).
JOULES = {28: (30e-12, 6e-12), 16: (20e-12, 4e-12), 12: (19e-12, 1.6e-12)}
JOULES |= {7: (11e-12, 1.2e-12), 4: (6.5e-12, 0.8e-12)}


@dataclass(frozen=True)
class Knob:
    """A constant that a fit may turn: where it stands, and between what."""

    part: str
    names: tuple[str, ...]
    key: str
    low: float
    high: float

    def get(self, state: State) -> float:
        return float(_table(state, self.part)[self.names[0]][self.key])

    def put(self, state: State, value: float) -> None:
        for name in self.names:
            _table(state, self.part)[name][self.key] = value


def _table(state: State, part: str) -> dict[str, dict[str, float]]:
    if part == "clocks":
        return {"": state[1]}
    found: dict[str, dict[str, float]] = getattr(state[0], part)
    return found


def start() -> State:
    """Where every fit begins: data sheets and round numbers, nothing fitted."""
    tile = {"area": 32768.0, "resident": 4.0, "square": 0.1, "stream_rows": 82.0}
    tile |= {"split_most": 128.0, "narrow": 400.0, "narrow_power": 1.0, "power": 4.0}
    simt = {**tile, "sharing": 0.8, "step_k": 8.0, "start_k": 8.0, "peak": 1.0, "half_shape": 2.0}
    simt |= {"hide_area": 32768.0, "hide_power": 0.2, "bandwidth": 0.85, "flight": 350.0}
    simt |= {"flight_power": 0.8, "keep": 0.2, "fabric": 64.0, "overlap": 2.0, "split_k": 128.0}
    simt |= {"split_start": 2e-6, "split_rate": 0.6, "cycles": 2000.0}
    tensor = {**simt, "square": 1.0, "step_k": 32.0, "start_k": 128.0, "half_shape": 10.0}
    tensor |= {"power": 8.0, "split_k": 256.0, "flight_power": 0.1, "keep": 0.3, "overlap": 2.0}
    tensor |= {"cycles": 800.0, "split_rate": 3.0, "fabric": 512.0}
    conv = {}
    for op in CONV_OPS:
        conv |= {f"slow_{op}": 1.2, f"slow_{op}_1x1": 1.2, f"slow_{op}_strided": 1.2}
        conv |= {f"depthwise_{op}": 1.5, f"depthwise_{op}_tap": 0.15}
    conv |= {"slow_winograd2": 1.3, "slow_winograd4": 1.3, "stream": 0.8}
    attention = {"tile": 128.0, "resident": 1.0, "peak": 0.7, "backward": 1.2, "depth": 32.0}
    attention |= {"scores": 0.1, "dropout": 0.3, "bandwidth": 0.8, "overlap": 3.0, "launches": 2.0}
    attention |= {"ahead": 1.0, "behind": 1.0, "edge": 0.5, "deep": 0.0}
    roofline = {"peak": 0.8, "half_flops": 2e7, "bandwidth": 0.8, "overlap": 2.0, "power": 4.0}
    constants = Constants(
        gemm={"simt": simt, "tensor": tensor},
        conv={"simt": dict(conv), "tensor": dict(conv)},
        memory={"all": {"overlap": 2.5, "start": 0.5, "keep": 0.5, "cache": 1.5}} | _classes(),
        attention={
            **shipped().attention,
            "simt": {**attention, "tile": 64.0, "resident": 2.0, "peak": 0.35, "scores": 0.2},
        },
        roofline={"simt": roofline, "tensor": {**roofline, "half_flops": 1e8}},
        arch=_arches(),
        sigma={"bare": {"seen": 0.5, "unseen": 0.5}},
    )
    return constants, _clocks()


def _classes() -> dict[str, dict[str, float]]:
    """Memory-bound classes: tensors touched an element, and what else may bound them."""
    plain = {"bandwidth": 0.95, "rate": 16.0, "rate_uneven": 2.0, "cycles_row": 1e-3}
    plain |= {"cycles_lone": 1e-6, "start": 0.1}
    lone = {"rate": 0.7, "cycles_lone": 2.0}
    odd: dict[str, tuple[float, dict[str, float]]] = {
        "elementwise": (3, {}),
        "activation": (2, {"rate": 4.0}),
        "copy": (2, {}),
        "dropout": (2.25, {"rate": 4.0}),
        "optimizer": (7, {}),
        "softmax": (2, {"cycles_row": 30.0, "rate": 2.0}),
        "softmax_backward": (3, {"cycles_row": 30.0, "rate": 2.0}),
        "norm": (2, {"cycles_row": 300.0, "rate": 4.0}),
        "norm_backward": (5, {"cycles_row": 150.0, "rate": 4.0}),
        "batch_norm": (3, lone),
        "batch_norm_half": (3, lone),
        "batch_norm_backward": (5, lone),
        "batch_norm_backward_half": (5, lone),
        "pool": (1.75, {"rate": 1.0}),
        "pool_backward": (1.75, {"rate": 0.5}),
        "reduce": (1, {"rate": 2.0, "start": 1.0}),
        "embedding": (2, {"rate_uneven": 2.0}),
        "embedding_backward": (3, {"cycles_row": 3000.0, "start": 2.0}),
    }
    return {
        name: {**plain, **other, "passes": float(passes)} for name, (passes, other) in odd.items()
    }


def _arches() -> dict[str, dict[str, float]]:
    found = {}
    for process, arches in PROCESS.items():
        vector, matrix = JOULES[process]
        for arch in arches:
            found[arch] = {
                "joules_simt": vector,
                "joules_tensor": matrix,
                "quality_simt": 1.0,
                "quality_tensor": 1.0,
                "stream": 0.85,
                "pages": 1.0 if arch in ("kepler", "maxwell", "pascal") else 0.0,
                "conv_simt": 1.0,
                "conv_tensor": 1.0,
                "winograd": 1.0,
                "measured": 0.0,
            }
    order = [a for line in LINEAGE for a in line]
    return {a: found[a] for a in order}


def _clocks() -> dict[str, float]:
    floors = {"bmm": 31e-6, "linear": 54e-6, "conv": 70e-6, "elementwise": 29e-6}
    floors |= {"softmax": 33e-6, "norm": 46e-6}
    clocks = {f"floor_{k}": v for k, v in floors.items()}
    clocks |= {f"share_{k}": 0.6 for k in floors}
    return clocks | {"burst": 2e-4, "delay_deepbench": 3e-6, "delay_models": 1.5e-5}


def stages(measured: Sequence[Measured]) -> Iterable[tuple[list[Knob], list[Measured]]]:
    def chosen(kind: str, pipe: str = "") -> list[Measured]:
        return [m for m in measured if family(m.op) == kind and pipe in ("", pipe_for(m))]

    yield _memory_knobs(chosen("memory")), chosen("memory")
    for pipe in ("simt", "tensor"):
        yield _gemm_knobs(pipe, chosen("gemm", pipe)), chosen("gemm", pipe)
    for pipe in ("simt", "tensor"):
        yield _conv_knobs(pipe, chosen("conv", pipe)), chosen("conv", pipe)
    # attention in halves has a sweep of its own (→ fit_attention.py)
    knobs = [Knob("attention", ("simt",), k, a, b) for k, a, b in _ATTENTION]
    yield knobs, chosen("attention", "simt")


_ATTENTION = (
    ("dropout", 0.01, 3.0),
    ("launches", 0.5, 6.0),
    ("backward", 0.8, 2.0),
    ("peak", 0.2, 0.75),
)


_GEMM = (
    ("start_k", 1.0, 300.0),
    ("peak", 0.7, 1.3),
    ("half_shape", 0.3, 40.0),
    ("hide_area", 4e3, 6e4),
    ("hide_power", 0.03, 0.8),
    ("bandwidth", 0.6, 1.0),
    ("flight", 60.0, 2e3),
    ("flight_power", 0.02, 1.0),
    ("keep", 0.02, 2.0),
    ("fabric", 8.0, 2e3),
    ("split_start", 5e-7, 8e-6),
    ("split_rate", 0.1, 8.0),
    ("cycles", 100.0, 6e3),
)


def _gemm_knobs(pipe: str, chosen: Sequence[Measured]) -> list[Knob]:
    arches = {arch_of(m) for m in chosen}
    knobs = [Knob("gemm", (pipe,), key, low, high) for key, low, high in _GEMM]
    for process, mine in PROCESS.items():
        if arches & set(mine):
            usual = JOULES[process][pipe == "tensor"]
            knobs.append(Knob("arch", mine, f"joules_{pipe}", usual / 2.5, usual * 2.5))
    if pipe == "tensor":
        knobs += [Knob("gemm", (pipe,), "narrow", 50.0, 2e3)]
        return [*knobs, Knob("gemm", (pipe,), "narrow_power", 0.1, 2.0)]
    knobs += [Knob("gemm", (pipe,), "square", 0.005, 1.0)]
    if arches & {"ada", "hopper", "blackwell"}:
        knobs.append(Knob("gemm", (pipe,), "sharing", 0.5, 1.0))
    knobs += [Knob("arch", (a,), "quality_simt", 0.4, 1.05) for a in sorted(arches - {"volta"})]
    if arches & {"pascal", "maxwell"}:
        knobs.append(Knob("arch", ("kepler", "maxwell", "pascal"), "pages", 0.05, 5.0))
    sources = {(m.source, m.call) for m in chosen}
    knobs += [
        Knob("clocks", ("",), f"share_{c}", 0.3, 1.0) for s, c in sorted(sources) if s == "neusight"
    ]
    if "models" in {s for s, _ in sources}:
        knobs.append(Knob("clocks", ("",), "delay_models", 2e-6, 4e-5))
    if "deepbench" in {s for s, _ in sources}:
        knobs.append(Knob("clocks", ("",), "delay_deepbench", 3e-7, 1e-5))
    return [*knobs, Knob("clocks", ("",), "burst", 1e-5, 5e-3)]


def _conv_knobs(pipe: str, chosen: Sequence[Measured]) -> list[Knob]:
    arches = {arch_of(m) for m in chosen}
    knobs = []
    for op in CONV_OPS:
        knobs += [
            Knob("conv", (pipe,), f"slow_{op}{kind}", 0.6, 3.0) for kind in ("", "_1x1", "_strided")
        ]
        knobs.append(Knob("conv", (pipe,), f"depthwise_{op}", 0.1, 8.0))
        knobs.append(Knob("conv", (pipe,), f"depthwise_{op}_tap", 0.01, 3.0))
    knobs += [Knob("arch", (a,), f"conv_{pipe}", 0.5, 3.0) for a in sorted(arches - {"volta"})]
    if pipe == "tensor":
        return [*knobs, Knob("conv", (pipe,), "stream", 0.3, 1.0)]
    knobs += [Knob("conv", (pipe,), f"slow_winograd{f}", 0.7, 3.0) for f in (2, 4)]
    knobs += [Knob("arch", (a,), "winograd", 0.5, 4.0) for a in sorted(arches - {"volta"})]
    if "neusight" in {m.source for m in chosen}:
        knobs.append(Knob("clocks", ("",), "share_conv", 0.3, 3.0))
    return knobs


_MEMORY = {
    "activation": ("rate", "rate_uneven"),
    "batch_norm": ("cycles_lone", "rate"),
    "batch_norm_half": ("cycles_lone", "rate"),
    "batch_norm_backward": ("cycles_lone", "rate"),
    "batch_norm_backward_half": ("cycles_lone", "rate"),
    "copy": ("rate", "rate_uneven"),
    "dropout": ("rate",),
    "elementwise": ("rate_uneven",),
    "norm": ("cycles_row",),
    "norm_backward": ("cycles_row", "rate"),
    "pool": ("rate",),
    "pool_backward": ("rate",),
    "reduce": ("rate", "cycles_lone"),
    "softmax": ("cycles_row", "rate"),
    "softmax_backward": ("cycles_row", "rate"),
    "embedding_backward": ("cycles_row",),
}


_RANGE = {"rate": (0.05, 64.0), "rate_uneven": (0.2, 16.0), "cycles_row": (1.0, 2e4)}
_RANGE |= {"cycles_lone": (0.01, 10.0)}


def class_for(m: Measured) -> str:
    half = f"{m.op}_half"
    return half if m.dtype in ("fp16", "bf16") and half in _MEMORY else m.op


def _memory_knobs(chosen: Sequence[Measured]) -> list[Knob]:
    arches = {arch_of(m) for m in chosen}
    ops = {class_for(m) for m in chosen}
    knobs = [Knob("arch", (a,), "stream", 0.5, 1.0) for a in sorted(arches)]
    knobs += [
        Knob("memory", ("all",), "start", 0.1, 2.0),
        Knob("memory", ("all",), "keep", 0.1, 2.0),
    ]
    knobs += [Knob("memory", ("all",), "cache", 1.0, 4.0)]
    for op in sorted(ops):
        knobs += [Knob("memory", (op,), key, *_RANGE[key]) for key in _MEMORY.get(op, ())]
        knobs.append(Knob("memory", (op,), "start", 0.01, 4.0))
        if op not in ("elementwise", "pool", "pool_backward"):
            knobs.append(Knob("memory", (op,), "bandwidth", 0.3, 1.0))
    sources = sorted({m.op for m in chosen if m.source == "neusight"})
    return knobs + [Knob("clocks", ("",), f"share_{op}", 0.3, 1.0) for op in sources]


def arch_of(m: Measured) -> str:
    device = device_named(m.device)
    assert device is not None
    return device.arch


def pipe_for(m: Measured) -> str:
    device = device_named(m.device)
    assert device is not None
    return pipe_of(device, m.dtype)


_LENT = {  # what an architecture takes from the nearest that was measured, by who measured it
    ("memory", ""): ("stream",),
    ("gemm", "simt"): ("quality_simt", "pages"),
    ("conv", "simt"): ("conv_simt", "winograd"),
    ("conv", "tensor"): ("conv_tensor",),
}


def lend(constants: Constants, measured: Sequence[Measured]) -> None:
    """Give architectures without readings what lies between their nearest measured neighbours."""
    for (kind, pipe), keys in _LENT.items():
        seen = {arch_of(m) for m in measured if family(m.op) == kind and pipe in ("", pipe_for(m))}
        held = {a: constants.arch[a] for a in constants.arch if a in seen}
        for arch, numbers in constants.arch.items():
            if held and arch not in held:
                weights = _neighbours(arch, held)
                for k in keys:
                    mean = sum(w * math.log(max(held[a][k], 1e-9)) for a, w in weights.items())
                    numbers[k] = float(f"{math.exp(mean):.4g}")


def _neighbours(arch: str, held: Mapping[str, object]) -> dict[str, float]:
    """The nearest measured architecture before and after one, weighed by how near."""
    line = next((x for x in LINEAGE if arch in x), ())
    at = line.index(arch) if line else 0
    before = [i for i in range(at) if line[i] in held][-1:]
    after = [i for i in range(at + 1, len(line)) if line[i] in held][:1]
    near = {line[i]: 1 / abs(i - at) for i in (*before, *after)} or {nearest(arch, held): 1.0}
    total = sum(near.values())
    return {a: w / total for a, w in near.items()}
