"""The word of each kernel class of a workload, forward and backward (→ `cost.fusion_class`)."""

from __future__ import annotations

_SAME = {
    "gemm": "mm",
    "copy": "clone",
    "reduce": "sum",
    "attention": "scaled_dot_product_attention",
}

THERE = _SAME | {
    "conv": "convolution", "conv_dgrad": "convolution", "norm": "layer_norm",
    "rms_norm": "rms_norm",
    "softmax": "softmax", "dropout": "dropout", "elementwise": "add", "activation": "tanh",
    "gelu": "gelu", "silu": "silu", "relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid",
    "embedding": "embedding", "batch_norm": "batch_norm", "pool": "max_pool2d_with_indices",
}  # fmt: skip
BACK = _SAME | {
    "conv": "convolution_backward", "conv_dgrad": "convolution_backward",
    "conv_wgrad": "convolution_backward", "norm_backward": "layer_norm_backward",
    "rms_norm_backward": "fused_rms_norm_backward", "softmax_backward": "softmax_backward_data",
    "dropout": "dropout_backward", "elementwise": "mul", "gelu": "gelu_backward",
    "silu": "silu_backward", "relu": "threshold_backward", "tanh": "tanh_backward",
    "sigmoid": "sigmoid_backward", "batch_norm_backward": "batch_norm_backward",
    "pool_backward": "max_pool2d_with_indices_backward",
    "embedding_backward": "embedding_dense_backward",
}  # fmt: skip
