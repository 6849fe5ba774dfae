# %% [markdown]
# # In which order should the pieces of my pipeline run?
#
# A placement says which part of a model runs where. It leaves open when: 1F1B is one answer, good
# for one placement. A schedule for *any* placement, training or inference, under a memory limit,
# is a search, and here it also says how far from the best it can be.

# %%
from foretell.search.schedule import read, schedule, shape
from foretell.search.schedule.schedule import text

found = schedule(shape("v:devices=4"), micro_batches=8)
print(found, text(found), sep="\n")

# %% [markdown]
# One stage a device: the answer is 1F1B, and it is proven to be the least. Devices are rows,
# columns are time, digits are forward passes of a micro-batch, letters backward passes.
#
# ## Less memory
#
# The first device holds four micro-batches at once. If it can hold three:

# %%
tight = schedule(shape("v:devices=4"), micro_batches=8, memory=3)
print(
    f"{tight.per_micro_batch:.3f} a micro-batch, proven: {tight.proven}; {tight.makespan:g} in all"
)

# %% [markdown]
# Sixteen thirds: a pattern of three micro-batches, which no schedule with a name has.
#
# ## Embeddings that need all devices
#
# A large embedding is sharded over every device and stops them all, on the way there and on the
# way back (`m`). No schedule with a name has such blocks:

# %%
found = schedule(shape("m:devices=4"), micro_batches=8, memory=6)
print(found, text(found), sep="\n")

# %% [markdown]
# ## Beside the schedules with names

# %%
from foretell.report.words import table
from foretell.search.schedule.find import HEADER, compare

rows = compare(shape("v:devices=4,backward=2,split=yes"), micro_batches=8)
print(table(HEADER, [row.cells() for row in rows if row.schedule is not None]))

# %% [markdown]
# Those that do not fit the placement are left out.
#
# ## A placement of your own
#
# Blocks, what they hold, and what waits for what. Here a small vision tower on device 0 feeds a
# language model on devices 0 to 2:

# %%
placement = {
    "name": "tower", "ndevs": 3, "mode": "train",
    "blocks": [
        {"id": 0, "kind": "F", "devices": [0], "time": 1, "mem": 1},
        {"id": 1, "kind": "F", "devices": [0], "time": 1, "mem": 1},
        {"id": 2, "kind": "F", "devices": [1], "time": 2, "mem": 1},
        {"id": 3, "kind": "F", "devices": [2], "time": 2, "mem": 1},
        {"id": 4, "kind": "B", "devices": [2], "time": 4, "mem": -1},
        {"id": 5, "kind": "B", "devices": [1], "time": 4, "mem": -1},
        {"id": 6, "kind": "B", "devices": [0], "time": 2, "mem": -1},
        {"id": 7, "kind": "B", "devices": [0], "time": 2, "mem": -1},
    ],
    "deps": [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]],
}  # fmt: skip
found = schedule(read(placement), micro_batches=6, memory=6)
print(found, text(found), sep="\n")

# %% [markdown]
# ## Run it
#
# The order becomes a list of actions a rank, which PyTorch's pipeline runtime executes as it is:

# %%
from foretell.search.schedule.schedule import actions

for rank, row in enumerate(actions(schedule(shape("v:devices=4"), micro_batches=4))):
    print(rank, *row)

# %% [markdown]
# From the command line: `foretell schedule v:devices=4 -n 8 -m 3`, with `-o order.svg` for a
# drawing. [Schedules](../concepts/schedules.md) has the method and its figures.
