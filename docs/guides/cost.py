# %% [markdown]
# # How many GPUs, what does it cost, and when is it done?
#
# Llama-3.1-8B on 60 billion tokens within a week, on H100 or A100, at the prices of
# [a file](../examples/prices.toml):

# %%
from shell import foretell

PRICES = "--prices docs/examples/prices.toml"
foretell(f"plan llama-3.1-8b --on h100+a100-80 --tokens 60B --days 7 --gpus 8..256 {PRICES}")

# %% [markdown]
# The cheapest offer that is done in time comes first; goodput is the share of the run that is left
# after failures and restarts. `-o best.plan` writes its plan. Sequences have 4096 tokens here;
# `llama-3.1-8b:seq=8192` has others.
#
# The same by strategy, for one kind of GPU: `--epoch` is the number of samples to train on, and
# `--batch` keeps the batch the same at every scale.

# %%
RUN = "--batch 1024 --epoch 14648437 --price 2.5"
foretell(f"oracle llama-3.1-8b --on dgx-h100 --gpus 8..128 {RUN}")

# %% [markdown]
# Read the second table: days against cost, one row for each number of GPUs. Where the last GPUs
# save little time for much money, the lines below the tables say so.
#
# In Python, "the cheapest that is done within a week":

# %%
import foretell as ft  # `foretell` is the command line on this page

WEEK = 7 * 86400
scaling = ft.oracle(
    "llama-3.1-8b", "dgx-h100", gpus="8..64", batch=1024, epoch=14_648_437, price=2.5
)
rows = [row for row in scaling.records() if row["fits"] and row["epoch_s"] <= WEEK]
best = min(rows, key=lambda row: row["money_per_epoch"])
print(best["gpus"], "GPUs,", f"{best['epoch_s'] / 86400:.1f} days,", best["plan"])
