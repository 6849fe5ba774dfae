# %% [markdown]
# # What is the best bucket size for DDP?
#
# DDP sends gradients in buckets of 25 MiB. Small buckets start early and pay latency; large ones
# overlap less with the backward pass. From one trace of one GPU, eight ranks on a slow network:

# %%
import foretell as ft

TRACE = "src/foretell/samples/traces/resnet18-h200.json.gz"
step = ft.Step.from_trace(TRACE, "h200:gpus=8", unprofiled=48.2e-3)
for mb in (1, 5, 25, 100):
    found = step.whatif("data-parallel:ranks=8", "network:bandwidth=2", f"bucket-size:mb={mb}")
    print(f"{mb:4} MiB  {1e3 * found.predicted:.1f} ms")

# %% [markdown]
# `foretell tune-ddp train.py` goes further: it profiles two ranks on this machine, searches
# buckets of any size (first ones small, last ones large), measures the best against DDP's
# default, and prints the line that sets them. `foretell plan step.graph --with fusion` searches
# buckets together with fused kernels: [Which ops to fuse](fusing.md).
