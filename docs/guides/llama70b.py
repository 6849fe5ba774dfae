# %% [markdown]
# # Which FSDP, TP and PP for Llama-70B on 64 H100?
#
# Eight DGX H100, 512 sequences of 4096 tokens a step (`llama-3.1-70b:seq=8192` for longer ones).

# %%
from shell import foretell

foretell("oracle llama-3.1-70b --on dgx-h100 --gpus 64 --batch 512")

# %% [markdown]
# The fastest layout of each strategy, its memory and its bottleneck. To search for one plan and
# write it to a file:

# %%
foretell("plan llama-3.1-70b --on dgx-h100:nodes=8 --with oracle:batch=512 -v")

# %% [markdown]
# `-o best.plan` writes it; `foretell export best.plan --to megatron` (or torchtitan, deepspeed,
# fsdp2) turns it into that program's settings. The default planner, `--with joint`, also searches
# placements, fusion and gradient buckets, and takes longer.
#
# A layout you have in mind, against the one found:

# %%
foretell(
    "predict llama-3.1-70b --on dgx-h100:nodes=8 "
    "--plan dp=64,zero=3,micro_batch=1,recompute=selective,global_batch=512"
)
