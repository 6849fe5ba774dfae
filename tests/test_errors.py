"""Errors: one tree, what is wrong, and what would help."""

import pickle

import pytest

from foretell import errors
from foretell.errors import ForetellError, GraphError, InfeasibleError, InputError, UnmodelledError


def test_one_tree():
    kinds = (InputError, GraphError, UnmodelledError, InfeasibleError)
    assert all(kind.__mro__[1] is ForetellError for kind in kinds)
    defined = [
        v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__
    ]
    assert set(defined) == {ForetellError, *kinds}


def test_message_and_hint():
    assert str(InputError("what is wrong")) == "what is wrong"
    error = GraphError("what is wrong", hint="what to do")
    assert str(error) == "what is wrong\n\nhint: what to do"
    assert (error.message, error.hint) == ("what is wrong", "what to do")


def test_an_error_crosses_processes():
    error = pickle.loads(pickle.dumps(InputError("wrong", hint="right")))
    assert (type(error), str(error)) == (InputError, "wrong\n\nhint: right")


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("kernl", ["host", "kernel"], "did you mean `kernel`?"),
        ("KERNEL", ["host", "kernel"], "did you mean `kernel`?"),
        ("zzz", ["b", "a"], "known: a, b"),
        ("zzz", [], "none is known here"),
        ("zzz", (f"name{k:02}" for k in range(50)), "50 are known, among them name00, name01"),
    ],
)
def test_unknown_names_offer_the_nearest(name, known, hint):
    error = errors.unknown("kind", name, known)
    assert error.message == f"unknown kind: `{name}`"
    assert error.hint.startswith(hint)
