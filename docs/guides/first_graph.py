# %% [markdown]
# The code of `first-graph.md`: build a graph by hand, simulate it, change it, report it.
# Run it with `python docs/guides/first_graph.py`; what it prints is kept in `first_graph.out`.

# %% What it needs
import tempfile
from pathlib import Path

from foretell.graph import Builder, load, replicate, save
from foretell.report.page import write
from foretell.simulate import simulate
from foretell.simulate.timeline import breakdown, path_seconds

# %% A step of two layers
make = Builder()
thread = make.lane("main thread", kind="host")
stream = make.lane("stream 7", kind="compute")

kernels = [("forward", "fc1"), ("forward", "fc2"), ("backward", "fc2"), ("backward", "fc1")]
for phase, layer in kernels:
    seconds = 100e-6 if phase == "forward" else 200e-6
    launch = make.task(kind="host", op="launch", lane=thread, seconds=10e-6)
    kernel = make.task(
        kind="kernel", op="gemm", layer=layer, phase=phase, lane=stream, seconds=seconds
    )
    make.wait(kernel, launch, lag=2e-6, kind="launch")
make.task(kind="host", op="sync", lane=thread, seconds=1e-6, drains=[stream])

step = make.graph()
print(repr(step))
print(step, end="")

# %% Simulate it
before = simulate(step)
print(before)
for i in before.critical_path():
    task, start, end, cause, why = before[i]
    by = f" %{cause}" if cause >= 0 else ""
    print(f"%{i} {task.op}: {1e6 * start:.0f} to {1e6 * end:.0f} µs, {why}{by}")

# %% What if the matmuls were twice as fast
with step.edit("faster:op=gemm,times=2") as edit:
    edit.scale(edit.select(op="gemm"), 0.5)
faster = edit.graph

after = simulate(faster, before=before)
print(f"{1e6 * before.seconds:.0f} µs before, {1e6 * after.seconds:.0f} µs after")
print(faster.history)

# %% What if two ranks shared the work
twins = replicate(step, 2)
with twins.edit("all-reduce by hand") as edit:
    channels = [edit.lane("channel", rank=rank, kind="comm") for rank in (0, 1)]
    for layer in ("fc2", "fc1"):
        (reduce,) = edit.insert(
            kind="collective", op="all_reduce", lane=channels[0], seconds=250e-6, group="0-1"
        )
        edit.hold(reduce, channels[1])
        edit.wait(reduce, edit.select(layer=layer, phase="backward"))
        edit.wait(edit.select(op="sync"), reduce)
shared = edit.graph

together = simulate(shared)
print(together)
print(*map(str, (shared[i] for i in shared.select(op="all_reduce"))), sep="\n")

# %% Say where the time goes
for part in breakdown(together):
    spans = part.compute, part.exposed, part.hidden, part.host, part.idle
    print(f"rank {part.rank}:", *(f"{1e6 * t:.0f}" for t in spans))
for op, t in path_seconds(together, "op").items():
    print(f"{op}: {1e6 * t:.0f} µs of the critical path")

# %% Keep it
with tempfile.TemporaryDirectory() as folder:
    save(shared, Path(folder) / "step.graph")
    again = load(Path(folder) / "step.graph")
    write([("two ranks", together)], Path(folder) / "step.html")
    page = (Path(folder) / "step.html").read_text()
print(again.fingerprint() == shared.fingerprint(), again.history)
print(page.splitlines()[0])

# %% A faster task may make a slower step
make = Builder()
a, b, c, d = (make.lane(name, ordered=False) for name in "abcd")
first = make.task(lane=a, seconds=2)
short = make.task(lane=b, seconds=1, after=[first])
make.task(lane=c, seconds=10, after=[short])
other = make.task(lane=d, seconds=3)
make.task(lane=b, seconds=5, after=[other])

slow = make.graph()
with slow.edit() as edit:
    edit.scale(other, 1 / 3)
print(simulate(slow).seconds, simulate(edit.graph).seconds)
