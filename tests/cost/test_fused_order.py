"""The order in which a region's kernels run, and what they still find in the cache."""

from math import nan

import numpy as np

from foretell.cost.fused_kernels import lowered
from foretell.cost.fused_regions import FRESH, WORDS, assembled

ROWS, WIDE = 3136, 192
N = ROWS * WIDE


def tensor(word, n=N, last=WIDE):
    return (word, "fp32", n, n, 1, 0, last, 0, 0, nan)


def op(word, n=N, leaves=0, inner=1, across=0, places=0):
    return (word, "fp32", n, places or n, inner, across, WIDE, leaves, 0, nan)


def kernels(nodes, edges):
    return lowered(assembled([(nodes, edges)]), 132.0).regions


def words(found, kernel):
    return [WORDS[w] for w in found.op[found.first[kernel] : found.first[kernel + 1]]]


def norm_backward():
    """The backward of a layer norm whose gradient is added to another, as an H200 ran it."""
    nodes = [
        tensor("fresh"),
        tensor("input"),
        *[tensor("input", ROWS, 28)] * 2,
        tensor("input"),
        *[tensor("input", WIDE)] * 2,
        op("layer_norm_backward", leaves=2 * 4 * WIDE, inner=WIDE),
        op("add", leaves=4 * N),
    ]
    edges = [(0, 7, 0), (4, 7, 0), (2, 7, 1), (3, 7, 1), (6, 7, 1), (5, 7, 1), (1, 8, 0), (7, 8, 0)]
    return nodes, edges


def test_small_results_come_before_large_ones_that_would_lie_beside_them():
    found = kernels(*norm_backward())
    assert len(found) == 4
    assert "add" in words(found, 3)  # measured so: partial sums, both finished, then the rows
    assert words(found, 0).count("sum") == 2


def test_what_a_kernel_has_read_the_next_finds_in_the_cache():
    found = kernels(*norm_backward())
    first = found.op[found.first[0] : found.first[1]]
    large = found.elements[found.first[0] : found.first[1]] == N
    assert np.sum(large & (first == FRESH)) == 1  # the region's first tensor alone
    last = slice(found.first[3], found.first[4])
    fresh = (found.elements[last] == N) & (found.op[last] == FRESH)
    assert fresh.sum() == 2
    assert np.all(found.since[last][fresh] < 50 * 2**20)


def test_a_cache_forgets():
    n = 2**24  # 64 MiB, more than the cache holds
    nodes = [
        tensor("fresh", 1024),
        tensor("input", n),
        op("sum", 1, inner=n, places=n),
        op("add", 1024, 4096),
    ]
    found = kernels(nodes, [(1, 2, 0), (0, 3, 0), (2, 3, 1)])
    assert words(found, len(found) - 1)[0] == "input"
