"""What an operator keeps for its backward pass, as PyTorch's derivatives name it.

Numbers are places among the inputs; `out` marks results by place. From the derivative formulas
(tools/autograd/derivatives.yaml of PyTorch): a formula that reads `self` keeps the input, one that
reads `result` keeps the output. Where two inputs are multiplied each is kept for the gradient of
the other, so only if the other needs one.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.memory.recurrent import FORWARD, KEPT_INPUTS, KEPT_RESULTS


@dataclass(frozen=True)
class Kept:
    """What is kept: inputs, results, and pairs of inputs that are kept for each other."""

    inputs: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    pair: tuple[int, int] | None = None
    lists: bool = False  # the parameters given as a list, too


_SELF, _RESULT, _NOTHING = Kept((0,)), Kept(out=(0,)), Kept()
_ATTENTION = Kept((0, 1, 2, 3), (0, 1))

KEPT: dict[str, Kept] = {
    **dict.fromkeys(("mm", "bmm", "mul"), Kept(pair=(0, 1))),
    **dict.fromkeys(("addmm", "baddbmm", "_addmm_activation"), Kept(pair=(1, 2))),
    "convolution": Kept(pair=(0, 1)),
    "div": Kept(pair=(0, 1)),
    **dict.fromkeys(("cudnn_batch_norm", "native_batch_norm", "miopen_batch_norm",
                     "_native_batch_norm_legit", "_batch_norm_with_update", "native_layer_norm",
                     "native_group_norm"), Kept((0,), (1, 2))),
    **dict.fromkeys(("relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "_softmax",
                     "_log_softmax", "_safe_softmax", "elu", "reciprocal", "softplus"), _RESULT),
    **dict.fromkeys(("gelu", "silu", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "mish",
                     "pow", "abs", "log", "sin", "cos", "clamp", "clamp_min", "clamp_max",
                     "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
                     "log_sigmoid_forward", "erf", "var", "std"), _SELF),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), Kept((0,), (1,))),
    "native_dropout": Kept(out=(1,)),
    "embedding": Kept((1,)),
    "_embedding_bag": Kept((1, 2), (1, 2)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), Kept((0, 1), (1,))),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
                     "binary_cross_entropy", "binary_cross_entropy_with_logits", "prelu"),
                    Kept((0, 1))),
    **dict.fromkeys(("_scaled_dot_product_efficient_attention",
                     "_scaled_dot_product_flash_attention",
                     "_scaled_dot_product_cudnn_attention"), _ATTENTION),
    FORWARD: Kept(KEPT_INPUTS, KEPT_RESULTS, lists=True),
    "where": _SELF, "masked_fill": Kept((1,)), "index": Kept((1,)), "gather": Kept((2,)),
    "index_select": Kept((2,)), "amax": Kept((0,), (0,)), "max": Kept(out=(1,)),
    **dict.fromkeys(("add", "sub", "rsub", "cat", "stack", "clone", "_to_copy", "sum", "mean",
                     "roll", "copy", "neg"), _NOTHING),
}  # fmt: skip

# In place, these have formulas that read their result; others that read their input copy it first.
OF_RESULT = frozenset({"leaky_relu", "hardtanh"})
