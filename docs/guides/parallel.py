# %% [markdown]
# # Which parallelism fits my model and my machines?
#
# You have a model and a quotation for some machines, and nothing has run yet. Which layout is
# fastest, does it fit into memory, and where does it stop scaling?
#
# A model is a spec such as the one below ([Workloads](../concepts/workloads.md) lists the
# families), a captured graph, or `train.py:make`. A cluster is a preset or a file of your own.

# %%
from shell import foretell

MODEL = "llama:layers=32,hidden=4096,heads=32,seq=4096,vocab=32000"

# %% [markdown]
# ## One layout
#
# Seven billion parameters on eight A100, plain data parallel, the way a small model would be
# trained:

# %%
foretell(f"predict {MODEL} --on dgx-a100 --plan dp=8,micro_batch=1,global_batch=64")

# %% [markdown]
# It does not fit. The answer says by how much, what the memory holds, and what would make it fit:

# %%
foretell(f"predict {MODEL} --on dgx-a100 --plan dp=8,zero=1,micro_batch=1,global_batch=64")

# %% [markdown]
# The 80 % interval holds four of five measured steps. Degrees that do not multiply to the number of
# devices are refused with every factor named:

# %%
foretell(f"predict {MODEL} --on dgx-a100 --plan dp=4,tp=4,micro_batch=1,global_batch=64")

# %% [markdown]
# ## Every strategy against scale
#
# The oracle prices all products of degrees, micro-batches, recompute and sharding at each scale.
# `--batch` keeps the samples of a step (strong scaling), `--per-gpu` those of a device (weak
# scaling).

# %%
foretell(f"oracle {MODEL} --on dgx-a100 --gpus 8,64,512 --batch 512")

# %% [markdown]
# Read three things: which strategy leads at which scale, the bottleneck of each (the last column),
# and the lines below the table: the time that more devices save, and what a sample then costs.
#
# ## The best plan
#
# `plan` looks for the best layout, simulates the leaders, and says what it was compared with. From
# Python, because the command also prints how long it searched:

# %%
import foretell as ft  # `foretell` is the command line on this page

found = ft.plan(MODEL, "dgx-a100:gpus=64", "oracle:batch=512")
print(found.plan)
print(f"{found.predicted:.2f} s a step, bound {found.bound:.2f} s, {found.evaluations} layouts")
for name, seconds in sorted(found.baselines.items(), key=lambda item: item[1])[:6]:
    print(f"  {name:22} {seconds:.2f} s")

# %% [markdown]
# Layouts that are nearer to each other than their 80 % intervals are a draw: measure those, not all
# of them.
#
# ## Images
#
# Networks of images have other ways to be split: by pixels, by filters, by channels. A batch
# cannot be cut below one sample a device, and that is where they begin:

# %%
foretell("oracle cosmoflow:batch=1 --on abci --gpus 4,64 --batch 4")

# %% [markdown]
# ## What to keep in mind
#
# * `foretell explain fsdp`, `explain tensor` … say how each strategy is modelled and where that
#   ends.
# * `foretell export best.plan --to torchtitan` (or `megatron`, `deepspeed`, `fsdp2`) writes the
#   plan as another program's settings; [Then do it](doing.md) runs it here.
# * Ratios between layouts are nearer the truth than absolute times: [How accurate is
#   it](../accuracy.md) has both.
