"""What every what-if must keep, whatever it does: one check for all of them."""

import pytest

from foretell.cost.kernel import passes
from foretell.errors import InputError
from foretell.graph import Builder
from foretell.graph.build import verify
from foretell.simulate import simulate
from foretell.whatif import WHATIFS, DoesNotApply, Setting, parse
from foretell.whatif.registry import is_measured, spread_of
from tests.transformer import transformer
from tests.whatif.traced import attention, convnet

# One example of each that applies to the sample step.
EXAMPLES = {
    "accumulate": "accumulate:steps=3",
    "amp": "amp:dtype=fp16",
    "async-copies": "async-copies",
    "batch": "batch:times=3",
    "blueconnect": "blueconnect:inside=2",
    "bucket-size": "bucket-size:mb=1000",
    "channels-last": "channels-last",
    "checkpoint": "checkpoint",
    "compile": "compile",
    "cuda-graph": "cuda-graph",
    "data-parallel": "data-parallel:ranks=8",
    "device": "device:to=h100,here=a100-80",
    "dgc": "dgc:ratio=0.01",
    "faster": "faster:op=gemm,times=3",
    "faster-host": "faster-host:times=3",
    "flash-attention": "flash-attention",
    "foreach-optimizer": "foreach-optimizer",
    "fsdp": "fsdp:ranks=8",
    "fused-optimizer": "fused-optimizer",
    "gist": "gist:bits=16",
    "insert": "insert:after=op=gemm+phase=backward,seconds=1e-05,op=cast",
    "loader": "loader:workers=2",
    "local-sgd": "local-sgd:every=4",
    "metaflow": "metaflow",
    "network": "network:times=4",
    "overlap": "overlap:on=no",
    "p3": "p3:slice_k=500",
    "parameter-server": "parameter-server:servers=4",
    "powersgd": "powersgd:rank=2",
    "reconstructed-batchnorm": "reconstructed-batchnorm:keep=0.4",
    "remove": "remove:select=op=elementwise",
    "remove-sync": "remove-sync",
    "scale": "scale:select=kind=kernel+phase!=update,times=0.25",
    "tf32": "tf32",
    "vdnn": "vdnn",
}
# Steps for those that do not apply to the sample step: it has no such operators.
OTHER_STEPS = {
    "amp": convnet,
    "channels-last": convnet,
    "compile": convnet,
    "tf32": convnet,
    "async-copies": convnet,
    "flash-attention": attention,
    "gist": convnet,
    "loader": convnet,
    "metaflow": attention,
    "reconstructed-batchnorm": convnet,
    "remove-sync": convnet,
    "vdnn": convnet,
}


@pytest.fixture(scope="module")
def step():
    graph = transformer(ranks=2, layers=2)
    with graph.edit("timed") as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
        # An Adam that loops over parameters, of which only the last operation is there.
        tensor = "4096x3072"
        shape = f"in={tensor}+{tensor}+{tensor}+-,types=float+float+float+Scalar"
        edit.set(edit.select(op="optimizer"), op="addcdiv_", shape=shape)
    return edit.graph


@pytest.fixture
def own(name, step):
    """The step that the example of a what-if is for."""
    return OTHER_STEPS[name]() if name in OTHER_STEPS else step


def test_every_one_has_an_example():
    assert set(EXAMPLES) == set(WHATIFS)


@pytest.mark.parametrize("name", sorted(WHATIFS))
class TestEvery:
    def test_the_spec_reads_back(self, name, own):
        change = parse(EXAMPLES[name])
        assert parse(str(change)) == change

    def test_the_graph_before_is_untouched(self, name, own):
        before = own.fingerprint()
        parse(EXAMPLES[name]).apply(own, Setting())
        assert own.fingerprint() == before

    def test_the_graph_after_is_sound_and_signed(self, name, own):
        change = parse(EXAMPLES[name])
        after = verify(change.apply(own, Setting()))
        assert after.history == (*own.history, str(change))
        assert simulate(after).seconds != simulate(own).seconds

    def test_two_runs_agree(self, name, own):
        change = parse(EXAMPLES[name])
        prints = {change.apply(own, Setting()).fingerprint() for _ in range(2)}
        assert len(prints) == 1

    def test_how_far_it_is_off_is_reported(self, name, own):
        assert 0 < spread_of(name) < 0.5
        assert is_measured(name) or spread_of(name) >= 0.2

    def test_it_explains_itself(self, name, own):
        kind = WHATIFS[name]
        assert kind.__doc__
        assert kind.assumes


def test_faster_changes_time_and_not_work(step):
    after = parse("faster:op=gemm,times=2").apply(step, Setting())
    tasks = step.select(op="gemm")
    assert (after.seconds[tasks] == step.seconds[tasks] / 2).all()
    assert after.flops is step.flops or (after.flops == step.flops).all()


def test_remove_takes_the_launch_along(step):
    after = parse("remove:select=op=elementwise").apply(step, Setting())
    gone = len(step.select(op="elementwise"))
    assert len(after) == len(step) - 2 * gone
    kept = parse("remove:select=op=elementwise,launches=no").apply(step, Setting())
    assert len(kept) == len(step) - gone


def test_insert_makes_followers_wait(step):
    gemms = step.select(op="gemm", phase="forward")
    after = parse("insert:after=op=gemm+phase=forward,seconds=0.5").apply(step, Setting())
    assert len(after) == len(step) + len(gemms)
    per_rank = len(gemms) // 2
    assert simulate(after).seconds >= simulate(step).seconds + 0.5 * per_rank * 0.99


def test_changes_compose_left_to_right(step):
    from foretell.whatif import applied

    specs = ["faster:op=gemm", "scale:select=op=gemm"]  # defaults are not written
    after = applied([parse(s) for s in specs], step)
    assert after.history[-2:] == tuple(specs)
    tasks = step.select(op="gemm")
    assert (after.seconds[tasks] == step.seconds[tasks] / 4).all()


BAD = [
    ("fastr:op=gemm", "did you mean `faster`"),
    ("faster", "needs `op`"),
    ("faster:op=gemm,times=0", "more than 0"),
    ("faster:op=gemm,tims=2", "did you mean `times`"),
    ("scale:select=op=gemm,times=-1", "from 0 up"),
    ("scale:select=gemm", "is not column=value"),
    ("scale:select=opp=gemm", "did you mean `op`"),
    ("scale:select=rank=two", "is not a number"),
    ("remove:select=kind=kernl", "did you mean `kernel`"),
]


@pytest.mark.parametrize(("spec", "words"), BAD)
def test_mistakes(spec, words, step):
    with pytest.raises(InputError) as error:
        parse(spec).apply(step, Setting())
    assert words in str(error.value)


@pytest.mark.parametrize("spec", ["faster:op=lstm", "remove:select=op=lstm", "scale:select=rank=9"])
def test_what_does_not_apply_says_so(spec, step):
    with pytest.raises(DoesNotApply):
        parse(spec).apply(step, Setting())


def test_a_cuda_graph_leaves_one_call_on_the_host(step):
    after = parse("cuda-graph").apply(step, Setting())
    assert [after[int(i)].op for i in after.select(kind="host")] == ["cudaGraphLaunch"]
    added = len(after.select(op="capturable"))
    assert len(after.select(kind="kernel")) == len(step.select(kind="kernel")) + added
    on_device = step.seconds[step.select(kind="kernel", rank=0)].sum()
    assert simulate(after).seconds >= on_device


def test_a_cuda_graph_helps_where_launches_are_slow(step):
    with step.edit() as edit:
        edit.set(edit.select(op="launch"), seconds=1e-3)
    slow = edit.graph
    assert simulate(parse("cuda-graph").apply(slow, Setting())).seconds < simulate(slow).seconds / 5


def test_adam_in_a_graph_counts_its_steps_on_the_device(step):
    after = parse("cuda-graph").apply(step, Setting())
    each = passes()["capturable"]["kernels"]
    assert len(after.select(op="capturable")) == each * len(step.select(op="addcdiv_"))


def test_a_plain_optimizer_in_a_graph_needs_nothing_more(step):
    with step.edit() as edit:
        edit.set(edit.select(op="addcdiv_"), op="add_")
    after = parse("cuda-graph").apply(edit.graph, Setting())
    assert len(after.select(kind="kernel")) == len(step.select(kind="kernel"))


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_an_optimizer_without_its_loop(kind, step):
    after = parse(f"{kind}-optimizer").apply(step, Setting())
    for rank in (0, 1):
        (kernel,) = after.select(phase="update", kind="kernel", rank=rank)
        (launch,) = after.select(phase="update", kind="host", rank=rank)
        assert after[int(kernel)].op == f"_{kind}"
        assert int(launch) in after[int(kernel)].after
    parameters = 2 * 4096 * 3072
    passes = {"foreach": 4, "fused": 7}[kind]
    assert after.seconds[kernel] == pytest.approx(parameters * 4 * passes / 3.5e12, rel=0.3)
    with pytest.raises(DoesNotApply, match="no loop"):
        parse("fused-optimizer").apply(after, Setting())


def test_an_optimizer_waits_for_the_thread_of_the_backward():
    """Taking the loop away must not let the next step begin before the backward has ended."""
    make = Builder()
    main, other = make.lane("main", kind="host"), make.lane("autograd", kind="host")
    stream = make.lane("stream", kind="compute")
    make.task(kind="host", op="forward", lane=main, seconds=1.0, phase="forward")
    back = make.task(kind="host", op="backward", lane=other, seconds=5.0, phase="backward")
    step = make.task(kind="host", op="add_", lane=main, seconds=1.0, phase="update", after=[back])
    shape = "in=1000000,types=float"
    kernel = make.task(
        kind="kernel", op="add_", lane=stream, seconds=1.0, phase="update", shape=shape
    )
    make.wait(kernel, step, kind="launch")
    after = parse("fused-optimizer").apply(make.graph(), Setting())
    played = simulate(after)
    assert played.start[after.select(op="_fused", kind="host")[0]] == 5.0


def test_an_optimizer_of_unknown_size(step):
    with step.edit() as edit:
        edit.set(edit.select(op="addcdiv_"), shape="")
    with pytest.raises(DoesNotApply, match="how large"):
        parse("fused-optimizer").apply(edit.graph, Setting())


def test_a_checkpoint_runs_the_forward_twice(step):
    after = parse("checkpoint").apply(step, Setting())
    forward = step.select(phase="forward")
    assert len(after) == len(step) + len(forward)
    kernels = step.select(phase="forward", kind="kernel", rank=0)
    longer = simulate(after).seconds - simulate(step).seconds
    assert longer == pytest.approx(step.seconds[kernels].sum(), rel=0.05)
    for rank in (0, 1):
        lanes = after.lanes.rank[after.lane[after.select(rank=rank, kind=("host", "kernel"))]]
        assert set(lanes) == {rank}


def test_a_batch_leaves_the_optimizer_and_the_host_alone(step):
    after = parse("batch:times=2").apply(step, Setting())
    for still in (step.select(phase="update"), step.select(kind="host")):
        assert (after.seconds[still] == step.seconds[still]).all()
    moved = step.select(kind="kernel", phase="backward")
    assert (after.seconds[moved] < 2 * step.seconds[moved]).all()
    assert (after.seconds[moved] > 1.9 * step.seconds[moved]).all()
    assert (after.flops[moved] == 2 * step.flops[moved]).all()


@pytest.mark.parametrize("spec", ["cuda-graph", "checkpoint", "batch", "fused-optimizer"])
def test_a_step_without_phases_or_host_is_left_alone(spec):
    make = Builder()
    make.task(kind="kernel", op="gemm", seconds=1.0)
    with pytest.raises(DoesNotApply):
        parse(spec).apply(make.graph(), Setting())
