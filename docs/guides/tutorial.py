# %% [markdown]
# # Ten minutes with your own script
#
# You have a training script. This page uses a small one, [`train.py`](../examples/train.py): a
# plain PyTorch loop, nothing of foretell in it. Put yours in its place; arguments for the script
# go behind `--`.
#
# On a machine with a GPU, leave out `--on`: the script is then profiled for a few steps. Without
# a GPU, or with `--on`, it runs on fake tensors until one of its own steps is recorded, and that
# step is priced for the GPU you name. Either way the script is not changed, and it is stopped
# once the step is known.

# %%
from shell import foretell

TRAIN = "docs/examples/train.py"

# %% [markdown]
# ## 1. What is slow, and what would help? (one minute)

# %%
foretell(f"advise {TRAIN} --on h100")

# %% [markdown]
# The first sentence is the answer. The table has every change that was tried, each with its 80 %
# interval. Below it, the bottleneck before and after the
# best change, and the lines of PyTorch that make the best combination.
#
# ## 2. One change, looked at closely (a minute)

# %%
foretell(f"whatif {TRAIN} amp compile --on h100 -v")

# %% [markdown]
# `foretell explain amp` prints the model behind a change and how accurate it was. To ask many
# questions of one step, keep it: `foretell capture train.py -o step.graph` (or `foretell profile
# train.py` on a GPU) writes a file that every command takes in place of the script.
#
# ## 3. Eight GPUs (two minutes)
#
# Every way to split the model over one machine, fastest first. The oracle prices thousands of
# layouts in closed form, from layers instead of single kernels; `predict` then simulates one. So
# the steps below differ from each other, and from the captured one above, by a percent or two.

# %%
foretell(f"oracle {TRAIN} --on dgx-h100 --gpus 1,8")

# %% [markdown]
# One layout in detail. `dp` is data parallel, `zero=1` shards the optimizer state; the fields are
# those of [a plan](../concepts/plans.md).

# %%
foretell(f"predict {TRAIN} --on dgx-h100 --plan dp=8,zero=1")

# %% [markdown]
# ## 4. Run it (three minutes)
#
# `foretell plan train.py --on dgx-h100 -o best.plan` searches all of it together and writes a
# plan. `foretell run train.py --plan best.plan` runs one on real ranks and lays the measured step
# beside the predicted one; [Running a plan](../concepts/running.md) says what a script needs for
# that. In a loop of your own it is one line:
#
# ```text
# model, optimizer = foretell.parallelize(model, optimizer, "best.plan")
# ```
#
# ## The same from Python

# %%
from pathlib import Path

import foretell as ft  # `foretell` is the command line on this page

step = ft.Step.from_script(Path(__file__).parents[1] / "examples/train.py", "h100")
print(repr(step))
print(repr(step.whatif("amp", "compile")))

# %% [markdown]
# ## Next
#
# * [Will it fit?](fit.md) · [How many GPUs, what cost, by when?](cost.md) ·
#   [Llama-70B on 64 H100](llama70b.md) · [Why is my step slow?](slow.md) ·
#   [Best bucket size](buckets.md) · [Mixed GPUs](mixed.md)
# * `foretell report train.py -o report.html` puts the step on [one page](report.md).
# * [Python](../reference/python.md) lists every stable name.
