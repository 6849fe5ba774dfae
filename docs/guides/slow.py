# %% [markdown]
# # Why is my step slow?
#
# Take a trace (`foretell profile train.py`, or your own from `torch.profiler` with
# `record_shapes=True`), then ask three questions.

# %%
from shell import foretell

TRACE = "src/foretell/samples/traces/resnet18-h200.json.gz"

# %% [markdown]
# **Where does the time go?** Lanes that are busy, and the critical path:

# %%
foretell(f"simulate {TRACE}")

# %% [markdown]
# **What is the bottleneck?** Make one thing faster and look whether the step notices. GPU-bound: a
# host twice as fast gains nothing here.

# %%
foretell(f"whatif {TRACE} faster-host:times=2 --real-ms 48.2")

# %% [markdown]
# **What would help?** `foretell advise` tries everything that applies
# ([an example](changes.md)). `foretell report step.json.gz -o report.html` puts all of it on
# [one page](report.md): verdict, kernels, idle gaps by cause, memory over time.
#
# | it says | look at |
# |---|---|
# | GPU-bound | `amp`, `tf32`, `compile`, `flash-attention`, `channels-last` |
# | CPU-bound | `cuda-graph`, `compile`, `foreach-optimizer`, `remove-sync` |
# | communication-bound | `bucket-size`, `fsdp`, `powersgd`, `network`; a larger batch |
# | waiting for input | `loader:workers=4`, `async-copies` |
