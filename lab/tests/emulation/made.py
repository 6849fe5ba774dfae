"""A profile and a machine made by hand, so that predictions can be counted on one's fingers."""

from foretell_lab.emulation.predicted import Known

MB = 1_000_000


def step(times):
    backward = [["b", 0.004 * times], ["a", 0.006 * times]]
    return {"forward": 0.01 * times, "rest": 0.0, "update": 0.001, "wall": 0.03,
            "backward": backward}  # fmt: skip


PROFILE = {
    "model": "tiny",
    "samples": 8,
    "parameters": {"a": 4 * MB, "b": 1 * MB},
    "linear": {},
    "steps": {"8": step(1.0), "4": step(0.5), "12": step(1.5)},
}
RATE = 10 * MB  # bytes/s


def machine(ranks=(2,), networks=("slow",), stretch=1.0, latency=0.001):
    sizes = (1000, 100_000, 1 * MB, 4 * MB)
    links = [
        {"network": n, "ranks": r, "op": op, "bytes": s, "cpu_s": 0.0, "seconds": t}
        for n in networks
        for r in ranks
        for op in ("all_reduce", "reduce", "broadcast", "all_gather")
        for s, t in ((s, latency + s / RATE) for s in sizes)
    ]  # fmt: skip
    cores = [{"ranks": r, "stretch": stretch, "cpu_s": 0.0} for r in (1, *ranks)]
    answer = {"cpu": "made up", "cores": 2, "load": 0.0}
    return {"machine": answer, "links": links, "cores": cores, "fits": []}


def known(**options):
    return Known({"tiny": PROFILE}, machine(**options))
