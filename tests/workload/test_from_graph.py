"""Workloads of recorded steps without PyTorch: a small step by hand, and the shipped trace."""

from itertools import combinations, pairwise
from math import prod
from pathlib import Path

import pytest

import foretell
from foretell.cluster import load as load_cluster
from foretell.errors import InputError
from foretell.graph import Builder, save
from foretell.plan import check, read
from foretell.plan.costs import cut, with_cuts
from foretell.predict import predict
from foretell.workload import from_graph, load
from foretell.workload.load import resized

B, S, H, HEADS, WORDS = 4, 16, 64, 4, 100


class Recorded:
    """Writes a captured step by hand, as `foretell.capture` does."""

    def __init__(self):
        self.make = Builder()
        self.lane = self.make.lane("stream 0", kind="compute")
        self.count = {}
        self.forward = []
        self.reads, self.weights = {}, {}

    def parameter(self, path, *sides):
        self.weights[path] = prod(sides)

    def call(self, op, path, *inputs, after=(), args=(), phase="forward", dtype="fp32", reads=None):
        """One forward call; inputs are sizes, or `-` for none. It reads its module's parameters."""
        n = self.count[op] = self.count.get(op, -1) + 1
        own = reads or [p for p in self.weights if p.rpartition(".")[0] == path]
        self.reads[f"{op}.{n}"] = [[p, self.weights[p]] for p in own]
        dims = "+".join(i if i == "-" else "x".join(map(str, i)) for i in inputs)
        types = "+".join("-" if i == "-" else "float" for i in inputs)
        values = "+".join(args or ["-"] * len(inputs))
        task = self.make.task(
            kind="kernel",
            op=op,
            name=f"{op}.{n}",
            layer=path,
            lane=self.lane,
            phase=phase,
            dtype=dtype,
            shape=f"in={dims},types={types},args={values}",
            bytes=1.0,
            after=after,
        )
        self.forward.append((op, n, path, task))
        return task

    def linear(self, path, wide, out, after, *, named=True):
        if named:
            self.parameter(f"{path}.weight", wide, out)
            self.parameter(f"{path}.bias", out)
        return self.call("addmm", path, (out,), (B * S, wide), (wide, out), after=after)

    def block(self, path, x):
        self.parameter(f"{path}.norm.weight", H)
        self.parameter(f"{path}.norm.bias", H)
        norm = self.call("native_layer_norm", f"{path}.norm", (B, S, H), "-", (H,), (H,), after=[x])
        q, k, v = (self.linear(f"{path}.{n}", H, H, [norm]) for n in "qkv")
        heads = (B, S, HEADS, H // HEADS)
        args = ["-"] * 7 + ["0.0", "True"]
        mixed = self.call("_flash_attention_forward", path, *[heads] * 3, *["-"] * 6,
                          args=args, after=[q, k, v])  # fmt: skip
        x = self.call("add", path, (B, S, H), (B, S, H),
                      after=[x, self.linear(f"{path}.proj", H, H, [mixed])])  # fmt: skip
        up = self.linear(f"{path}.up", H, 4 * H, [x])
        act = self.call("gelu", path, (B, S, 4 * H), after=[up])
        down = self.linear(f"{path}.down", 4 * H, H, [act])
        return self.call("add", path, (B, S, H), (B, S, H), after=[x, down])

    def graph(self):
        end = self.make.task(
            kind="kernel", op="fill_", name="end", lane=self.lane, phase="backward"
        )
        for *_, task in self.forward[:-2]:
            self.make.buffer(B * S * H * 4, kind="activation", name="x", born=task, dies=end)
        facts = {"reads": self.reads, "weights": self.weights}
        return self.make.graph(captured="Tiny", parameters=self.total, **facts)


@pytest.fixture(scope="module")
def graph():
    step = Recorded()
    step.parameter("words.weight", WORDS, H)
    x = step.call("embedding", "words", (WORDS, H), (B, S))
    for i in range(3):
        x = step.block(f"blocks.{i}", x)
    words = ["words.weight"]  # again
    logits = step.call("mm", "head", (B * S, H), (H, WORDS), after=[x], reads=words)
    loss = step.call("_log_softmax", "", (B * S, WORDS), after=[logits], phase="loss")
    step.call("nll_loss_forward", "", (B * S, WORDS), (B * S,), after=[loss], phase="loss")
    each = 2 * H + 4 * (H * H + H) + (4 * H * H + 4 * H) + (4 * H * H + H)
    step.total = WORDS * H + 3 * each
    return step.graph()


@pytest.fixture(scope="module")
def workload(graph):
    return from_graph(graph)


def test_blocks_that_are_alike_are_one(workload):
    assert [(layer.name, layer.times) for layer in workload.layers] == [
        ("input", 1),
        ("blocks.0", 3),
        ("head", 1),
    ]
    assert (workload.batch, workload.tokens, workload.dtype) == (B, S, "fp32")


def test_parameters_are_exact_and_tied_ones_count_once(graph, workload):
    assert workload.parameters == graph.facts["parameters"]
    assert workload.tied == (("input/words.embedding.weight", "head/head.mm.weight"),)
    assert workload.notes == ()


def test_products_are_counted(workload):
    linear = 4 * H * H + 8 * H * H
    scores = S * (S + 1) * H  # a causal mask hides the other half
    forward = 2 * (3 * (S * linear + scores) + S * H * WORDS)
    # Attention by its own flop: both products, and both gradients of each.
    assert workload.flops() == pytest.approx(3 * forward, rel=1e-6)


def test_heads_and_pairs_can_be_split(workload):
    ops = {op.name: op for op in workload.layers[1].works()}
    assert {n for n, op in ops.items() if op.splits.get("tp") == "out"} == {
        "q.addmm", "k.addmm", "v.addmm", "up.addmm",
    }  # fmt: skip
    assert {n for n, op in ops.items() if op.splits.get("tp") == "in"} == {
        "proj.addmm",
        "down.addmm",
    }
    assert ops["gelu"].splits["tp"] == "cols"
    assert "tp" not in ops["norm.native_layer_norm"].splits
    assert workload.most("tp") == HEADS
    sums = [p for p in workload.layers[1].ops if getattr(p, "axis", "") == "tp"]
    assert [(s.forward, s.backward) for s in sums] == [("", "all_reduce"), ("all_reduce", "")] * 2


def test_what_is_kept_is_what_was_held(workload):
    ops = {op.name: op for op in workload.layers[1].works()}
    kept = sum(
        float(t.bytes(op.sizes({}, B), "fp32"))
        for op in ops.values()
        if op.when != "fused"
        for t in op.saved
        if not t.when
    )
    calls = 11  # norm, q, k, v, attention, proj, add, up, gelu, down, add
    assert kept == pytest.approx(calls * B * S * H * 4)


def test_a_product_used_twice_stays_whole():
    step = Recorded()
    step.parameter("words.weight", WORDS, H)
    x = step.call("embedding", "words", (WORDS, H), (B, S))
    up = step.linear("blocks.0.up", H, 4 * H, [x])
    down = step.linear("blocks.0.down", 4 * H, H, [up])
    more = step.call("_softmax", "blocks.0", (B, S, 4 * H), after=[up])
    step.call("add", "blocks.0", (B, S, H), (B, S, 1), after=[down, more])
    step.total = 0
    found = from_graph(step.graph())
    assert found.most("tp") == 1
    assert "blocks.0: up.addmm, down.addmm are replicated under tp" in found.notes[0]


def test_a_file_is_a_workload(graph, tmp_path):
    path = tmp_path / "tiny.graph"
    save(graph, path)
    found = load(str(path))
    assert found.parameters == graph.facts["parameters"]
    other = load(f"{path}:batch=32,seq=64,dtype=bf16")
    assert (other.batch, other.tokens, other.dtype) == (32, 64, "bf16")
    assert other.parameters == found.parameters
    cluster = load_cluster("h200:gpus=4")
    steps = [predict(read("tp=4"), w, cluster).step for w in (found, other)]
    assert steps[1] != steps[0]


def test_another_length_changes_what_it_should(workload):
    longer = resized(workload, 2 * S)
    grown = longer.flops() - 2 * workload.flops()
    seen = 2 * S * (2 * S + 1) / 2 - 2 * S * (S + 1) / 2  # causal; only attention is quadratic
    scores = 3 * 3 * 2 * 2 * seen * H
    assert grown == pytest.approx(scores, rel=1e-6)
    with pytest.raises(InputError, match="no words"):
        resized(load("resnet50"), 128)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        load(str(tmp_path / "none.graph"))
    with pytest.raises(InputError, match="no file"):
        load(f"{tmp_path}/none.py:make", scripts=True)


def test_an_option_that_is_not_there(graph, tmp_path):
    save(graph, tmp_path / "tiny.graph")
    with pytest.raises(InputError, match="heads"):
        load(f"{tmp_path / 'tiny.graph'}:heads=4")


def test_a_trace_is_a_workload():
    trace = Path(foretell.__file__).parent / "samples" / "traces" / "resnet18-h200.json.gz"
    found, known = load(str(trace)), load("resnet18")
    assert found.parameters == pytest.approx(known.parameters, rel=0.01)
    assert found.flops() == pytest.approx(known.flops(), rel=0.01)
    assert found.most("filter") == known.most("filter")
    assert any("trace" in note for note in found.notes)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_a_cut_is_the_best_there_is(stages):
    seconds = [5.0, 1.0, 4.0, 2.0, 2.0, 7.0, 1.0, 3.0]
    places = combinations(range(1, 8), stages - 1)
    best = min(max(sum(seconds[a:b]) for a, b in pairwise([0, *p, 8])) for p in places)
    found = cut(seconds, stages)
    ends = [sum(found[:i]) for i in range(stages + 1)]
    assert sum(found) == 8
    assert min(found) >= 1
    assert max(sum(seconds[a:b]) for a, b in pairwise(ends)) == best


def test_uneven_blocks_are_cut_by_time():
    workload, cluster = load("vgg16"), load_cluster("h200:gpus=4")
    plan = check(read("pp=4,micro_batch=8,global_batch=512"), workload, cluster)
    assert with_cuts([plan], load("gpt2"), cluster) == [plan]
    plain, evened = with_cuts([plan], workload, cluster)
    assert plain == plan
    assert sum(evened.layers) == workload.num_blocks
    steps = [predict(p, workload, cluster).step for p in (plain, evened)]
    assert steps[1] < 0.9 * steps[0]
