"""Regions lowered to kernels: how many, what each reads and writes."""

from math import nan

import numpy as np

from foretell.cluster.read import devices
from foretell.cost.fused import fused_price
from foretell.cost.fused_kernels import lowered
from foretell.cost.fused_nests import splits
from foretell.cost.fused_regions import WALKED, assembled, distinct, walked
from foretell_lab.fused import data as fused_data

H200 = devices()["h200"]
N = 4096 * 1024


def tensor(word, n=N, last=1024):
    return (word, "fp32", n, n, 1, 0, last, 0, 0, nan)


def op(word, n=N, places=N, inner=1, across=0, leaves=0):
    return (word, "fp32", n, places, inner, across, 1024, leaves, 0, nan)


def kernels(nodes, edges):
    return lowered(assembled([(nodes, edges)]), 132.0)


def test_a_chain_is_one_kernel():
    found = kernels([tensor("fresh"), op("add"), op("gelu", leaves=4 * N)], [(0, 1, 0), (1, 2, 0)])
    assert found.of.tolist() == [0]
    assert found.regions.lowered
    assert found.regions.writes.sum() == 4 * N


def test_one_long_sum_is_two_kernels_and_what_used_it_a_third():
    nodes = [tensor("fresh"), op("sum", 1, inner=N), op("div", N, leaves=4 * N)]
    found = kernels(nodes, [(0, 1, 0), (0, 2, 0), (1, 2, 1)])
    assert len(found.of) == 3


def test_rows_stay_with_what_uses_their_sums():
    nodes = [tensor("fresh"), op("softmax", inner=1024), op("mul", leaves=4 * N)]
    assert len(kernels(nodes, [(0, 1, 0), (1, 2, 0)]).of) == 1


def test_a_sum_of_columns_is_split_and_finished():
    nodes = [tensor("fresh"), op("sum", 1024, inner=4096, across=1, leaves=4096)]
    found = kernels(nodes, [(0, 1, 0)])
    assert len(found.of) == 2
    walk = dict(zip(WALKED, walked(found.regions, 132.0).region.T, strict=True))
    assert walk["read"][0] == 4 * N
    assert walk["written"][0] == walk["read"][1]


def test_loops_that_read_nothing_in_common_stay_apart():
    nodes = [tensor("input"), tensor("input"), *[op("relu", leaves=4 * N)] * 2]
    assert len(kernels(nodes, [(0, 2, 0), (1, 3, 0)]).of) == 2
    assert len(kernels(nodes, [(0, 2, 0), (0, 3, 0)]).of) == 1


def test_splits_follow_the_devices_units():
    assert splits(1.0, 2.0**22, True, 132.0) > 1
    assert splits(1.0, 4096.0, True, 132.0) == 1
    assert splits(1024.0, 4096.0, False, 132.0) > 1
    assert splits(10000.0, 4096.0, False, 132.0) == 1


def test_most_regions_fall_into_as_many_kernels_as_the_compiler_made():
    data = fused_data.shipped("h200")
    written = data.regions.is_written
    rows = np.flatnonzero(~written)
    true = np.bincount((np.cumsum(~written) - 1)[written], minlength=len(rows))
    found = lowered(data.regions.take(rows), 132.0)
    answer = np.bincount(found.of[~found.library], minlength=len(rows))
    known = (true > 0) & ~data.held_out[rows]
    assert np.mean((answer == true)[known]) > 0.93  # 93.9 %


def test_parts_of_a_split_seen_through_views_are_copied_apart():
    views = [op("view", N // 4), op("clone", N // 4, N // 4, leaves=N)]
    nodes = [tensor("fresh"), op("split", N // 4), *views, *views]
    edges = [(0, 1, 1), (1, 2, 0), (2, 3, 0), (1, 4, 0), (4, 5, 0)]
    assert len(kernels(nodes, edges).of) == 2


def test_columns_are_not_summed_where_a_view_gave_them_another_shape():
    rows, wide = 512, 10240
    n = rows * wide
    gelu, total = op("gelu", n, n, leaves=4 * n), op("sum", wide, n, rows, 1, 4 * wide)
    same = kernels([tensor("fresh", n), gelu, total], [(0, 1, 0), (1, 2, 0)])
    nodes = [tensor("fresh", n), gelu, op("view", n, n), total]
    assert len(same.of) == 1
    assert len(kernels(nodes, [(0, 1, 0), (1, 2, 0), (2, 3, 0)]).of) == 2


def test_windows_are_cut_in_the_kernel_of_the_norm_before():
    views = [op("view"), op("permute"), op("clone", leaves=4 * N)]
    nodes = [tensor("fresh"), op("layer_norm", inner=1024), *views]
    assert len(kernels(nodes, [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)]).of) == 1


def test_a_concatenation_of_sums_is_written_part_by_part():
    n = 1 << 16
    sums = [op("sum", n // 64, n, 64), op("sum", n // 64, n, 64)]
    cat = op("cat", n // 32, n // 32, leaves=n // 8)
    nodes = [tensor("fresh", n), tensor("input", n), *sums, cat]
    found = kernels(nodes, [(0, 2, 0), (1, 3, 0), (2, 4, 1), (3, 4, 1)])
    assert len(found.of) == 2  # each sum's kernel leaves its part
    assert found.regions.writes.sum() == n // 8
    plain = [tensor("fresh", n), tensor("input", n), op("cat", 2 * n, 2 * n, leaves=8 * n)]
    assert len(kernels(plain, [(0, 2, 1), (1, 2, 1)]).of) == 1


def conv(last):
    """Sixteen images of 256 channels through as many filters of three by three."""
    n, weight = 16 * 256 * 1024, 256 * 256 * 9
    nodes = [tensor("fresh", n, last), tensor("input", weight, 3)]
    flops = 2 * n * 256 * 9
    return [*nodes, ("convolution", "fp32", n, n, 1, 0, 32, 4 * n, flops, 1e-4)]


def test_images_and_filters_are_laid_out_for_a_convolution():
    assert len(kernels(conv(32), [(0, 2, 0), (1, 2, 1)]).of) == 3
    assert len(kernels(conv(256), [(0, 2, 0), (1, 2, 1)]).of) == 2  # channels are last already


def beside(rows, wide, dtype="fp32"):
    """A layer norm's gradients: rows and columns summed in one pass."""
    n, size = rows * wide, 4 if dtype == "fp32" else 2
    made = ("layer_norm_backward", dtype, n, n, wide, 0, wide, size * (n + 2 * wide), 0, nan)
    nodes = [tensor("fresh", n), tensor("input", n), *[tensor("input", rows)] * 2]
    edges = [(0, 5, 0), (1, 5, 0), (2, 5, 1), (3, 5, 1), (4, 5, 1)]
    return kernels([*nodes, tensor("input", wide), made], edges)


def test_torch_finishes_columns_summed_beside_rows():
    found = beside(12288, 768)
    assert found.library.tolist() == [False, True, True]
    assert (found.known[1:] > 5e-6).all()
    assert (found.known[1:] < 3e-5).all()


def test_torch_fills_counters_first_and_results_of_half_the_bytes_are_cast():
    assert len(beside(16384, 768).of) == 5  # 1024 parts: blocks of threads count themselves
    assert len(beside(12288, 768, "bf16").of) == 5
    assert len(beside(73728, 96).of) == 3  # fewer columns than 128: more threads one below another


def test_what_is_beside_a_sum_of_everything_joins_its_even_parts():
    n = 512 * 1024
    nodes = [tensor("fresh", n), op("tanh", n, n, leaves=4 * n), op("mean", 1, n, n, leaves=4)]
    assert len(kernels(nodes, [(0, 1, 0), (1, 2, 0)]).of) == 2  # 64 parts of 8192


def test_a_sum_of_everything_is_cut_as_the_norm_before_it():
    nodes = [tensor("fresh"), op("softmax", inner=1024), op("pow"), op("sum", 1, inner=N, leaves=4)]
    assert len(kernels(nodes, [(0, 1, 0), (1, 2, 0), (2, 3, 0)]).of) == 2


def test_parts_that_do_not_lie_side_by_side_are_split_again():
    wide, rows = 7, 9586752  # 21399 · 64 · 7 · 7 elements, summed but for the last dimension
    n = wide * rows
    nodes = [tensor("fresh", n, wide), op("sum", wide, n, rows, 1, 4 * wide)]
    assert len(kernels(nodes, [(0, 1, 0)]).of) == 3


def test_columns_are_summed_where_the_batch_cuts_them():
    n, rows = 64 * 128 * 640, 64 * 128
    nodes = [tensor("fresh", n, 640), tensor("input", rows, 128)]
    nodes += [op("mul", n, n, leaves=4 * n), op("sum", 640, n, rows, 1, 4 * 640)]
    edges = [(0, 2, 0), (1, 2, 1), (2, 3, 0)]
    assert len(kernels(nodes, edges).of) == 2
    nodes[1] = tensor("input", rows, 1)  # nothing shows that there are 128 rows a part
    assert len(kernels(nodes, edges).of) == 3


def test_a_tensor_of_which_parts_leave_lies_in_memory():
    nodes = [tensor("fresh"), op("gelu"), op("split", N // 4, N // 4, leaves=3 * N)]
    nodes += [op("roll", N // 4, N // 4, leaves=N)]
    found = kernels(nodes, [(0, 1, 0), (1, 2, 0), (2, 3, 0)])
    assert len(found.of) == 2
    assert found.regions.writes.sum() == 5 * N


def test_rows_of_few_places_are_summed_in_a_kernel_before():
    n = 25088 * 4
    nodes = [tensor("fresh", n, 4), tensor("input", n, 4)]
    nodes += [op("softmax_backward_data", n, n, 4, leaves=4 * n)]
    nodes[2] = (*nodes[2][:6], 4, *nodes[2][7:])
    two = [(0, 2, 0), (1, 2, 0)]
    assert (
        len(
            kernels(
                [nodes[0], nodes[1], op("mul", n, n), nodes[2]],
                [(0, 2, 0), (1, 2, 0), (2, 3, 0), (1, 3, 0)],
            ).of
        )
        == 2
    )
    assert len(kernels(nodes, two).of) == 1


def test_torch_spreads_the_gradient_of_an_adaptive_mean():
    n = 32 * 512 * 14 * 14
    made = ("adaptive_avg_pool2d_backward", "fp32", n, n, 1, 0, 14, 0, 0, 2e-5)
    nodes = [tensor("fresh", n // 4, 7), tensor("input", n, 14), made, op("relu", n, n, leaves=n)]
    found = kernels(nodes, [(0, 2, 1), (1, 2, 0), (2, 3, 0)])
    assert found.library.tolist() == [True, True, False]
    np.testing.assert_allclose(found.known.sum(), 2e-5)


def test_kernels_that_look_alike_are_priced_once():
    region = assembled([([tensor("fresh"), op("relu", leaves=4 * N)], [(0, 1, 0)])])
    rows, which = distinct(region.take([0, 0, 0]))
    assert rows.tolist() == [0]
    assert which.tolist() == [0, 0, 0]


def test_a_region_costs_what_its_kernels_cost():
    nodes = [tensor("fresh"), op("sum", 1024, inner=4096, across=1, leaves=4096)]
    region = assembled([(nodes, [(0, 1, 0)])])
    found = lowered(region, 132.0)
    each = fused_price(found.regions, H200).seconds
    np.testing.assert_allclose(fused_price(region, H200).seconds, each.sum(), rtol=1e-6)
