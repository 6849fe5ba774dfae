"""Widths of intervals, fitted to sources."""

import numpy as np

from foretell.predict.interval import shipped
from foretell_lab.validate import intervals, reported


def made(source, mean, rows=40, **away):
    random = np.random.default_rng(len(source))
    return [
        intervals.Answer(source, mean + 0.02 * x, {"any": 1.0, **away})
        for x in random.standard_normal(rows).tolist()
    ]


def test_what_differs_between_sources_is_in_the_width():
    means = (-0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2)
    rows = [row for k, mean in enumerate(means) for row in made(f"{k}" * (k + 1), mean)]
    found = intervals.fit(rows)["any"]
    assert 0.0 <= found.slow <= 0.12
    assert 0.05 < found.width < 0.2


def test_a_distance_takes_what_sources_at_it_are_off_by():
    near = [row for k in range(6) for row in made("n" * (k + 1), 0.0)]
    far = [row for k in range(6) for row in made("f" * (k + 7), 0.4, arch=1.0)]
    found = intervals.fit(near + far)
    assert found["arch"].slow + found["arch"].width > 0.2 > found["any"].width


def test_first_answers_are_those_of_the_reported_sources():
    rows = intervals.first_answers()
    assert {row.source for row in rows} <= set(reported.sources())
    assert all(set(row.away) <= set(shipped()) and row.away["any"] == 1.0 for row in rows)
