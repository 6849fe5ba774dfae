"""`python -m foretell_lab.fused`: make regions, measure them, gather results, fit and train."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from foretell.errors import ForetellError

TABLES = Path(str(files("foretell.cost") / "tables"))


def main(arguments: list[str] | None = None) -> int:
    """Parse and do; 2 where something given is wrong."""
    given = _parser().parse_args(arguments)
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "make": _make, "measure": _measure, "gather": _gather, "fit": _fit, "train": _train,
        "steps": _steps,
    }  # fmt: skip
    try:
        return verbs[given.verb](given)
    except ForetellError as why:
        print(why, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="foretell_lab.fused", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("make", help="write a file of regions")
    make.add_argument("-o", "--out", required=True)
    make.add_argument("--count", type=int, default=16000)
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--cpu", action="store_true", help="of sizes for one core")
    make.add_argument(
        "--more-of",
        default="",
        help="families, by commas, of which there are more; no models kept out",
    )
    make.add_argument(
        "--only", default="", help="families, by commas: these alone, in equal parts, none drawn"
    )
    measure = verbs.add_parser("measure", help="measure a file of regions")
    measure.add_argument("regions")
    measure.add_argument("-o", "--out", required=True)
    measure.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    measure.add_argument("--seconds", type=float, default=480)
    measure.add_argument("--processes", type=int, default=0)
    measure.add_argument("--only-fused", action="store_true", help="do not time ops alone")
    measure.add_argument("--products", action="store_true", help="the compiler writes matmuls too")
    steps = verbs.add_parser("steps", help="measure whole compiled steps under fusion plans")
    steps.add_argument("-o", "--out", required=True)
    steps.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    steps.add_argument("--seconds", type=float, default=300)
    steps.add_argument("--processes", type=int, default=0)
    gather = verbs.add_parser("gather", help="join regions and results to a data set")
    gather.add_argument("pairs", nargs="+", help="regions results [regions results ...]")
    gather.add_argument("-o", "--out", required=True)
    gather.add_argument("--steps", action="store_true", help="the file has steps, not regions")
    gather.add_argument("--onto", help="a data set to add to")
    gather.add_argument("--only-kernels", action="store_true", help="no rows of whole regions")
    gather.add_argument(
        "--hurried", type=int, default=0, help="first pairs of which little is kept"
    )
    fit = verbs.add_parser("fit", help="fit the formula to a data set of the package")
    fit.add_argument("--cpu", action="store_true", help="the one of a CPU")
    train = verbs.add_parser("train", help="train the network on a data set of the package")
    train.add_argument("--cpu", action="store_true", help="the one of a CPU")
    train.add_argument("--minutes", type=float, default=11)
    train.add_argument("--steps", type=int, default=0, help="of each network, instead of minutes")
    train.add_argument("--kernels", action="store_true", help="of kernels as written, not regions")
    train.add_argument(
        "--onward", action="store_true", help="from the weights of the package; --cpu: the GPU's"
    )
    return parser


def _make(given: argparse.Namespace) -> int:
    from foretell_lab.fused.host_make import make_host
    from foretell_lab.fused.make import make, make_only

    out, count, seed = Path(given.out), given.count, given.seed
    more, only = ([n for n in names.split(",") if n] for names in (given.more_of, given.only))
    if given.cpu:
        made = make_host(out, count, seed)
    else:
        made = make_only(out, count, seed, only) if only else make(out, count, seed, more)
    print(f"{made} regions in {given.out}")
    return 0


def _measure(given: argparse.Namespace) -> int:
    from foretell_lab.fused.measure import Job, measure

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a process: they share the cores
    ends = time.time() + given.seconds
    alone = not given.only_fused
    if given.device == "cpu":
        from foretell_lab.fused.host import HostJob, measure_host

        measure_host(HostJob(given.regions, given.out, ends, alone=alone))
        return 0
    job = Job(given.regions, given.out, given.device, ends, alone, given.products)
    measure(job, given.processes or max(1, (os.cpu_count() or 2) - 1))
    return 0


def _steps(given: argparse.Namespace) -> int:
    from foretell_lab.fused.steps import steps

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    steps(given.out, given.device, given.seconds, given.processes or (os.cpu_count() or 2))
    return 0


def _gather(given: argparse.Namespace) -> int:
    from foretell_lab.fused.gather import gather

    if given.steps:
        from foretell_lab.fused.gather_steps import gather_steps

        print(f"{gather_steps(given.pairs[0], Path(given.out))} steps in {given.out}")
        return 0
    pairs = list(zip(given.pairs[::2], given.pairs[1::2], strict=True))
    onto = Path(given.onto) if given.onto else None
    count = gather(pairs, Path(given.out), onto, not given.only_kernels, given.hurried)
    print(f"{count} measured rows in {given.out}")
    return 0


def _fit(given: argparse.Namespace) -> int:
    from foretell_lab.fused import calibrate, host_fit

    found = [host_fit.write(TABLES / "fused_host.toml")] if given.cpu else None
    for line in found or calibrate.write(TABLES / "fused.toml"):
        print(line)
    return 0


def _note(line: str) -> None:
    print(line, flush=True)


def _train(given: argparse.Namespace) -> int:
    from foretell_lab.fused.train import write

    sort = "kernel" if given.kernels else "cpu" if given.cpu else "gpu"
    name = {"gpu": "fused_net.npz"}.get(sort, f"fused_net_{sort}.npz")
    begin = "gpu" if given.cpu else sort
    write(TABLES / name, sort, given.minutes, given.steps, _note, begin if given.onward else "")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
