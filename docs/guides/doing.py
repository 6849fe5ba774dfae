# %% [markdown]
# # Then do it
#
# A plan is not a picture. It runs on stock PyTorch, and the step that was measured is laid beside
# the one that was foretold.
#
# This page needs PyTorch. It runs on two processes of one machine, without a GPU.

# %%
import json
import tempfile

from click.testing import CliRunner
from shell import ROOT, foretell

from foretell.cli.main import foretell as program

SCRIPT = "src/foretell/samples/train.py"

# %% [markdown]
# ## The script
#
# Nothing is rewritten. A script defines `model()` and `batch(rank, size)`; a loss and an
# optimizer if the usual ones do not fit. This one comes with the package:

# %%
text = (ROOT / SCRIPT).read_text()
print(text[text.index("def model") :].rstrip())

# %% [markdown]
# ## Run a plan
#
# `foretell run train.py --plan dp=2` starts two ranks through torchrun, warms up, measures, and
# prints what a step took. What it took differs from machine to machine, so this page shows what
# does not: the loss of each step, which is the same however the work was split.


# %%
def losses(plan: str) -> list[float]:
    """The losses of three steps under a plan."""
    line = f"run {ROOT / SCRIPT} --plan {plan} --steps 3 --warmup 0 --device cpu --json"
    with tempfile.TemporaryDirectory() as folder:
        result = CliRunner().invoke(program, [*line.split(), "-o", folder], catch_exceptions=False)
    return [round(loss, 5) for loss in json.loads(result.stdout)["losses"]]


print("dp=2           ", losses("dp=2"))
print("pp=2           ", losses("pp=2,micro_batch=16"))

# %% [markdown]
# A plan that cannot be run is refused before anything starts, with the reason:

# %%
foretell(f"run {SCRIPT} --plan dp=2,ep=2 --device cpu")

# %% [markdown]
# ## Or let another program do it
#
# The same plan in the words of torchtitan, Megatron, DeepSpeed or PyTorch alone. What a program
# has no words for is refused by name.

# %%
foretell("export dp=8,zero=3,micro_batch=2,global_batch=64 --to fsdp2")

# %%
foretell("export dp=2,tp=4,pp=4,micro_batch=1,global_batch=256,recompute=full --to megatron")

# %%
foretell("export dp=8,zero=3,micro_batch=2,global_batch=64 --to megatron")

# %% [markdown]
# ## Predicted beside measured
#
#     foretell predict MODEL --on CLUSTER --plan best.plan
#     foretell run train.py --plan best.plan --predicted-ms T           # what predict said
#
# prints both and the error. `foretell run … --profile` also writes a trace of one more step,
# which `foretell replay`, `whatif` and `report` read: that closes the circle.
#
# [Running a plan](../concepts/running.md) says which part of a plan runs on what, what is
# refused, and what is said when a rank fails, dies or hangs.
