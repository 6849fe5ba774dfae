# %% [markdown]
# # What would X do to my step?
#
# You have a trace of one training step, and a list of things people say would make it faster.
# Each takes an afternoon to try. Here each takes a second, from that one trace, and says how sure
# it is.
#
# The trace here comes with the package: ResNet-18, 128 images, fp32, plain SGD, on one H200.
# Yours comes from `foretell profile train.py`, or from `torch.profiler` with
# `record_shapes=True`.

# %%
from shell import foretell

TRACE = "src/foretell/samples/traces/resnet18-h200.json.gz"

# %% [markdown]
# ## First: does it know my step at all?
#
# Before any question, simulate the trace unchanged. If that is not what was measured, no answer
# that follows can be trusted.

# %%
foretell(f"replay {TRACE}")

# %% [markdown]
# ## One change
#
# Mixed precision. Matmuls run in half precision, sums and norms stay in fp32, casts are added,
# and the host has more to launch.

# %%
foretell(f"whatif {TRACE} amp:dtype=bf16")

# %% [markdown]
# Read it from the top: the step before and after, the 80 % interval and peak memory. Then the
# bottleneck: GPU-bound before and after, so a faster CPU would bring nothing. Then the critical
# path. `-v` adds the assumptions.
#
# This trace belongs to a set in which every change was also made and timed. The step took 48.2
# ms, and 24.6 ms under autocast:

# %%
import json
from pathlib import Path

measured = json.loads(
    (Path(__file__).parents[2] / "benchmarks/measured/h200/truth.json").read_text()
)
for row in measured["rows"]:
    if row["model"] == "resnet18" and row["variant"] in ("base", "amp_bf16", "tf32", "cudagraph"):
        print(f"{row['variant']:10} {row['median_ms']:.1f} ms")

# %% [markdown]
# If you know how long the step takes without the profiler, say so; what the profiler cost is then
# known and not estimated.

# %%
foretell(f"whatif {TRACE} --real-ms 48.19 cuda-graph")

# %% [markdown]
# A CUDA graph takes the host out of the step. It gains almost nothing here, because the step is
# GPU-bound. That changes once the kernels are fast. **Changes compose, in any order:**

# %%
foretell(f"whatif {TRACE} --real-ms 48.19 amp:dtype=bf16 channels-last cuda-graph")

# %% [markdown]
# ## All of them
#
# `advise` tries everything that applies, ranks it, looks for the best combination, and prints the
# lines of PyTorch that make it.

# %%
foretell(f"advise {TRACE} --real-ms 48.19")

# %% [markdown]
# ## Eight GPUs that I do not have
#
# The same trace of one device, as one rank of eight. `--on` names the machine, so that the
# all-reduces have links to run on.

# %%
foretell(f"whatif {TRACE} --real-ms 48.19 data-parallel:ranks=8 --on dgx-h200")

# %% [markdown]
# And with a network a tenth as fast, to see when it would begin to matter:

# %%
foretell(f"whatif {TRACE} --real-ms 48.19 data-parallel:ranks=8 network:times=0.1 --on dgx-h200")

# %% [markdown]
# ## A change that has no name
#
# `faster`, `scale`, `remove` and `insert` are for ideas of your own. What if kernels for batch
# normalisation took a third of the time, with the host's work unchanged?

# %%
foretell(f"whatif {TRACE} scale:select=kind=kernel+op=native_batch_norm*,times=0.33")

# %% [markdown]
# ## From Python

# %%
import foretell as ft  # `foretell` is the command line on this page

step = ft.Step.from_trace(Path(__file__).parents[2] / TRACE, unprofiled=48.19e-3)
for change in ("tf32", "channels-last", "fused-optimizer"):
    print(repr(step.whatif(change)))

# %% [markdown]
# ## What to keep in mind
#
# * `foretell explain amp` prints the model behind a change, what it assumes and where it comes
#   from. [How accurate is it](../accuracy.md) has the errors, change by change.
# * A change whose interval reaches over the current step may not help at all.
# * Peak memory needs shapes in the trace.
# * `foretell report step.json.gz -o report.html` puts all of this on [one page](report.md).
