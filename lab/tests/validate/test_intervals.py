"""Widths of intervals, fitted to sources."""

import numpy as np

from foretell.cluster import load as load_cluster
from foretell.plan import Plan
from foretell.predict import predict
from foretell.predict.predict import Distance, shipped_distances
from foretell.workload import load
from foretell_lab.validate import intervals, reported, unseen


def made(source, mean, rows=40, **away):
    random = np.random.default_rng(len(source))
    return [
        intervals.Answer(source, mean + 0.02 * x, {"any": 1.0, **away})
        for x in random.standard_normal(rows).tolist()
    ]


def test_what_differs_between_sources_is_in_the_width():
    means = (-0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2)
    rows = [row for k, mean in enumerate(means) for row in made(f"{k}" * (k + 1), mean)]
    found = intervals.fit(rows).distance["any"]
    assert 0.0 <= found.slow <= 0.12
    assert 0.05 < found.width < 0.2


def test_a_distance_takes_what_sources_at_it_are_off_by():
    near = [row for k in range(6) for row in made("n" * (k + 1), 0.0)]
    far = [row for k in range(6) for row in made("f" * (k + 7), 0.4, arch=1.0)]
    found = intervals.fit(near + far)
    assert found.slowdowns["arch"] > 0.2 > found.distance["any"].width
    assert found.log_shift({"any": 1.0}) == 0.0 < found.log_shift({"any": 1.0, "arch": 1.0})


def test_steps_are_moved_to_the_median_of_sources_not_of_rows():
    few = [row for k in range(6) for row in made("f" * (k + 1), 0.1, rows=12, field=1.0)]
    many = made("many", 0.5, rows=4000, field=1.0)
    assert 0.05 < intervals.fit_slowdowns(few + many)["field"] < 0.15


def test_a_source_is_answered_with_numbers_fitted_without_it():
    model = load("gpt:layers=2,hidden=512,heads=8,seq=512,vocab=50304")
    plan = Plan.parse("dp=8,global_batch=8,framework=megatron-lm")
    found = predict(plan, model, load_cluster("v100-32:gpus=8"))
    assert found.away["field"] == 1.0
    rows = {
        name: [unseen.Row(name, "a step", found.step * times, found)] * 12
        for name, times in (("one", 1.0), ("two", 1.0), ("three", 1.0), ("odd", 2.0))
    }
    answers = intervals.answered_left_out(rows)
    moved = {name: some[0].found.step / found.step for name, some in answers.items()}
    assert moved["odd"] == min(moved.values())  # its own rows say nothing of it
    assert answers["odd"][0].found.low < answers["odd"][0].found.step


def test_first_answers_are_those_of_the_reported_sources():
    rows = intervals.first_answers()
    assert {row.source for row in rows} <= set(reported.sources())
    assert all(set(row.away) <= set(shipped_distances()) and row.away["any"] == 1.0 for row in rows)


def test_four_fifths_of_what_was_fitted_lie_inside():
    random = np.random.default_rng(5)
    rows = [
        intervals.Answer(f"{k}", x, {"any": 1.0})
        for k in range(12)
        for x in (0.1 + 0.1 * random.standard_normal(30)).tolist()
    ]
    found = intervals.fit(rows)
    assert 0.75 <= np.mean([row.is_inside(found) for row in rows]) <= 0.87


def test_a_framework_of_one_table_is_wider_than_one_of_several():
    def width(framework):
        plan = Plan.parse(f"dp=4,zero=1,precision=bf16-master,framework={framework},micro_batch=1")
        found = predict(
            plan,
            load("gpt:layers=24,hidden=4096,heads=32,seq=1024,vocab=51200"),
            load_cluster("a100-80:gpus=4"),
        )
        return found.away.get("lone", 0.0), np.log(found.high / found.low)

    lone, known = width("internevo"), width("megatron-deepspeed")
    assert (lone[0], known[0]) == (1.0, 0.0)
    assert lone[1] > known[1]


def test_widths_are_stretched_until_they_hold_the_sources_left_out():
    rows = [row for k in range(8) for row in made("s" * (k + 1), 0.03 * k)]
    narrow = intervals.Fitted({}, {"any": Distance(0.0, 0.01)})
    apart = {row.source: narrow for row in rows}
    times = intervals.width_factor(rows, apart)
    held = [row.is_inside(narrow.widen(times)) for row in rows]
    assert times > 10
    assert 0.75 <= np.mean(held) <= 0.85


def test_biases_take_sources_out_of_exact_intervals_too():
    random = np.random.default_rng(1)
    alike = [random.normal(0.0, 0.7, 400) for _ in range(12)]
    unlike = [rows + bias for rows, bias in zip(alike, np.linspace(-2, 2, 12), strict=True)]
    assert (
        intervals.coverage_by_chance(alike).mean
        > 10
        > 6
        > intervals.coverage_by_chance(unlike).mean
    )
