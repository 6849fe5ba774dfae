"""Sizes of results and of workspaces, against what PyTorch and cuDNN make."""

from math import prod

import pytest

from foretell.memory.flow import KEPT, Kept
from foretell.memory.outputs import RULES, broadcast, workspace
from foretell.memory.tape import Call

MIB = 2**20


def made(name, *inputs, values=()):
    """Sizes that a rule answers; an input is sizes (of floats) or a pair with a format."""
    pairs = [i if i is None or isinstance(i[0], tuple) else (i, "float") for i in inputs]
    call = Call(
        name,
        tuple(p[0] if p else () for p in pairs),
        tuple(p[1] if p else "" for p in pairs),
        tuple(values),
    )
    return [d for d, _ in (RULES.get(name, broadcast))(call)]


CONV = ("", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1")
CASES = [
    (("mm", (64, 128), (128, 10)), {}, [(64, 10)]),
    (("addmm", (10,), (64, 128), (128, 10)), {}, [(64, 10)]),
    (("bmm", (8, 64, 32), (8, 32, 16)), {}, [(8, 64, 16)]),
    (("convolution", (64, 3, 224, 224), (64, 3, 7, 7)), {"values": CONV}, [(64, 64, 112, 112)]),
    (("native_layer_norm", (32, 128, 768)), {"values": ("", "[768]")},
     [(32, 128, 768), (4096,), (4096,)]),
    (("max_pool2d_with_indices", (64, 64, 112, 112)),
     {"values": ("", "[3, 3]", "[2, 2]", "[1, 1]", "[1, 1]", "False")},
     [(64, 64, 56, 56), (64, 64, 56, 56)]),
    (("mean", (8, 16, 7, 7)), {"values": ("", "[2, 3]", "True")}, [(8, 16, 1, 1)]),
    (("sum", (8, 16)), {"values": ("", "[0]", "False")}, [(16,)]),
    (("sum", (8, 16)), {}, [()]),
    (("embedding", (1000, 64), ((8, 512), "long int")), {}, [(8, 512, 64)]),
    (("embedding_dense_backward", (8, 512, 64), ((8, 512), "long int")),
     {"values": ("", "", "1000")}, [(1000, 64)]),
    (("_to_copy", (8, 16)), {"values": ("", "15")}, [(8, 16)]),
    (("add", (8, 1, 16), (4, 16)), {}, [(8, 4, 16)]),
    (("index_select", (40000, 4, 64), None, ((400000,), "long int")), {"values": ("", "0", "")},
     [(400000, 4, 64)]),
    (("index_add", (40000, 4, 64), None, ((400000,), "long int"), (400000, 4, 64)), {},
     [(40000, 4, 64)]),
    (("resize_", (0,)), {"values": ("", "[4096, 768]")}, [(4096, 768)]),
    (("resize_", (3,)), {"values": ("", "[3]")}, []),
    (("mm", None, None), {}, []),
]  # fmt: skip


@pytest.mark.parametrize(("args", "more", "sizes"), CASES, ids=[c[0][0] for c in CASES])
def test_what_an_operator_makes(args, more, sizes):
    assert made(*args, **more) == sizes


def test_tensors_are_joined_along_a_dim():
    call = Call("cat", (((8, 3), (8, 5)),), ("TensorList",), ("", "1"))
    assert RULES["cat"](call) == [((8, 8), "")]


def test_only_gradients_that_are_asked_for_are_made():
    values = ["", "", "", "[64]", *[""] * 6, "[False, True, True]"]
    sizes = made("convolution_backward", (8, 64, 7, 7), (8, 3, 7, 7), (64, 3, 1, 1), values=values)
    assert sizes == [(64, 3, 1, 1), (64,)]


def convolved(*kernels):
    """The backward of the second convolution of VGG on 64 images."""
    image, sides = (64, 64, 224, 224), ("float",) * 3
    return Call("convolution_backward", (image, image, (64, 64, 3, 3)), sides, kernels=[*kernels])


def test_winograd_tiles_take_nine_quarters_of_input_and_output():
    size, _ = workspace(convolved("void cudnn::winograd_nonfused::winogradWgradData4x4<float>"))
    assert size / MIB == pytest.approx(2.25 * 2 * 784, rel=1e-3)


def test_spectra_take_two_tiles_of_complex_numbers_at_a_time():
    size, _ = workspace(convolved("void fft2d_r2c_32x32<float, false, 0u, false>(float2*)"))
    assert size / MIB == 85  # as an H200 asks for: 128 channels and 64 × 64 filters


def test_filters_that_are_turned_round_are_there_twice():
    image, sides = (64, 512, 28, 28), ("float",) * 3
    values = ("", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    kernels = ["void flip_filter<float, float>", "void fft2d_r2c_32x32<float, false, 1u, false>"]
    call = Call("convolution", (image, (512, 512, 3, 3)), sides, values, kernels=kernels)
    # Measured: 2662 MiB of which 205 are copies in another layout.
    assert workspace(call)[0] / MIB == 2 * 1088 + 9 + 272


def test_a_filter_s_gradient_by_spectra_of_whole_images():
    """Both images as spectra, one of them turned round first; in another order once more."""
    x, y, sides = (640, 16, 32, 32), (640, 32, 32, 32), ("float",) * 3
    kernels = ["void flip_filter<float, float>", "void fft2d_r2c_64x64<float>(float2*)"]
    spectra, turned = 640 * 48 * 64 * 33 * 8, 640 * 32 * 32 * 32 * 4
    once = Call("convolution_backward", (y, x, (32, 16, 3, 3)), sides, kernels=kernels)
    assert workspace(once)[0] == spectra + turned + 32 * 16 * 64 * 33 * 8
    twice = Call("convolution_backward", (y, x, (32, 16, 3, 3)), sides,
                 kernels=[*kernels, "void internal::region_transform_ABC_val<int>"])  # fmt: skip
    assert workspace(twice)[0] == 2 * spectra + turned  # measured: the peak of `remembering`


def test_an_rms_norm_keeps_its_input_and_one_number_a_row():
    assert made("_fused_rms_norm", (8, 16, 64), values=["", "[64]"]) == [(8, 16, 64), (128,)]
    assert KEPT["_fused_rms_norm"] == Kept((0,), (1,))


def test_a_change_of_layout_takes_copies():
    size, _ = workspace(convolved("void cudnn::nchwToNhwcKernel<float>", "xmma_fprop"))
    assert size == pytest.approx(2 * 784 * MIB, rel=1e-3)


def test_kernels_that_need_nothing():
    assert workspace(convolved("sm80_xmma_dgrad_implicit_gemm_f32f32"))[0] == 0.0


def going_over(*sides):
    """The forward pass of a convolution that turns what it is given, over any number of sides."""
    taps = (3,) * len(sides)
    ones = f"[{', '.join('1' * len(sides))}]"
    values = ("", "", "", ones, ones, ones, "False", "[0]", "1")
    kernels = ["void cudnn::nchwToNhwcKernel<float>", "xmma_fprop"]
    image, filters = (4, 16, *sides), (32, 16, *taps)
    return Call("convolution", (image, filters), ("float",) * 2, values, kernels=kernels)


@pytest.mark.parametrize("sides", [(64,), (8, 8, 8)])
def test_lines_and_volumes_are_copied_like_images(sides):
    size, where = workspace(going_over(*sides))
    numbers = 4 * (16 + 32) * prod(sides) + 32 * 16 * 3 ** len(sides)
    assert size == 4 * numbers
    assert where.startswith(f"{4 * 16 * prod(sides)}:")
