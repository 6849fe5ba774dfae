"""Every edit verb as text before and text after."""

import numpy as np
import pytest

from foretell.errors import GraphError, InputError
from tests.graph.golden import edited, graph, same

CHAIN = """
lane 0 = compute "s" of rank 0 ordered
%0 = kernel gemm "a" on 0 for 1.0 flops=8.0
%1 = kernel relu "b" on 0 for 2.0 after %0
%2 = kernel gemm "c" on 0 for 3.0 after %1
"""
LANE = '\nlane 0 = compute "s" of rank 0 ordered\n'


def test_scale():
    same(
        edited(CHAIN, lambda e: e.scale(e.select(op="gemm"), 0.5)),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel gemm "a" on 0 for 0.5 flops=8.0
        %1 = kernel relu "b" on 0 for 2.0 after %0
        %2 = kernel gemm "c" on 0 for 1.5 after %1
        """,
    )


def test_scale_one_each_and_another_column():
    def change(edit):
        edit.scale([0, 2], [10, 100])
        edit.scale(0, 0.25, column="flops")

    same(
        edited(CHAIN, change),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel gemm "a" on 0 for 10.0 flops=2.0
        %1 = kernel relu "b" on 0 for 2.0 after %0
        %2 = kernel gemm "c" on 0 for 300.0 after %1
        """,
    )


def test_a_task_named_twice_is_scaled_once():
    with graph(CHAIN).edit() as edit:
        edit.scale([1, 1], 0.5)
    assert edit.graph.seconds.tolist() == [1, 1, 3]


@pytest.mark.parametrize("column", ["rank", "op", "kind", "order", "lane"])
def test_what_is_no_amount_cannot_be_scaled(column):
    with pytest.raises(InputError, match=f"`{column}` holds no amounts"):
        graph(CHAIN).edit().scale(0, 2, column=column)


def test_set_words_strings_and_numbers():
    def change(edit):
        edit.set([0, 1], phase=["forward", "loss"], layer=["fc", "act"], dtype="bf16")
        edit.set(2, seconds=0.5, op="conv", priority=-3, sigma=0.25)

    same(
        edited(CHAIN, change),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel gemm "a" on 0 for 1.0 flops=8.0 layer="fc" phase=forward dtype=bf16
        %1 = kernel relu "b" on 0 for 2.0 after %0 layer="act" phase=loss dtype=bf16
        %2 = kernel conv "c" on 0 for 0.5 after %1 priority=-3 sigma=0.25
        """,
    )


def test_set_takes_numpy_strings_and_masks():
    before = graph(CHAIN)
    with before.edit() as edit:
        edit.set(before.seconds > 1, name=np.array(["x", "y"]))
    assert edit.graph.texts("name") == ["a", "x", "y"]


def test_what_a_column_cannot_hold_is_refused():
    edit = graph(CHAIN).edit()
    with pytest.raises(InputError, match="`seconds` holds numbers, not `fast`"):
        edit.set(0, seconds="fast")
    with pytest.raises(InputError, match="unknown kind: `kernl`"):
        edit.set(0, kind="kernl")
    with pytest.raises(InputError, match="did you mean `seconds`"):
        edit.set(0, secnds=1)
    for column, value in (
        ("rank", 0.5),
        ("rank", 2**40),
        ("kind", 300),
        ("priority", float("nan")),
    ):
        with pytest.raises(GraphError, match=f"`{column}` holds"):
            edit.set([0, 1], **{column: np.array([value, 0])})


@pytest.mark.parametrize(("seconds", "words"), [(-1.0, "below 0"), (np.nan, "finite")])
def test_a_broken_number_is_found_when_committing(seconds, words):
    edit = graph(CHAIN).edit()
    edit.set(1, seconds=seconds)
    with pytest.raises(GraphError, match=words) as error:
        edit.commit()
    assert "%1 = kernel relu" in str(error.value)
    with pytest.raises(GraphError, match="not committed"):
        edit.graph


def test_wait_and_release():
    def change(edit):
        edit.wait(2, [0], lag=0.5, kind="event")
        edit.release([1, 2], [0, 1])

    same(
        edited(CHAIN, change),
        """
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel gemm "a" on 0 for 1.0 flops=8.0
        %1 = kernel relu "b" on 0 for 2.0
        %2 = kernel gemm "c" on 0 for 3.0 after %0+0.5:event
        """,
    )


def test_the_longer_of_two_waits_stays():
    with graph(CHAIN).edit() as edit:
        edit.wait(1, 0, lag=[0.25, 0.75, 0.5])
        edit.wait(2, 1)
    assert edit.graph.edges.lags.tolist() == [0.75, 0]
    assert edit.graph.edges.size == 2


def test_release_takes_back_what_was_said_before_it_only():
    edit = graph(CHAIN).edit()
    edit.wait(2, 0)
    edit.release(2, [0, 1])
    edit.wait(2, 1, lag=4.0)
    edit.release(0, 2)  # never waited
    same(
        str(edit.commit()),
        """
        foretell graph 1
        lane 0 = compute "s" of rank 0 ordered
        %0 = kernel gemm "a" on 0 for 1.0 flops=8.0
        %1 = kernel relu "b" on 0 for 2.0 after %0
        %2 = kernel gemm "c" on 0 for 3.0 after %1+4.0
        """,
    )


def test_a_wait_that_closes_a_ring_is_refused():
    edit = graph(CHAIN).edit()
    edit.wait(0, 2)
    with pytest.raises(GraphError, match="3 tasks wait on each other") as error:
        edit.commit()
    assert "%0 = kernel gemm" in error.value.message
    assert error.value.hint


def test_tables():
    def change(edit):
        comm = edit.lane("nccl", rank=1, kind="comm", ordered=False)
        assert edit.lane("nccl", rank=1) == comm == 1
        assert edit.lane("s") == 0
        ib = edit.link("ib", 25e9)
        edit.hold([2, 1], comm)
        edit.drain(2, 0)
        edit.use([0, 1], ib, [1e9, 2e9])
        edit.use(0, ib, 5e8)
        edit.buffer([4096, 8192], born=[0, 1], dies=2, name="x", kind="activation")
        edit.buffer(16, rank=1)
        edit.fact(batch=32, model="m")

    same(
        edited(CHAIN, change, spec="all:tables=yes"),
        """
        history "all:tables=yes"
        fact batch 32
        fact model "m"
        lane 0 = compute "s" of rank 0 ordered
        lane 1 = comm "nccl" of rank 1 free
        link 0 = "ib" capacity 25000000000.0
        %0 = kernel gemm "a" on 0 for 1.0 uses 0*1500000000.0 flops=8.0
        %1 = kernel relu "b" on 0,1 for 2.0 after %0 uses 0*2000000000.0
        %2 = kernel gemm "c" on 0,1 for 3.0 after %1 drains 0
        buffer 4096.0 activation "x" of rank 0 from %0 to %2
        buffer 8192.0 activation "x" of rank 0 from %1 to %2
        buffer 16.0 other "" of rank 1
        """,
    )


def test_lanes_said_in_any_order_are_kept_sorted():
    two = (
        LANE
        + 'lane 1 = comm "x" of rank 0 free\nlane 2 = comm "y" of rank 0 free\n%0 = kernel on 0\n'
    )
    with graph(two).edit() as edit:
        edit.hold([0, 0, 0], [2, 1, 2])
    assert edit.graph[0].lanes == (0, 1, 2)
    assert len(edit.graph.held) == 2


def test_many_lanes_one_by_one():
    edit = graph(CHAIN).edit()
    made = [edit.lane(f"lane {k}", rank=k) for k in range(300)]
    assert made == list(range(1, 301))
    assert len(edit.commit().lanes) == 301


@pytest.mark.parametrize("task", [-1, 5, 2**40])
def test_tasks_that_are_not_there(task):
    verbs = {
        "scale": lambda e: e.scale([0, task], 2),
        "set": lambda e: e.set(task, rank=1),
        "remove": lambda e: e.remove(task),
        "wait": lambda e: e.wait(task, 0),
        "wait after": lambda e: e.wait(0, task),
        "release": lambda e: e.release(0, task),
        "reorder": lambda e: e.reorder(task, after=0),
        "reorder by": lambda e: e.reorder(0, after=task),
        "insert": lambda e: e.insert(after=task),
        "hold": lambda e: e.hold(task, 0),
        "drain": lambda e: e.drain(task, 0),
        "use": lambda e: e.use(task, 0, 1.0),
        "buffer": lambda e: e.buffer(1.0, born=task if task > 0 else -2),
    }
    for verb in verbs.values():
        with pytest.raises(GraphError, match="not there"):
            verb(graph(CHAIN).edit())


def test_tasks_are_whole_numbers_or_a_mask():
    edit = graph(CHAIN).edit()
    with pytest.raises(GraphError, match=r"holds 0\.5"):
        edit.remove([0.5])
    with pytest.raises(GraphError, match="mask of 2 tasks for 3"):
        edit.remove([True, False])
    edit.remove(np.array([]))
    edit.remove([])
    edit.wait([], [])
    assert edit.commit().size == 3


def test_an_edit_is_made_once():
    with graph(CHAIN).edit() as edit:
        edit.scale(0, 2)
        early = edit.commit()
    assert edit.graph is early is edit.commit()
    for verb in (
        lambda: edit.scale(0, 2),
        lambda: edit.set(0, rank=1),
        lambda: edit.insert(),
        lambda: edit.remove(0),
        lambda: edit.wait(1, 0),
        lambda: edit.release(1, 0),
        lambda: edit.reorder(0, after=1),
        lambda: edit.lane("new"),
        lambda: edit.link("new", 1.0),
        lambda: edit.hold(0, 0),
        lambda: edit.buffer(1),
        lambda: edit.fact(a=1),
    ):
        with pytest.raises(GraphError, match="committed"):
            verb()
    assert early.seconds.tolist() == [2, 2, 3]


def test_an_edit_that_fails_makes_nothing():
    edit = graph(CHAIN).edit()
    with pytest.raises(InputError), edit:
        edit.scale(0, 2, column="flop")
    with pytest.raises(GraphError, match="not committed"):
        edit.graph


def test_what_is_there_can_be_read_while_editing():
    edit = graph(CHAIN).edit()
    edit.scale(0, 3)
    edit.insert(2, seconds=[7, 8])
    assert edit.column("seconds").tolist() == [3, 2, 3, 7, 8]
    assert edit.column("order").tolist() == [0, 1, 2, 3, 4]
    assert edit.column("flops").tolist() == [8, 0, 0, 0, 0]
    assert edit.size == 5
    with pytest.raises(ValueError, match="read-only"):
        edit.column("seconds")[0] = 1


def test_unchecked_commits_do_not_look():
    edit = graph(CHAIN).edit()
    edit.set(0, seconds=-1)
    assert edit.commit(check=False).seconds[0] == -1
