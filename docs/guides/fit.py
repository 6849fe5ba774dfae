# %% [markdown]
# # Will it fit?
#
# Ask `predict` for one layout. The first sentence says whether it fits; if not, by how much it is
# out of memory and the smallest change that makes it fit.

# %%
from shell import foretell

foretell("predict llama-3.1-8b --on h100 --plan dp=1,micro_batch=1")

# %% [markdown]
# Follow the advice, or go to more GPUs. `zero=3` is FSDP: parameters, gradients and optimizer state
# sharded over the eight.

# %%
foretell("predict llama-3.1-8b --on dgx-h100 --plan dp=8,zero=3,micro_batch=1,global_batch=64 -v")

# %% [markdown]
# The same in Python, for a table of your own:

# %%
import foretell as ft  # `foretell` is the command line on this page

for zero in (0, 1, 2, 3):
    found = ft.predict("llama-3.1-8b", "dgx-h100", dp=8, zero=zero, micro_batch=1, global_batch=64)
    print(f"zero={zero}  {found.peak / 2**30:5.1f} GiB  fits: {found.fits}")

# %% [markdown]
# Your own model: name the script (`train.py`), a Hugging Face `config.json`, or a captured step in
# place of `llama-3.1-8b`. How memory is counted: [Plans](../concepts/plans.md). How far off it
# is: [accuracy](../accuracy.md).
