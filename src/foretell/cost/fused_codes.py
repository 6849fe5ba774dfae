"""Ops by number: what each counts for in a fused region, for walks that are compiled."""

from __future__ import annotations

import numpy as np

from foretell.cost.fused_regions import DTYPES
from foretell.cost.fusion_class import KINDS, WORDS
from foretell.cost.limits import SIZES

# Elementary operations of one place, against an addition: polynomials, divisions and the counter
# of a random draw are what they are made of. First guesses; `tables/fused.toml` has fitted ones.
_HEAVY = {
    "div": 4.0, "reciprocal": 4.0, "sqrt": 4.0, "rsqrt": 3.0, "pow": 3.0, "exp": 6.0, "log": 8.0,
    "log1p": 14.0, "expm1": 10.0, "sin": 20.0, "cos": 20.0, "tanh": 12.0, "sigmoid": 9.0,
    "erf": 16.0, "gelu": 18.0, "gelu_backward": 26.0, "silu": 10.0, "silu_backward": 16.0,
    "elu": 9.0, "mish": 24.0, "elu_backward": 9.0, "softplus": 14.0, "hardswish": 4.0,
    "hardswish_backward": 5.0, "hardsigmoid": 3.0, "dropout": 34.0, "rand": 30.0,
    "bernoulli": 30.0, "rand_like": 30.0, "randn": 40.0, "softmax": 12.0, "log_softmax": 12.0,
    "softmax_backward_data": 6.0, "log_softmax_backward_data": 10.0, "layer_norm": 8.0,
    "layer_norm_backward": 14.0, "batch_norm": 8.0, "batch_norm_backward": 14.0,
    "group_norm": 8.0, "group_norm_backward": 14.0, "embedding": 4.0, "index": 5.0, "roll": 6.0,
    "cat": 4.0, "constant_pad_nd": 4.0, "upsample_nearest2d": 6.0, "avg_pool2d": 6.0,
    "var_mean": 5.0, "max_pool2d_with_indices": 24.0, "max_pool2d_with_indices_backward": 40.0,
    "avg_pool2d_backward": 10.0, "adaptive_avg_pool2d": 8.0, "adaptive_avg_pool2d_backward": 8.0,
    "slice_backward": 4.0, "select_backward": 4.0, "nll_loss_forward": 4.0,
    "nll_loss_backward": 4.0, "sigmoid_backward": 3.0, "tanh_backward": 3.0,
}  # fmt: skip
WEIGHT = np.array([_HEAVY.get(word, 1.0) for word in WORDS])
SIZE = np.array([float(SIZES[d]) for d in DTYPES])  # bytes of an element by number of format

_CODE = {kind: number for number, kind in enumerate(KINDS)}
VIEW, CONSTANT, INPUT = _CODE["view"], _CODE["constant"], _CODE["input"]
REDUCTION, NORM, TEMPLATE = _CODE["reduction"], _CODE["norm"], _CODE["template"]
GATHER, RANDOM = _CODE["gather"], _CODE["random"]
FRESH = WORDS.index("fresh")


def _are(*words: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([word in words for word in WORDS])


BATCH = _are("batch_norm", "batch_norm_backward")
COLUMNS = _are("layer_norm_backward", "group_norm_backward")  # sum columns beside their rows
# An unpooled gradient: the second tensor such an op is given tells its shape and is not read.
UNPOOLS = _are(
    "max_pool2d_with_indices_backward", "avg_pool2d_backward", "adaptive_avg_pool2d_backward"
)  # fmt: skip
PARTS = _are("split", "split_with_sizes", "unbind", "chunk")
SLICES = _are("slice", "select")

# For loop nests (→ `fused_values`): views by what they do, norms by how their sums are taken.
CAT, WINDOW, POINTWISE = _CODE["cat"], _CODE["window"], _CODE["pointwise"]
SCATTER, EXTERN = _CODE["scatter"], _CODE["extern"]
PREPARED = _are("adaptive_avg_pool2d_backward")  # torch's own: zeros, then sums into them
TURNS, EXPANDS = _are("t", "transpose", "permute"), _are("expand")
CONVOLVES = _are("convolution")
RESHAPES = _are("view", "unsafe_view", "reshape")
PIECES = SLICES | PARTS | _are("as_strided")
GROUPS = _are("group_norm", "group_norm_backward")
WELFORD = _are("var_mean", "var", "std", "layer_norm", "batch_norm", "group_norm")
NEVER_SPLIT = _are("argmax", "argmin", "max", "min")
SOFT = _are("softmax", "log_softmax")
LOSS, LOSS_BACK = _are("nll_loss_forward"), _are("nll_loss_backward")
LAYER_BACK = _are("layer_norm_backward")
BATCH_BACK, GROUP_BACK = _are("batch_norm_backward"), _are("group_norm_backward")
# Operations Inductor counts of an op that it breaks into several; of others one.
_BROKEN = {
    "gelu": 8, "gelu_backward": 20, "silu": 4, "silu_backward": 10, "mish": 8, "mish_backward": 14,
    "hardswish": 5, "hardswish_backward": 9, "elu": 6, "elu_backward": 7, "dropout": 5,
    "softplus": 5, "threshold_backward": 3, "max_pool2d_with_indices": 40,
    "max_pool2d_with_indices_backward": 60, "avg_pool2d": 20, "avg_pool2d_backward": 30,
    "layer_norm": 5, "batch_norm": 6, "group_norm": 6, "layer_norm_backward": 10,
    "batch_norm_backward": 10, "constant_pad_nd": 3, "slice_backward": 3, "select_backward": 3,
    "cat": 4, "roll": 3,
}  # fmt: skip
COUNTS = np.array([_BROKEN.get(word, 1) for word in WORDS])
