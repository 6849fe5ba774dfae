# %% [markdown]
# # How to use an odd mix of GPUs and links?
#
# Two V100, four 1080 Ti and two P100, on Ethernet. Split evenly, the slowest device sets the
# pace; leave the slow ones out, and half of what you own stands idle.

# %%
from shell import foretell

foretell("show heterog-8")

# %% [markdown]
# A mix of your own is a [file of a few lines](../reference/clusters.md): nodes, the devices in
# each, and what joins them.
#
# ## Search a placement
#
# The planner `placement` decides for each group of a model's ops on which devices it runs, how
# many samples each of them takes, and how its gradients are brought together: all-reduce, a
# parameter server, or factors. What people do today are its baselines.

# %%
import foretell as ft  # `foretell` is the command line on this page

PLANNER = "placement:playouts=20,prior=learned,polish=2000"
found = ft.plan("vgg16:batch=32", "heterog-8", PLANNER)
for name, seconds in sorted(found.baselines.items(), key=lambda item: item[1]):
    print(f"{name:24} {1e3 * seconds:6.0f} ms   {seconds / found.predicted:.2f} ×")

# %% [markdown]
# `even-allreduce` and `horovod` are data parallelism as it comes; `proportional` gives faster
# devices more samples; `hap`, `flexflow` and `heterog` follow the papers of those names, on our
# prices.

# %%
print(f"{1e3 * found.predicted:.0f} ms a step; bound {1e3 * found.bound:.0f} ms")
print(*found.notes, sep="\n")

# %% [markdown]
# The convolutions use all devices with unequal shares of the samples.
# The large linear layers, which are most of the parameters and hardly any of the work, stay on
# the two V100, so that their gradients cross no slow link. The last line answers the question
# that comes before all others: is the mix worth it, against the best devices of one kind alone?
#
# ## One set of devices
#
# A plan like this one runs, layer by layer where its rows say. `runs=yes` keeps to what any model
# can do, whether it can be cut or not: one set of devices, with a share of the samples and a way
# of synchronising for each parameter.

# %%
runs = ft.plan("vgg16:batch=32", "heterog-8", f"{PLANNER},runs=yes")
gain = runs.baseline / runs.predicted
print(f"{1e3 * runs.predicted:.0f} ms a step, {gain:.2f} × as fast as an even split")
print(*runs.notes, sep="\n")

# %% [markdown]
# Two of its fields say all that a script needs: how many samples each rank takes, and on which
# device of the cluster it runs.

# %%
print("shares", *runs.plan.shares)
print("devices", *runs.plan.placement)

# %% [markdown]
# `foretell plan vgg16:batch=32 --on heterog-8 --with placement:runs=yes -o mixed.plan` writes the
# same as a file. `foretell run train.py --plan dp=8,shares=…` trains with such shares; the rest
# of the plan names parameters of the built-in model, which a script of your own calls something
# else.
#
# ## What to keep in mind
#
# * A mix is as good as its links. Where the mix does not pay, the note says so with the figure.
# * Unequal shares are weighted when gradients are summed, so that the result is that of one
#   device with the whole batch.
# * For a pipeline on mixed devices write the stages' times into a [placement](order.md).
# * [Placements](../concepts/placement.md) has the method, its bounds and its figures.
