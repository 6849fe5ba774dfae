"""The program for factors against brute force and against the closed form."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cluster import load as machines
from foretell.plan.layer_ranges import FactorMatmul, gathered
from foretell.plan.unsupported import unsupported
from foretell.predict import predict
from foretell.search.placement.planner import plan_of
from foretell.search.placement.problem import (
    ALL_REDUCE,
    FACTORS,
    Action,
    Node,
    Wire,
    brute,
    closed_form,
    problem,
    program,
    recomputing,
    refined,
    solve,
    uniform,
    value,
    weights_of,
)
from foretell.search.placement.search import Evaluator
from foretell.workload import load

seconds = st.integers(0, 50).map(lambda n: n / 1000)


@st.composite
def programs(draw):
    """A small graph of ops, some of which make gradients."""
    names = [f"op{i}" for i in range(draw(st.integers(1, 7)))]
    nodes = [
        Node(n, draw(seconds), draw(st.sampled_from([0.0, 0.01, 0.05])), draw(st.booleans()))
        for n in names
    ]
    wires = []
    for i, source in enumerate(names[:-1]):
        targets = draw(st.sets(st.sampled_from(names[i + 1 :]), max_size=3))
        if targets:
            wires.append(Wire(source, tuple(sorted(targets)), draw(seconds)))
    return nodes, wires


@settings(max_examples=60, deadline=None)
@given(programs())
def test_the_program_is_exact(case):
    nodes, wires = case
    found, best = solve(nodes, wires), brute(nodes, wires)
    assert value(nodes, wires, found) == pytest.approx(value(nodes, wires, best), abs=1e-9)
    assert not any(n.fixed and n.name in found for n in nodes)


@given(st.integers(1, 4096), st.integers(1, 8192), st.integers(1, 8192), st.integers(2, 64))
def test_on_traffic_alone_the_program_says_what_the_closed_form_says(rows, n1, n2, ranks):
    """A ring at one byte a second: all-reduce moves twice (M-1)/M, all-gather once."""
    ring = (ranks - 1) / ranks
    laws = np.zeros((5, 1, 3))
    laws[0, 0, 1], laws[4, 0, 1] = 2 * ring * 1e-9, ring * 1e-9
    w = FactorMatmul("w", n1, n2, 1.0, n1 * n2)
    nodes, wires = program([w], laws, rows, 4.0, [0.0])
    assert (value(nodes, wires, frozenset("w")) < 0) == closed_form(rows, n1, n2)


@st.composite
def chains(draw):
    """Matmuls in a row, some of whose factors each rank can make of those of its neighbours."""
    widths = [draw(st.integers(1, 40)) for _ in range(draw(st.integers(2, 5)))]
    found = []
    for i, (n1, n2) in enumerate(pairwise(widths)):
        w = FactorMatmul(f"w{i}", n1, n2, 1.0, n1 * n2, f"w{i}")
        if i and draw(st.booleans()):
            w = w._replace(maker=f"w{i - 1}", maker_n1=widths[i - 1])
        if i + 2 < len(widths) and draw(st.booleans()):
            w = w._replace(reader=f"w{i + 1}", reader_n2=widths[i + 2])
        found.append(w)
    return found


def taken(weights, batch, again, upstream, chosen):
    """Seconds of a choice, counted factor by factor: what is gathered, recomputed and reduced."""
    total = 0.0
    for w, more in zip(weights, again, strict=True):
        total += more if w.name in chosen else 2e-6 * w.elements
    total += sum(took for node, took in upstream.items() if node in chosen)
    for w in weights:
        wants_input = {w.name, f"forward of {w.name}", f"backward of {w.name}"} & chosen
        wants_output = {w.name, f"backward of {w.name}"} & chosen
        has_input = w.maker and f"forward of {w.maker}" in chosen
        has_output = w.reader and f"backward of {w.reader}" in chosen
        total += 1e-6 * batch * (w.n1 * bool(wants_input and not has_input))
        total += 1e-6 * batch * (w.n2 * bool(wants_output and not has_output))
    return total


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(1, 60), st.floats(0.0, 1e-4))
def test_recomputed_factors_are_chosen_as_well_as_by_trying_all(weights, batch, slow):
    laws = np.zeros((5, 1, 3))
    laws[0, 0, 1], laws[4, 0, 1] = 2e-6, 1e-6
    names = {w.name for w in weights}
    upstream = {f"forward of {w.maker}": slow for w in weights if w.maker in names}
    upstream |= {f"backward of {w.reader}": slow for w in weights if w.reader in names}
    again = [slow * batch] * len(weights)
    nodes, wires = program(weights, laws, batch, 1.0, again, upstream)
    everything = [*names, *upstream]
    least = min(
        taken(weights, batch, again, upstream, {*some})
        for n in range(len(everything) + 1)
        for some in combinations(everything, n)
    )
    found = solve(nodes, wires)
    assert taken(weights, batch, again, upstream, found) == pytest.approx(least, abs=1e-8)
    sent = [recomputing(w, found) for w in weights if w.name in found]
    assert all(w.maker or "input" not in w.recomputes for w in sent)


def test_recomputing_what_makes_a_factor_can_pay():
    alexnet = problem(load("alexnet:batch=8"), machines("tag"))
    plain = uniform(alexnet, Action(0, ALL_REDUCE))
    steps, plans = [], []
    for recompute in (False, True):
        one, placement = refined(alexnet, plain, recompute=recompute)
        steps.append(Evaluator(one).seconds(placement))
        plans.append(plan_of(one, placement))
    assert steps[1] < 0.9 * steps[0]
    assert not unsupported(plans[0])
    assert any("recompute" in why for why in unsupported(plans[1]))
    again = predict(plans[1], alexnet.workload, alexnet.cluster)
    assert again.step == pytest.approx(steps[1], rel=0.02)


def test_a_factor_behind_dropout_is_gathered():
    head = {w.name: w for _, w in weights_of(*_layers("alexnet:batch=2"))}
    first, second, third = head["head/fc3"], head["head/fc10"], head["head/fc16"]
    assert (first.maker, second.maker, third.maker) == ("", "", "head/fc10")
    assert (first.reader, second.reader, third.reader) == ("head/fc10", "head/fc16", "")


def _layers(text):
    on = problem(load(text), machines("heterog-8"))
    return on.workload, on.groups


@pytest.fixture(scope="module")
def vgg():
    return problem(load("vgg11:batch=2"), machines("heterog-8"))


def test_factors_pay_for_the_wide_layers_of_vgg(vgg):
    on = Evaluator(vgg)
    plain, sent = (on.seconds(uniform(vgg, Action(0, way))) for way in (ALL_REDUCE, FACTORS))
    assert sent < plain / 1.5
    assert any("head/fc" in op for ops in vgg.factored.values() for op in ops)


def test_the_program_never_makes_a_step_slower(vgg):
    for way in (ALL_REDUCE, FACTORS):
        before = uniform(vgg, Action(0, way))
        one, after = refined(vgg, before)
        assert Evaluator(one).seconds(after) <= Evaluator(vgg).seconds(before) * (1 + 1e-9)


def test_with_many_rows_there_are_no_factors():
    many = problem(load("gpt:layers=2,hidden=256,heads=4,seq=512,vocab=2048,batch=8"),
                   machines("heterog-8"))  # fmt: skip
    assert not any(many.factored.values())


def test_bytes_of_factors_are_counted_for_all_rows(vgg):
    found = weights_of(vgg.workload, vgg.groups)
    g, w = next((g, w) for g, w in found if w.name == "head/fc2")
    assert (w.n1, w.n2) == (25088, 4096)
    assert vgg.tables.factors[0, g] >= 4 * (w.n1 + w.n2)


def test_an_input_that_several_matmuls_read_is_gathered_once():
    bert = problem(load("bert:batch=1,seq=128"), machines("heterog-8"))
    q, k, v = (
        w
        for _, w in weights_of(bert.workload, bert.groups)
        if w.name in {f"block.0/{name}" for name in ("query", "key", "value")}
    )
    assert q.source == k.source == v.source == "block.0/query"
    assert gathered([q, k, v]) == q.rows * (q.n1 + q.n2 + k.n2 + v.n2)
    laws = np.zeros((5, 1, 3))
    laws[0, 0, 1], laws[4, 0, 1] = 2e-9, 1e-9
    least = 2 * q.n1 * q.n2 / (q.n1 + q.n2)  # rows at which one of them alone breaks even
    batch = 1.2 * least / q.rows
    for some, sent in (([q], 0), ([q, k, v], 3)):
        nodes, wires = program(some, laws, batch, 4.0, [0.0] * len(some))
        assert len(solve(nodes, wires)) == len(brute(nodes, wires)) == sent
