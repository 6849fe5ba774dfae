"""How fast layouts are priced and the best one found: CPU seconds and memory, beside others.

Figures of others are theirs, measured on a machine like this one: Calculon's search prices fewer
than 400 layouts a CPU-second (GPT-3 13B on 64 A100); PyTorch's AutoParallel takes 327 CPU-s and
6.7 GB for a 7B model on 64 devices, Galvatron 323 CPU-s for 7B on 8.
"""

import resource
import statistics
import time
from collections.abc import Callable

from table import Row, show

from foretell.cluster import load as machines
from foretell.plan import Plan
from foretell.predict import predict
from foretell.search.oracle import Space, choose, layouts, sweep
from foretell.workload import load

GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200,dtype=bf16"
LLAMA = "llama:layers=32,hidden=4096,heads=32,seq=4096,vocab=32000"
WIDE = Space(
    micro_batch=(1, 2, 3, 4, 6, 8), zero=(0, 1, 2, 3), chunks=(1, 2, 3, 4, 6), tp_inside=False
)


def rows() -> list[Row]:
    """All figures."""
    return [*_sweep(), _one(), *_best(8), *_best(64), *_best(48), *_best(100)]


def _sweep() -> list[Row]:
    model, cluster = load(GPT3), machines("dgx-a100:nodes=128")
    batches = (1536, 3072, 1024, 2048, 4608, 6144)
    plans = [p for b in batches for p in layouts(model, 1024, b, 8, WIDE)][:10_000]
    assert len(set(plans)) == 10_000
    begin = time.process_time()
    sweep(plans, model, cluster)
    took = time.process_time() - begin
    return [
        Row(f"{len(plans)} layouts of GPT-3 175B on 1024 devices", f"{took:.2f} CPU-s", "60 s"),
        Row("layouts a CPU-second", f"{len(plans) / took:,.0f}", "Calculon: < 400"),
    ]


def _one() -> Row:
    model, cluster = load(GPT3), machines("dgx-a100:nodes=128")
    plan = Plan.parse("dp=16,tp=8,pp=8,sp=yes,micro_batch=1,global_batch=1536,recompute=full")
    predict(plan, model, cluster)  # compiled and priced once
    took = statistics.median(_cpu_seconds(lambda: predict(plan, model, cluster)) for _ in range(5))
    return Row("one prediction, simulated", f"{took * 1e3:.0f} ms", "50 ms")


def _cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _best(gpus: int) -> list[Row]:
    model, cluster = load(LLAMA), machines(f"h100:gpus={gpus}")
    begin = time.process_time()
    found = choose(layouts(model, gpus, 8 * gpus, 8, Space()), model, cluster)
    took = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    what = f"best layout of Llama 7B on {gpus} devices, of {found.layouts}"
    return [
        Row(what, f"{took:.1f} CPU-s, {peak:.2f} GiB", "30 s, 1 GB; AutoParallel 327, 6.7 GB"),
        Row(f"on {gpus}: {found.best.plan}", f"gap {found.gap:.1%}"),
    ]


if __name__ == "__main__":
    show("Oracle", rows())
