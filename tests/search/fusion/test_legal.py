"""What may be fused, by class, size, reuse, side, rings and memory."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.search.fusion.fused_step import Evaluator, buckets_from, fusion_of, plan_of
from foretell.search.fusion.planner import like_inductor, like_xla, random_move
from foretell.search.fusion.problem import BACKWARD, FORWARD, Gradient, Problem, edges_of
from foretell.search.fusion.state import (
    MOST,
    copied_if_legal,
    copy_kernel,
    deferrable_gradients,
    edge_fits,
    fused,
    merge_obstacle,
    merged_if_legal,
    require_legal,
    unfused,
)
from tests.search.fusion.cases import DEVICE, chain, problems, wire
from tests.search.fusion.test_evaluate import QUICK, wandered


@QUICK
@given(problems(), st.integers(0, 999))
def test_every_state_a_move_reaches_is_legal(problem, seed):
    dice, state = random.Random(seed), unfused(problem)
    for _ in range(12):
        moved = random_move(state, dice.choice(("copy", "merge")), dice)
        state = moved.fusion if moved else state
    require_legal(state)
    place = {int(g): k for k, g in enumerate(state.order)}
    assert len(place) == state.num_groups
    for s, t, is_copied in zip(problem.source, problem.target, state.copied, strict=True):
        if not is_copied:  # nothing runs before what it reads
            assert place[int(state.group[s])] <= place[int(state.group[t])]


@QUICK
@given(problems())
def test_baselines_are_legal_and_as_large_as_they_say(problem):
    for state in (like_xla(problem), like_inductor(problem)):
        require_legal(state)
        assert len(state.order) == state.num_groups == len(np.unique(state.group))
        assert all(len(ops) <= MOST for ops in state.members.values())
    pairs = {(int(state.group[a]), int(state.group[b])) for a, b in _edges(problem)}
    assert all(a == b or merged_if_legal(state, a, b) is None for a, b in pairs)  # none is left


@QUICK
@given(problems())
def test_the_compiled_greedy_fuses_pair_by_pair(problem):
    state, changed = unfused(problem), True
    edges = [e for e in range(len(problem.source)) if edge_fits(problem, e)]
    while changed:
        changed = False
        for e in sorted(edges, key=lambda e: (-problem.ops[problem.source[e]].bytes, e)):
            a, b = (int(state.group[i]) for i in (problem.source[e], problem.target[e]))
            moved = merged_if_legal(state, a, b) if a != b else None
            state, changed = (state, changed) if moved is None else (moved, True)
    assert like_inductor(problem).group.tolist() == state.group.tolist()


def _edges(problem):
    fit = [e for e in range(len(problem.source)) if edge_fits(problem, e)]
    return [(problem.source[e], problem.target[e]) for e in fit]


@QUICK
@given(problems(), st.integers(0, 999))
def test_plans_read_back(problem, seed):
    late = deferrable_gradients(problem)[0][:1]
    scored = Evaluator(problem).score(wandered(problem, seed).put_off(late))
    plan = plan_of(scored)
    assert list(plan.late) == [problem.ops[i].name for i in late]
    assert Plan.parse(str(plan)) == plan
    again = fusion_of(plan, problem)
    assert again.group.tolist() == scored.fusion.group.tolist()
    # an op that one reader of a region recomputes is recomputed for all of them once it is read
    read_back = Evaluator(problem).score(again, buckets_from(plan, problem)).step
    same = again.copied.tolist() == scored.fusion.copied.tolist()
    assert read_back == scored.step if same else read_back <= scored.step


def test_products_and_library_kernels_stay_alone():
    problem = chain(["mm", "add", "convolution_backward"])
    state = unfused(problem)
    assert "never fused" in merge_obstacle(state, 1, 2)
    assert merged_if_legal(state, 0, 1) is None
    opened = Problem(**{**_fields(problem), "epilogue": True})
    assert merged_if_legal(unfused(opened), 0, 1) is not None


def test_a_ring_is_refused():
    # 0 → 1 (a product) → 2 and 0 → 2: one kernel of 0 and 2 would wait for 1, which waits for it
    problem = chain(["add", "mm", "add"])
    rows = [(0, 1, 0), (1, 2, 0), (0, 2, 0)]
    source, target, pattern = edges_of(rows)
    ringed = Problem(**{**_fields(problem), "source": source, "target": target, "pattern": pattern})
    assert merged_if_legal(unfused(ringed), 0, 2) is None
    with pytest.raises(InputError, match="waits for itself"):
        require_legal(fused(ringed, [(0, 2)]))


def test_a_copy_breaks_no_ring_and_frees_the_maker():
    problem = chain(["add", "mm", "add"])
    source, target, pattern = edges_of([(0, 1, 0), (1, 2, 0), (0, 2, 0)])
    ringed = Problem(**{**_fields(problem), "source": source, "target": target, "pattern": pattern})
    edge = next(e for e in range(3) if (source[e], target[e]) == (0, 2))
    copied = copied_if_legal(unfused(ringed), edge)
    assert copied is not None
    assert copied.order.tolist() == [0, 1, 2]
    assert not copied.is_dead(0)  # the product still reads it


def test_an_op_whose_every_reader_has_a_copy_costs_nothing():
    problem = chain(["add", "add", "add"])
    state = copied_if_legal(unfused(problem), 0)
    assert state.is_dead(0)
    assert Evaluator(problem).prices.many([(state, g) for g in [0]]) == [0.0]


def test_copies_of_copies_free_a_whole_chain():
    problem = chain(["add", "mul", "add", "mul"])
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        state = unfused(problem)
        for edge in order:
            state = copied_if_legal(state, edge)
        assert state.copies(3) == {0, 1, 2}
        assert [state.is_dead(i) for i in range(4)] == [True, True, True, False]
        assert Evaluator(problem).prices.many([(state, g) for g in [0, 1, 2]]) == [0.0] * 3
        whole = Evaluator(problem).prices.many([(fused(problem, [(0, 1, 2, 3)]), 0)])
        assert Evaluator(problem).prices.many([(state, g) for g in [3]]) == whole
        require_legal(state)


def test_a_fused_op_is_copied_as_a_whole():
    # 0 → 1 → 2 and 1 → 3: both readers of the kernel of 0 and 1 compute it themselves
    problem = chain(["add", "mul", "mm", "add"])
    source, target, pattern = edges_of([(0, 1, 0), (1, 2, 0), (1, 3, 0)])
    forked = Problem(**{**_fields(problem), "source": source, "target": target, "pattern": pattern})
    state = fused(forked, [(0, 1)])
    edge = next(e for e in range(3) if (source[e], target[e]) == (1, 3))
    alone, whole = copied_if_legal(state, edge), copy_kernel(state, edge).fusion
    assert alone.copies(3) == {1}
    assert alone.leaves(0)
    assert whole.copies(3) == {0, 1}
    assert not whole.leaves(0)
    assert whole.leaves(1)  # the product reads it
    assert fusion_of(plan_of(Evaluator(forked).score(whole)), forked).copies(3) == {0, 1}


def test_what_a_copy_of_a_copy_reads_is_kept_for_the_backward():
    problem = chain(["add", "add", "add", "add"], side=FORWARD)
    ops = (*problem.ops[:3], replace(problem.ops[3], side=BACKWARD))
    both = Problem(**{**_fields(problem), "ops": ops})
    state = copied_if_legal(copied_if_legal(unfused(both), 2), 1)
    assert state.copies(3) == {1, 2}
    assert [state._is_kept(i) for i in range(3)] == [True, False, False]


def test_random_numbers_are_not_drawn_twice():
    problem = chain(["dropout", "add"])
    assert copied_if_legal(unfused(problem), 0) is None
    assert merged_if_legal(unfused(problem), 0, 1) is not None


def test_dear_ops_are_not_computed_for_every_reader_of_a_broadcast():
    problem = chain(["gelu", "add"])
    small = replace(problem.ops[0], elements=256.0, looped=256.0)
    wide = Problem(**{**_fields(problem), "ops": (small, problem.ops[1])})
    assert not edge_fits(wide, 0)
    cheap = Problem(**{**_fields(problem), "ops": (replace(small, word="add"), problem.ops[1])})
    assert edge_fits(cheap, 0)


def test_a_kernel_has_so_many_ops():
    problem = chain(["add"] * 70)
    state = unfused(problem)
    for i in range(1, MOST):
        state = merged_if_legal(state, 0, i)
    assert merged_if_legal(state, 0, MOST) is None
    with pytest.raises(InputError, match="64 at most"):
        require_legal(fused(problem, [tuple(range(70))]))


def test_forward_and_backward_are_compiled_apart_and_copies_mind_the_memory():
    problem = chain(["add", "add", "add"], side=FORWARD)
    ops = (*problem.ops[:2], replace(problem.ops[2], side=BACKWARD))
    both = Problem(**{**_fields(problem), "ops": ops})
    assert merged_if_legal(unfused(both), 1, 2) is None
    edge = 1  # op2 of the backward reads op1
    kept = unfused(both).held
    copied = copied_if_legal(unfused(both), edge)
    assert copied.held == kept  # what op1 reads is kept instead of op1
    larger = replace(ops[0], bytes=ops[0].bytes * 2)
    full = Problem(**{**_fields(both), "ops": (larger, *ops[1:]), "room": kept})
    assert copied_if_legal(unfused(full), edge) is None


def test_hand_written_mistakes_are_named():
    problem = chain(["add", "mm", "add", "mul"], gradients=[(3, 1e6), (2, 1e6)])
    for plan, words in (
        (Plan(regions=(("op0", "op1"),)), "nothing is fused in front of `op1`, a mm"),
        (Plan(regions=(("op0", "op3"),)), "falls apart"),
        (Plan(regions=(("op0", "opp"),)), "unknown op in a region of the plan: `opp`"),
        (Plan(regions=(("op2", "op3"), ("op3",))), "is in 2 regions"),
        (Plan(regions=(("op3", "op0*"),)), "nothing in the region"),
        (Plan(model="f" * 16), "was made for model ffff"),
    ):
        with pytest.raises(InputError, match=words.replace("(", r"\(").replace("*", r"\*")):
            fusion_of(plan, problem)
    for plan, words in (
        (Plan(buckets=(("p0", "p9"),)), "unknown parameter in a bucket of the plan: `p9`"),
        (Plan(buckets=(("p0",), ("p0", "p1"))), "is in 2 buckets"),
        (Plan(buckets=(("p0",),)), "`p1` is in no bucket"),
    ):
        with pytest.raises(InputError, match=words):
            buckets_from(plan, problem)


def test_a_step_without_gradients_or_with_one_op_is_refused():
    problem = chain(["add", "add"])
    with pytest.raises(InputError, match="has no gradients"):
        Problem(**{**_fields(problem), "gradients": ()})
    none = np.zeros(0, np.int64)
    with pytest.raises(InputError, match="has 1 op"):
        Problem(
            "one",
            "",
            problem.ops[:1],
            none,
            none,
            none,
            (Gradient("p", 4.0, 0),),
            0.0,
            wire(),
            DEVICE,
        )


def _fields(problem):
    names = Problem.__dataclass_fields__
    return {name: getattr(problem, name) for name in names}
