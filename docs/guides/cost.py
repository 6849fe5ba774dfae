# %% [markdown]
# # How many GPUs, what does it cost, and when is it done?
#
# Llama-3.1-8B on 60 billion tokens: 7.3 million samples of 8192 tokens, 1024 to a step, H100
# machines at 2.50 an hour a GPU. `--epoch` is the number of samples to train on, `--batch` keeps
# the batch the same at every scale.

# %%
from shell import foretell

foretell("oracle llama-3.1-8b --on dgx-h100 --gpus 8..256 --batch 1024 --epoch 7324218 --price 2.5")

# %% [markdown]
# Read the second table: days against cost, one row for each number of GPUs. Prices that differ by
# machine go into a file: `--prices prices.toml` with lines such as `h100 = 2.5`. Where the last
# GPUs save little time for much money, the lines below the tables say so.
#
# In Python, "the cheapest that is done within a week":

# %%
import foretell as ft  # `foretell` is the command line on this page

WEEK = 7 * 86400
scaling = ft.oracle(
    "llama-3.1-8b", "dgx-h100", gpus="8..64", batch=1024, epoch=7_324_218, price=2.5
)
rows = [row for row in scaling.records() if row["fits"] and row["epoch_s"] <= WEEK]
best = min(rows, key=lambda row: row["money_per_epoch"])
print(best["gpus"], "GPUs,", f"{best['epoch_s'] / 86400:.1f} days,", best["plan"])
