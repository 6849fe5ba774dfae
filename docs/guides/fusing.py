# %% [markdown]
# # Which ops to fuse, and which gradients to send together?
#
# A compiler fuses ops to save memory traffic; data-parallel training joins gradients into
# messages to save latency. Each choice spoils the other: a fused backward delays the gradients in
# it, and a gradient that waits for its neighbours leaves too late to be hidden. The planner
# `fusion` decides both together.

# %%
import foretell
from foretell.cluster import load as machines

MODEL, CLUSTER = "vgg19:batch=32", machines("disco-a")
print(CLUSTER)

# %% [markdown]
# ## Baselines
#
# Without a planner: nothing fused, ops fused alone, gradients bucketed alone, the one after the
# other, DDP's buckets of 25 MiB, and the compiler's fusions with DDP's or with the best buckets.

# %%
found = foretell.plan(MODEL, CLUSTER, "fusion")
for name, seconds in sorted(found.baselines.items(), key=lambda item: item[1]):
    print(f"{name:16} {1e3 * seconds:.1f} ms")

# %% [markdown]
# ## Both together

# %%
gain = found.baseline / found.predicted - 1
print(f"{1e3 * found.predicted:.1f} ms, {gain:.1%} faster than the best of those")
print(f"nothing in this space can be below {1e3 * found.bound:.1f} ms")
print(*found.notes, sep="\n")

# %% [markdown]
# The last note has two lower bounds: with these kernels and the best possible buckets, and with
# communication fully overlapped. Both are close to the plan, so searching on would gain little.
#
# A gain of a percent or two is what this model and these machines have to give over a compiler
# with DDP. It is more where messages are slow beside compute, and never less than nothing: every
# baseline is among the candidates.
#
# ## What it decided
#
# The plan is plain data. Messages are lists of parameters, in the order they leave:

# %%
for message in found.plan.buckets[:4]:
    print(message)
print("…", len(found.plan.buckets), "messages in all")

# %% [markdown]
# Regions are the ops that become one kernel; a name with a star is recomputed instead of
# being kept:

# %%
for region in found.plan.regions[:4]:
    print(region)
print("…", len(found.plan.regions), "regions in all")

# %% [markdown]
# ## From the command line, and run
#
#     foretell plan vgg19:batch=32 --on disco-a --with fusion -o vgg.plan
#
# plans a built-in model. For a script of your own, one that defines `model()`, `batch()` and
# `loss`, names have to be those of its parameters and ops, so capture first what one rank runs:
#
#     foretell capture train.py --ranks 2 -o step.graph
#     foretell plan step.graph --on dgx-a100:gpus=2 --with fusion -o best.plan
#     foretell run train.py --plan best.plan
#
# Messages become buckets of our own on gradient hooks, regions are compiled one by one
# ([how](../concepts/fusion.md#run)); `fusion:runs=yes` asks for buckets alone. Where ranks run on a
# CPU, capture with `--kernels-of cpu`.
#
# ## What to keep in mind
#
# * [Fusion](../concepts/fusion.md) has the method and its figures on the paper's models and
#   clusters.
# * Prices of fused regions come from a learned model where the device has one, otherwise from a
#   formula ([Fused ops](../concepts/fused.md)).
# * The search stops after 4 000 evaluations by default (`fusion:evaluations=20000`).
#   What it finds within its evaluations does not depend on the machine.
