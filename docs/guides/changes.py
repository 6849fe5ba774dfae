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
# Before any question, play the trace unchanged. If that is not what was measured, nothing that
# follows can be.

# %%
foretell(f"replay {TRACE}")

# %% [markdown]
# ## One change
#
# Mixed precision. Products run in half precision, sums and norms stay in fp32, casts are added,
# and the host has more to launch.

# %%
foretell(f"whatif {TRACE} amp:dtype=bf16")

# %% [markdown]
# Read it from the top: the step before and after, the range that holds four times in five, and
# peak memory. Then who holds the step up: here the device, before and after, so a faster CPU
# would bring nothing. Then the critical path. Last, what was taken for granted.
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
# A CUDA graph takes the host out of the step. It gains almost nothing here, because the device,
# not the host, holds the step up. That changes once the kernels are fast. **Changes compose, in
# whatever order they are written:**

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
# ## A change nobody has named
#
# `faster`, `scale`, `remove` and `insert` are for the idea you have and we do not. What if
# somebody wrote kernels for batch normalisation that take a third of the time, with the host's
# work as it is?

# %%
foretell(f"whatif {TRACE} scale:select=kind=kernel+op=native_batch_norm*,times=0.33")

# %% [markdown]
# ## From Python

# %%
from foretell.baseline import unprofiled
from foretell.trace import read
from foretell.whatif import Setting, applied, parse

step = unprofiled(read(Path(__file__).parents[2] / TRACE), 48.19e-3)
for spec in ("tf32", "channels-last", "fused-optimizer"):
    after = applied([parse(spec)], step.graph, Setting())
    print(f"{spec:16} {1e3 * step.predicted(after):.1f} ms")

# %% [markdown]
# ## What to keep in mind
#
# * `foretell explain amp` prints the model behind a change, what it assumes and where it comes
#   from. [How accurate is it](../accuracy.md) has the errors, change by change.
# * A change whose range reaches over the present step may not help at all.
# * Peak memory needs shapes in the trace.
# * `foretell report step.json.gz -o report.html` puts all of this on [one page](report.md).
