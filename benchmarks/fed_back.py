"""What `foretell fit` learns from one plan's run is worth for others of the same script.

    python benchmarks/fed_back.py [-o FOLDER] [--no-run]

For each script: every plan is run on two gloo ranks, by turns, several times. The first plan's
runs are fed back; what was predicted of the others before and after is compared with the median
of theirs. A bench of this machine comes first, for a cluster to predict on. Steps of a tenth of a
second: on a busy machine shorter ones tell more of who else is on it. What was measured when these
lines were written is in `benchmarks/measured/fed_back`; `--no-run` tells of it again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from click.testing import CliRunner

from foretell.cli.main import foretell

TURNS, STEPS = 3, 10
RANKS = 2
FOLDER = Path("benchmarks/measured/fed_back")
HEAD = """import torch
from torch import nn

SAMPLES = {samples}


def batch(rank, size):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *{shape}, generator=draw)
    y = torch.randint(0, 10, (SAMPLES,), generator=draw)
    return (x.chunk(size)[rank],), y.chunk(size)[rank]


def model():
"""
SCRIPTS = {  # samples, shape of one, model
    "linear": (256, "(1024,)", """
    layers = [m for _ in range(5) for m in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))
"""),
    "image": (32, "(3, 32, 32)", """
    sizes = ((3, 32), (32, 64), (64, 128))
    body = [
        part
        for a, b in sizes
        for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10))
"""),
}  # fmt: skip
FIRST = "dp=2,global_batch={samples}"
OTHERS = (
    "dp=2,global_batch={samples},bucket_mb=1",
    "dp=2,global_batch={samples},overlap=false",
    "dp=2,global_batch={samples},zero=1",
    "dp=2,global_batch={samples},zero=3",
    "dp=2,global_batch={twice}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=FOLDER)
    parser.add_argument("--no-run", action="store_true")
    options = parser.parse_args()
    if not options.no_run:
        measure(options.output)
    show(figures_of(options.output))


def measure(folder: Path) -> None:
    """Bench, then every plan of every script, turn by turn."""
    folder.mkdir(parents=True, exist_ok=True)
    _query("bench", "--no-ops", "-o", folder / "bench", "--ranks", RANKS)
    steps: dict[str, dict[str, list[float]]] = {}
    for turn, name in ((turn, name) for turn in range(TURNS) for name in SCRIPTS):
        with tempfile.TemporaryDirectory() as place:
            for k, (plan, script) in enumerate(_plans(Path(place), name).items()):
                out = folder / f"{name}-{turn}" if k == 0 else folder / "other"
                line = ("run", script, "--plan", plan, "--steps", STEPS, "-o", out)
                took = _query(*line, "--device", "cpu")["step_s"]
                steps.setdefault(name, {}).setdefault(plan, []).append(took)
        (folder / "steps.json").write_text(json.dumps(steps, indent=1) + "\n")


def _plans(folder: Path, name: str) -> dict[str, Path]:
    """The plans of a script, each with the script: another batch is another one."""
    samples, shape, body = SCRIPTS[name]
    paths = {many: folder / f"{name}_{many}.py" for many in (samples, 2 * samples)}
    for many, path in paths.items():
        path.write_text(HEAD.format(samples=many, shape=shape) + body.lstrip("\n"))
    return {
        text.format(samples=samples, twice=2 * samples): paths[samples * (1 + ("twice" in text))]
        for text in (FIRST, *OTHERS)
    }


def figures_of(folder: Path) -> list[dict[str, Any]]:
    """What was measured of every plan, and predicted before and after the first was fed back."""
    on = ("--on", folder / "bench" / "cluster.toml")
    found = []
    for name, steps in json.loads((folder / "steps.json").read_text()).items():
        with tempfile.TemporaryDirectory() as place:
            plans = _plans(Path(place), name)
            learned = Path(place) / "calibration.json"
            script = ("--workload", next(iter(plans.values())))
            _query("fit", *sorted(folder.glob(f"{name}-*")), *script, *on, "-o", learned)
            for plan, took in steps.items():
                line = ("predict", plans[plan], *on, "--plan", plan)
                before = _query(*line)["step_s"]
                after = _query(*line, "--calibration", learned)["step_s"]
                found.append({"script": name, "plan": plan, "steps": took, "before": before,
                              "after": after, "measured": median(took),
                              "is_first": plan == next(iter(plans))})  # fmt: skip
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """A line a plan, and the mean errors of those that were not fed back."""
    print(f"{'script':8} {'plan':38} {'measured':>10} {'before':>18} {'after fit':>18}")
    for row in rows:
        print(_line(row))
    for key in ("before", "after"):
        errors = [abs(row[key] / row["measured"] - 1) for row in rows if not row["is_first"]]
        print(f"{key:6} fit: mean |error| {mean(errors):.0%}, median {median(errors):.0%}, "
              f"of {len(errors)} plans that were not fed back")  # fmt: skip


def _query(*words: Any) -> Any:
    """What a command answers."""
    line = [*map(str, words), "--json", "-q"]
    result = CliRunner().invoke(foretell, line, catch_exceptions=False)
    return json.loads(result.stdout)


def _line(row: dict[str, Any]) -> str:
    figures_of = [
        f"{1e3 * row[key]:7.1f} ms ({row[key] / row['measured'] - 1:+5.0%})"
        for key in ("before", "after")
    ]
    low, high = min(row["steps"]), max(row["steps"])
    mark = "  fed back" if row["is_first"] else ""
    return (
        f"{row['script']:8} {row['plan']:38} {1e3 * row['measured']:7.1f} ms {figures_of[0]:>18} "
        f"{figures_of[1]:>18}  runs {1e3 * low:.0f} to {1e3 * high:.0f} ms{mark}"
    )


if __name__ == "__main__":
    main()
