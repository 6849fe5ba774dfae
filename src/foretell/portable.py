"""Functions of real numbers that round the same on every machine.

NumPy, BLAS and the C library choose another algorithm by what a CPU can do, and its last digits
with it; a search that takes the cheaper of two nearly equal prices would then find another plan
elsewhere. Here each function is a fixed row of additions, multiplications and divisions, which
IEEE 754 rounds in one way only. Errors stay within a few units of the last place.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# ln 2 in two parts: matmuls of the first with exponents are exact.
_HIGH, _LOW = 0.6931471803691238, 1.9082149292705877e-10
_PER_LN2, _LN10 = 1.4426950408889634, 2.302585092994046
_SQUARES = {1.0: 0, 2.0: 1, 4.0: 2, 8.0: 3}
_ROOT_HALF = 0.7071067811865476
_FEW = 8  # numbers that are quicker one by one than as an array
_EXP = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))  # of |x| ≤ ln(2)/2
_LOG = tuple(1.0 / n for n in range(23, 0, -2))  # of the inverse hyperbolic tangent


def exp(x: npt.ArrayLike) -> Array:
    """e to the power of each number."""
    values = np.asarray(x, float)
    if values.size > _FEW:
        return _exponential(values)
    return np.array([_exp(v) for v in values.ravel().tolist()]).reshape(values.shape)


def log(x: npt.ArrayLike) -> Array:
    """The natural logarithm of each number."""
    values = np.asarray(x, float)
    if values.size <= _FEW:
        return np.array([_log(v) for v in values.ravel().tolist()]).reshape(values.shape)
    return _logarithm(values, _HIGH, 1.0, _LOW)


def log2(x: npt.ArrayLike) -> Array:
    """The logarithm to base 2 of each number; of powers of two it is exact."""
    return _logarithm(np.asarray(x, float), 1.0, _PER_LN2, 0.0)


def log10(x: npt.ArrayLike) -> Array:
    """The logarithm to base 10 of each number."""
    return np.asarray(log(x) / _LN10)


def log1p(x: npt.ArrayLike) -> Array:
    """The natural logarithm of one more than each number."""
    small = np.asarray(x, float)
    whole = 1.0 + small
    return np.asarray(log(whole) - ((whole - 1.0) - small) / whole)


def tanh(x: npt.ArrayLike) -> Array:
    """The hyperbolic tangent of each number."""
    values = np.asarray(x, float)
    left = exp(-2.0 * np.abs(values))
    return np.asarray(np.copysign((1.0 - left) / (1.0 + left), values))


def power(x: npt.ArrayLike, to: Array | float) -> Array:
    """Each number, none below zero, to a power."""
    base = np.asarray(x, float)
    if isinstance(to, float) and to in _SQUARES:
        for _ in range(_SQUARES[to]):
            base = base * base
        return base
    times = np.asarray(to, float)
    if base.size <= _FEW and times.size == 1:
        one = times.item()
        none = 0.0 if one > 0 else math.inf
        found = np.array(
            [
                none if not v > 0 else v if one == 1 else _exp(one * _log(v))
                for v in base.ravel().tolist()
            ]
        )
        return found.reshape(np.broadcast_shapes(base.shape, times.shape))
    with np.errstate(invalid="ignore"):
        found = _exponential(times * _logarithm(base, _HIGH, 1.0, _LOW))
        found = np.where(times == 1, base, found)
    return np.where(base > 0, found, np.where(times > 0, 0.0, np.inf))


def two_above(x: npt.ArrayLike) -> Array:
    """The least power of two that is not less than each number, which is above zero."""
    near, times = np.frexp(np.asarray(x, float))
    return np.asarray(np.ldexp(1.0, times - (near == 0.5)))


def hypot(x: npt.ArrayLike, y: npt.ArrayLike) -> Array:
    """The root of two squares added."""
    one, other = np.asarray(x, float), np.asarray(y, float)
    return np.asarray(np.sqrt(one * one + other * other))


def product(left: Array, right: Array) -> Array:
    """A matrix or vector by a vector, summed in one order."""
    return np.asarray((left * right).sum(axis=-1))


# The same rows of operations on single numbers: for a few of them arrays take ten times as long.


def _exp(x: float) -> float:
    if x != x:
        return x
    kept = min(max(x, -746.0), 711.0)
    times = round(kept * _PER_LN2)  # halves to even, as np.rint
    rest = (kept - times * _HIGH) - times * _LOW
    found = _EXP[0]
    for term in _EXP[1:]:
        found = found * rest + term
    try:
        return math.ldexp(found, times)
    except OverflowError:
        return math.inf


def _log(x: float) -> float:
    if not 0 < x < math.inf:
        return -math.inf if x == 0 else x if x == math.inf else math.nan
    near, times = math.frexp(x)
    if near < _ROOT_HALF:
        near, times = 2.0 * near, times - 1
    slope = (near - 1.0) / (near + 1.0)
    square, found = slope * slope, _LOG[0]
    for term in _LOG[1:]:
        found = found * square + term
    return times * _HIGH + (2.0 * slope * found + times * _LOW)


def _logarithm(x: Array, whole: float, part: float, rest: float) -> Array:
    """Of numbers 2^times · m, with m near 1: times · whole + (ln m · part + times · rest)."""
    near, exponent = np.frexp(x)
    is_low = near < _ROOT_HALF
    near, times = np.where(is_low, 2.0 * near, near), (exponent - is_low).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = (near - 1.0) / (near + 1.0)
    found = times * whole + (2.0 * slope * np.polyval(_LOG, slope * slope) * part + times * rest)
    ends = np.where(x == 0, -np.inf, np.where(x == np.inf, np.inf, np.nan))
    return np.where((x > 0) & (x < np.inf), found, ends)


def _exponential(x: Array) -> Array:
    kept = np.clip(x, -746.0, 711.0)
    times = np.rint(kept * _PER_LN2)
    rest = (kept - times * _HIGH) - times * _LOW
    found = np.polyval(_EXP, rest)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(np.ldexp(found, np.nan_to_num(times).astype(np.int32)))
