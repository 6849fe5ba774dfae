"""foretell from scratch: the whole idea in one file, with nothing but Python.

Read it from top to bottom, or run it: `python docs/from_scratch.py` prints what each chapter finds.
Every chapter is a small but true form of one part: the same rule, the same formulas, fewer cases.
Where the real part does more, or is to do more, the text says what. Seconds, bytes and flop inside.
"""

import heapq
import random
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

# %% 1. A step is tasks that wait and occupy
# One training step is a set of tasks. A task waits for others, and while it runs it occupies lanes:
# a CPU thread, a CUDA stream, a network channel; a collective holds lanes of all its ranks at once.
# An ordered lane runs its tasks in the order in which they were issued (here: the order of the
# dictionary); a free lane takes whichever can go first.


class Task(NamedTuple):
    name: str
    seconds: float
    lanes: tuple = ()
    after: tuple = ()
    op: str = ""  # the kind of work
    priority: int = 0


class Graph(NamedTuple):
    tasks: dict[str, Task]
    free: frozenset = frozenset()  # lanes without an issue order


def graph_of(tasks, free=()):
    return Graph({task.name: task for task in tasks}, frozenset(free))


# A host thread launches kernels; each kernel waits for its launch and for its turn on the stream;
# at the end the host waits for the device. A launch takes 10 µs, a kernel 1 µs a sample.
def step(batch, kernels=16):
    for i in range(kernels):
        yield Task(f"launch{i}", 10e-6, ("host",), op="launch")
        yield Task(f"kernel{i}", batch * 1e-6, ("stream",), (f"launch{i}",), op="kernel")
    yield Task("sync", 5e-6, ("host",), (f"kernel{kernels - 1}",), op="sync")


STEPS = {"small batch": graph_of(step(batch=4)), "large batch": graph_of(step(batch=40))}
print("1. A step")
for task in list(STEPS["small batch"].tasks.values())[-3:]:
    print(f"  {task.name} on {task.lanes} for {1e6 * task.seconds:.0f} µs after {task.after}")

# %% 2. The rule
# A task starts when everything it waits for is done, every lane it needs is free, and on ordered
# lanes it is its turn. Among those that could start: highest priority, then earliest ready, then
# lowest number. Of each task we keep what let it start, its cause. So the critical path is a read:
# go back from the task that ends last. The real rule adds gaps, lags and links shared by rate.


class Span(NamedTuple):
    start: float
    end: float
    cause: str | None


def simulate(graph):
    tasks, number = graph.tasks, {name: i for i, name in enumerate(graph.tasks)}
    waiting = {t.name: len(set(t.after)) for t in tasks.values()}
    followers = {name: [t.name for t in tasks.values() if name in t.after] for name in tasks}
    lanes = {lane for t in tasks.values() for lane in t.lanes}
    turns = {k: [n for n in tasks if k in tasks[n].lanes][::-1] for k in lanes - graph.free}
    never = (0.0, 1, None)  # when, minus whose number (ties go to the lowest), and who
    ready, freed, taken = dict.fromkeys(tasks, never), dict.fromkeys(lanes, never), set()
    now, running, spans = 0.0, [], {}
    candidates = {name for name in tasks if not waiting[name]}
    while True:
        for i in sorted(candidates, key=lambda i: (-tasks[i].priority, ready[i][0], number[i])):
            mine = tasks[i].lanes
            if any(k in taken or (k in turns and turns[k][-1] != i) for k in mine):
                continue
            free = max((freed[k] for k in mine if freed[k][2]), default=never)
            by_lane = free[0] > ready[i][0] or ready[i][2] is None
            spans[i] = Span(now, now + tasks[i].seconds, (free if by_lane else ready[i])[2])
            heapq.heappush(running, (spans[i].end, number[i], i))
            candidates.remove(i)
            taken.update(mine)
            for k in turns.keys() & set(mine):
                turns[k].pop()
        if not running:
            return {name: spans[name] for name in tasks}
        now = running[0][0]
        while running and running[0][0] == now:
            _, k, i = heapq.heappop(running)
            taken.difference_update(tasks[i].lanes)
            freed.update(dict.fromkeys(tasks[i].lanes, (now, -k, i)))
            for j in followers[i]:
                waiting[j] -= 1
                ready[j] = max(ready[j], (now, -k, i)) if ready[j][2] else (now, -k, i)
            candidates.update(j for j in followers[i] if not waiting[j])


def seconds(graph):
    return max(span.end for span in simulate(graph).values())


def critical_path(spans):
    path = [max(spans, key=lambda i: spans[i].end)]
    while (cause := spans[path[-1]].cause) is not None:
        path.append(cause)
    return path[::-1]


print("2. The rule")
for name, graph in STEPS.items():
    on_path = [graph.tasks[i].op for i in critical_path(simulate(graph))]
    kinds = ", ".join(f"{on_path.count(op)} {op}" for op in ("launch", "kernel", "sync"))
    print(f"  {name}: {1e6 * seconds(graph):.0f} µs; on the critical path: {kinds}")


# %% 3. A what-if is a function from graph to graph
# Three verbs say most optimisations: scale, remove, insert. Who waited for a task that goes waits
# for what it waited for.
def scale(graph, op, times):
    tasks = graph.tasks.values()
    made = [t._replace(seconds=t.seconds * times) if t.op == op else t for t in tasks]
    return graph_of(made, graph.free)


def remove(graph, op):
    def kept(names):
        for i in names:
            yield from (i,) if graph.tasks[i].op != op else kept(graph.tasks[i].after)

    stay = [t for t in graph.tasks.values() if t.op != op]
    return graph_of([t._replace(after=(*kept(t.after),)) for t in stay], graph.free)


def insert(graph, task, before):
    tasks = []
    for t in graph.tasks.values():
        tasks += [task, t._replace(after=(*t.after, task.name))] if t.name == before else [t]
    return graph_of(tasks, graph.free)


# Mixed precision makes kernels three times as fast, say. A CUDA graph replaces all launches by one.
# On the small batch nothing waits for the kernels but the last, so mixed precision alone brings
# next to nothing. After the CUDA graph it does.
def cuda_graph(graph):
    launch = Task("launch", 12e-6, ("host",), op="launch")
    return insert(remove(graph, "launch"), launch, before="kernel0")


print("3. What if")
for name, graph in STEPS.items():
    made = {"amp": scale(graph, "kernel", 1 / 3), "cuda graph": cuda_graph(graph)}
    made["both"] = scale(made["cuda graph"], "kernel", 1 / 3)
    gains = ", ".join(f"{k} {seconds(graph) / seconds(g):.2f} ×" for k, g in made.items())
    print(f"  {name}: {gains}")

# %% 4. Prices
# A kernel moves bytes and does flops, whichever takes longer (the roofline). A ring all-reduce over
# p ranks has 2(p−1) steps, each of which costs a latency α and sends 1/p of the bytes. The real
# prices know tiles, caches and NCCL's ways, prefer measurements, and carry their uncertainty.

PEAK, MEMORY_RATE, MEMORY = 312e12, 2.039e12, 80e9  # NVIDIA A100 80GB SXM data sheet, bf16
NVLINK, NETWORK = 300e9, 25e9  # the same data sheet, one way; InfiniBand HDR, 200 Gb/s
ALPHA, SMALLEST = 5e-6, 2e-6  # assumed: a step of a ring, the smallest kernel


def gemm_seconds(m, n, k):
    return SMALLEST + max(2 * m * n * k / PEAK, 2 * (m * k + k * n + m * n) / MEMORY_RATE)


def all_reduce_seconds(size, ranks, rate, alpha=ALPHA):
    return 2 * (ranks - 1) * (alpha + size / ranks / rate)


print("4. Prices")
for m, n, k in ((4096, 4096, 4096), (4096, 4096, 16)):
    t = gemm_seconds(m, n, k)
    print(f"  gemm {m}×{n}×{k}: {1e6 * t:.0f} µs, {100 * 2 * m * n * k / t / PEAK:.0f} % of peak")
for size in (10_000, 10**9):
    print(
        f"  all-reduce of {size} B, 64 ranks: {1e3 * all_reduce_seconds(size, 64, NETWORK):.2f} ms"
    )

# %% 5. Eight GPUs from one: which gradients to send together
# All ranks do the same, so one stands for all: its backward ops, and on a lane of its own an
# all-reduce for each bucket of gradients, after the ops that make them; the update waits for all.
# Many small buckets pay α each; one big bucket begins when backward is over. Fusing neighbours
# saves time, but their gradients come when the whole fused op ends: each choice spoils the other.

BACKWARD = (5e-4, 5e-4, 6e-4, 6e-4, 8e-4, 9e-4, 6e-4)  # layers in the order of backward
GRADIENT = (12e6, 4e6, 4e6, 2e6, 2e6, 1e6, 1e6)
SAVED = 1.2e-4  # what one fusion of two neighbours saves
NOWHERE, ALL = frozenset(), frozenset(range(1, len(BACKWARD)))  # cuts in the line of layers


def parts(cuts):
    return [range(a, b) for a, b in pairwise([0, *sorted(cuts), len(BACKWARD)])]


def data_parallel(op_cuts, bucket_cuts, ranks=8):
    ops, buckets = parts(op_cuts), parts(bucket_cuts)
    for k, part in enumerate(ops):
        t = sum(BACKWARD[i] for i in part) - SAVED * (len(part) - 1)
        yield Task(f"backward{k}", t, ("stream",))
    for k, part in enumerate(buckets):
        t = all_reduce_seconds(sum(GRADIENT[i] for i in part), ranks, NETWORK / 2, alpha=2e-5)
        made_by = (f"backward{n}" for n, op in enumerate(ops) if set(op) & set(part))
        yield Task(f"bucket{k}", t, ("network",), (*made_by,))
    yield Task("update", 3e-4, ("stream",), tuple(f"bucket{k}" for k in range(len(buckets))))


@cache
def cost(state):
    return seconds(graph_of(data_parallel(*state)))


def search(start, with_ops=False, alpha=1.05):
    """Best first; keep what is at most alpha times the best, for a step back may lead further."""
    best, seen, queue = start, {start}, [(cost(start), 0, start)]
    while queue:
        ops, buckets = heapq.heappop(queue)[2]
        moves = [(ops - {k}, buckets) for k in sorted(ops if with_ops else ())]
        for state in moves + [(ops, buckets - {k}) for k in sorted(buckets)]:
            if state not in seen:
                seen.add(state)
                best = min(best, state, key=cost)
                if cost(state) <= alpha * cost(best):
                    heapq.heappush(queue, (cost(state), len(seen), state))
    return best, len(seen)


print("5. Buckets and fusions")
best, looked = search((ALL, ALL), with_ops=True)
some = [frozenset(c) for n in range(len(ALL) + 1) for c in combinations(sorted(ALL), n)]
for what, state in {
    "every gradient alone": (ALL, ALL),
    "one bucket": (ALL, NOWHERE),
    "best buckets": search((ALL, ALL))[0],
    "fuse all ops, then best buckets": search((NOWHERE, ALL))[0],
    f"both together, {looked} states looked at": best,
    f"best of all {len(some) ** 2} states": min(((a, b) for a in some for b in some), key=cost),
}.items():
    ops, buckets = ([len(part) for part in parts(cuts)] for cuts in state)
    print(f"  {what}: {1e3 * cost(state):.3f} ms, layers an op {ops}, a bucket {buckets}")

# %% 6. The oracle: which parallelism stops where
# Before there is anything to profile, formulas tell how a layout scales. A transformer layer of
# width h has 12h² weights, at 16 bytes each with gradient and Adam's state (Rajbhandari et al.
# 2020), and keeps 34·s·h bytes of a sample of s tokens (Korthikanti et al. 2022; attention
# recomputed, sequence split with tensors). A step is 6 flop a weight and token, at half the peak,
# say. Data parallel all-reduces gradients, tensor parallel activations, four times a layer; a
# pipeline of p stages with m micro-batches idles for (p−1)/m of its work. Nothing overlaps here.

BATCH, TOKENS, HEADS = 256, 2048, 32


def oracle(layers, h, data=1, tensor=1, pipeline=1):
    limits = ((data, BATCH, "batch"), (tensor, HEADS, "heads"), (pipeline, layers, "layers"))
    if met := [f"{what} {most}" for degree, most, what in limits if degree > most]:
        return met[0]
    ranks, weights, m = data * tensor * pipeline, 12 * layers * h * h, BATCH // data
    # 1F1B keeps as many micro-batches as stages, each of one stage's layers: one whole sample.
    held = 16 * weights / tensor / pipeline + 34 * TOKENS * h * layers / tensor
    if held > MEMORY:
        return f"{held / 1e9:.0f} GB"
    outer, inner = (NVLINK if n <= 8 else NETWORK for n in (ranks, tensor))  # 8 GPUs share a node
    compute = 6 * weights * TOKENS * BATCH / ranks / (PEAK / 2)
    activations = 4 * layers / pipeline * m * all_reduce_seconds(2 * TOKENS * h, tensor, inner)
    gradients = all_reduce_seconds(2 * weights / tensor / pipeline, data, outer)
    return f"{(compute + activations) * (1 + (pipeline - 1) / m) + gradients:.2f} s"


print("6. The oracle (a limit met stands instead of a time)")
for name, layers, h in (("2.5B", 32, 2560), ("6.4B", 32, 4096)):
    print(f"  {name:>5} GPUs{'data':>12}{'tensor':>12}{'pipeline':>12}{'data × 8':>12}")
    for p in (1, 4, 16, 32, 64, 256, 512):
        mixed = {"data": -(-p // 8), "tensor": min(p, 8)}
        layouts = ({"data": p}, {"tensor": p}, {"pipeline": p}, mixed)
        print(f"  {p:>10}" + "".join(f"{oracle(layers, h, **layout):>12}" for layout in layouts))

# %% 7. Odd machines
# Each sample goes to the device that would be done with it first: no share in whole samples is
# better. A device whose memory is full gets no more. Then try every subset of the device groups,
# because a slow group, or the slow link to it, may cost more than it brings.

GROUPS = {"fast": [(400.0, 64)] * 4, "slow": [(90.0, 24)] * 4}  # samples/s, most samples


def shares(batch, devices):
    given, queue = [0] * len(devices), sorted((1 / d[0], k) for k, d in enumerate(devices))
    for _ in range(batch):
        done, k = heapq.heappop(queue)
        given[k] += 1
        if given[k] < devices[k][1]:
            heapq.heappush(queue, ((given[k] + 1) / devices[k][0], k))
    return given, done  # the last sample given is the last one done


print("7. Odd machines")
for size in (1e6, 2e8):
    for names in (("fast",), ("slow",), ("fast", "slow")):
        given, t = shares(90, [device for name in names for device in GROUPS[name]])
        t += all_reduce_seconds(size, len(given), 10e9 if len(names) == 1 else 1.25e9)
        print(f"  {size / 1e6:.0f} MB of gradients, {'+'.join(names)}: {1e3 * t:.0f} ms {given}")


# The gradient of a weight N1×N2 is a sum over R rows of an outer product. Instead of the gradient,
# ranks may gather the rows and each compute the whole sum. A ring all-reduce sends 2(p−1)/p of
# N1·N2 values a rank, an all-gather (p−1)/p of R(N1+N2): so the wire wins where
# R(N1+N2) < 2·N1·N2, R counting the rows of all ranks. The price is (1−1/p)·2·R·N1·N2 more flop.
def factors_seconds(rows, n1, n2, ranks, rate):
    gather = (ranks - 1) * (ALPHA + 2 * rows * (n1 + n2) / ranks / rate)
    return gather + (1 - 1 / ranks) * 2 * rows * n1 * n2 / PEAK


whole = all_reduce_seconds(2 * 4096**2, 8, NETWORK)
for rows, t in ((r, factors_seconds(r, 4096, 4096, 8, NETWORK)) for r in (256, 2048, 4096, 16384)):
    print(f"  4096×4096, {rows} rows: gradient {1e3 * whole:.2f} ms, factors {1e3 * t:.2f} ms")

# %% 8. In which order a pipeline runs
# One micro-batch has a forward and a backward on each device; the K shape has two lines of devices
# that meet in blocks on all of them. Greedy: free lanes, backward first, and a forward waits until
# its device holds less than its fill of micro-batches; on a plain line that is 1F1B.
# A pattern: block b of micro-batch m starts at s(b) + m·period, for the least period there is. We
# try all s, block after block; a device is a clock of `period` hours. Bigger ones need a solver.

ENDS = {f"B{d}": f"F{d}" for d in range(4)}  # which backward gives back the memory of which forward
PLAIN = [Task(f"F{d}", 1, (d,), (f"F{d - 1}",) if d else ()) for d in range(4)]
PLAIN += [Task(f"B{d}", 3, (d,), (f"B{d + 1}" if d < 3 else "F3",), "", 1) for d in (3, 2, 1, 0)]
K = [Task(f"F{d}", 1, (d,), (f"F{d - 1}",) if d % 2 else ()) for d in (0, 2, 1, 3)]
K += [Task("F", 1, (0, 1, 2, 3), ("F1", "F3")), Task("B", 1, (0, 1, 2, 3), ("F",), "", 1)]
K += [Task(f"B{d}", 3, (d,), ("B" if d % 2 else f"B{d + 1}",), "", 1) for d in (1, 3, 0, 2)]


def schedule(blocks, count, fill=None, order=None):
    """So many micro-batches: greedily, `fill` on a device at most, or in an order that is given."""
    tasks, ended_by = {}, {forward: backward for backward, forward in ENDS.items()}
    for m in range(count):
        for b in blocks:
            after = [f"{name}.{m}" for name in b.after]
            if fill and b.name in ended_by and m >= fill[b.lanes[0]]:
                after += [f"{ended_by[b.name]}.{m - fill[b.lanes[0]]}"]
            tasks[b.name, m] = b._replace(name=f"{b.name}.{m}", after=(*after,))
    keys = sorted(tasks, key=order) if order else tasks
    return graph_of([tasks[k] for k in keys], () if order else range(4))


def pattern(blocks, period, most, spans, clock=frozenset()):
    """Start and end of each block in micro-batch 0; None where no starts within a period fit."""
    if len(spans) == len(blocks):
        return spans
    b = blocks[len(spans)]
    first = max((spans[name][1] for name in b.after), default=0)
    last = first + period - 1
    if b.name in ENDS:  # memory is held from the start of the forward: `most` periods at most
        last = min(last, spans[ENDS[b.name]][0] + most * period - b.seconds)
    for s in range(first, last + 1):
        hours = {(d, h % period) for d in b.lanes for h in range(s, s + b.seconds)}
        rest = spans | {b.name: (s, s + b.seconds)}, clock | hours
        if not hours & clock and (found := pattern(blocks, period, most, *rest)):
            return found
    return None


print("8. Pipelines of 4 devices, forward 1, backward 3, at most 4 micro-batches a device")
for name, blocks, fill in (("plain", PLAIN, (4, 3, 2, 1)), ("K shape", K, (4, 4, 4, 4))):
    least = max(sum(b.seconds for b in blocks if d in b.lanes) for d in range(4))
    period, spans = next((p, s) for p in range(least, 99) if (s := pattern(blocks, p, 4, {})))
    ranked = {"order": lambda key, s=spans, p=period: s[key[0]][0] + key[1] * p}
    print(f"  {name}: period {period}, no less than {least}")
    for how, options in (("greedy", {"fill": fill}), ("pattern", ranked)):
        ends = [seconds(schedule(blocks, n, **options)) for n in (8, 32)]
        print(f"    {how}: {ends[0]:.0f} for 8 micro-batches, {ends[1]:.0f} for 32")


# %% 9. Error bars
# Draw all prices anew, play the graph, and do it again: the spread of the ends is the error bar.
# Errors of single tasks average out; an error shared by all tasks of an op (the formula is wrong
# for this device) does not. And a step is a maximum over paths: its mean is above what the mean
# prices say. The real bars are compared with measurements: do 80 % fall inside?
def drawn(graph, rng, own, shared):
    ops = dict.fromkeys(t.op for t in graph.tasks.values())
    common = {op: rng.lognormvariate(-(shared**2) / 2, shared) for op in ops}  # of mean 1
    for t in graph.tasks.values():
        factor = common[t.op] * rng.lognormvariate(-(own**2) / 2, own)
        yield t._replace(seconds=t.seconds * factor)


graph = graph_of(step(batch=10))
print(f"9. Error bars: {1e6 * seconds(graph):.0f} µs by mean prices, each uncertain by 20 %")
for name, own, shared in (("own", 0.2, 0.0), ("shared", 0.0, 0.2), ("both", 0.2, 0.2)):
    rng = random.Random(0)
    ends = sorted(1e6 * seconds(graph_of(drawn(graph, rng, own, shared))) for _ in range(400))
    mean, low, high = sum(ends) / 400, ends[40], ends[360]
    print(f"  {name} errors: mean {mean:.0f} µs, 80 % between {low:.0f} and {high:.0f} µs")
