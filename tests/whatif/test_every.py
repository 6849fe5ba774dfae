"""What every what-if must keep, whatever it does: one check for all of them."""

import pytest

from foretell.errors import InputError
from foretell.graph.verify import verify
from foretell.samples import transformer
from foretell.simulate import simulate
from foretell.whatif import WHATIFS, DoesNotApply, Setting, parse

# One example of each that applies to the sample step.
EXAMPLES = {
    "batch": "batch:times=3",
    "checkpoint": "checkpoint",
    "cuda-graph": "cuda-graph",
    "faster": "faster:op=gemm,times=3",
    "insert": "insert:after=op=gemm+phase=backward,seconds=1e-05,op=cast",
    "remove": "remove:select=op=elementwise",
    "scale": "scale:select=kind=kernel+phase!=update,times=0.25",
}


@pytest.fixture(scope="module")
def step():
    graph = transformer(ranks=2, layers=2)
    with graph.edit("timed") as edit:
        edit.set(edit.select(kind=("kernel", "collective")), seconds=1e-4)
    return edit.graph


def test_every_one_has_an_example():
    assert set(EXAMPLES) == set(WHATIFS)


@pytest.mark.parametrize("name", sorted(WHATIFS))
class TestEvery:
    def test_the_spec_reads_back(self, name, step):
        change = parse(EXAMPLES[name])
        assert parse(str(change)) == change

    def test_the_graph_before_is_untouched(self, name, step):
        before = step.fingerprint()
        parse(EXAMPLES[name]).apply(step, Setting())
        assert step.fingerprint() == before

    def test_the_graph_after_is_sound_and_signed(self, name, step):
        change = parse(EXAMPLES[name])
        after = verify(change.apply(step, Setting()))
        assert after.history == (*step.history, str(change))
        assert simulate(after).seconds != simulate(step).seconds

    def test_two_runs_agree(self, name, step):
        change = parse(EXAMPLES[name])
        prints = {change.apply(step, Setting()).fingerprint() for _ in range(2)}
        assert len(prints) == 1

    def test_it_explains_itself(self, name, step):
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
    assert len(after.select(kind="kernel")) == len(step.select(kind="kernel"))
    on_device = step.seconds[step.select(kind="kernel", rank=0)].sum()
    assert simulate(after).seconds >= on_device


def test_a_cuda_graph_helps_where_launches_are_slow(step):
    with step.edit() as edit:
        edit.set(edit.select(op="launch"), seconds=1e-3)
    slow = edit.graph
    assert simulate(parse("cuda-graph").apply(slow, Setting())).seconds < simulate(slow).seconds / 5


def test_adam_in_a_graph_counts_its_steps_on_the_device(step):
    with step.edit() as edit:
        edit.set(edit.select(op="optimizer"), op="addcdiv_")
    after = parse("cuda-graph").apply(edit.graph, Setting())
    assert len(after.select(op="capturable")) == 11 * len(step.select(op="optimizer"))


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


@pytest.mark.parametrize("spec", ["cuda-graph", "checkpoint", "batch"])
def test_a_step_without_phases_or_host_is_left_alone(spec):
    from foretell.graph import Builder

    make = Builder()
    make.task(kind="kernel", op="gemm", seconds=1.0)
    with pytest.raises(DoesNotApply):
        parse(spec).apply(make.graph(), Setting())
