# %% [markdown]
# # Then do it
#
# A plan runs on stock PyTorch, and its measured step is printed beside the predicted one.
#
# This page needs PyTorch. It runs on two processes of one machine, without a GPU.

# %%
import json
import tempfile
from statistics import median

from click.testing import CliRunner
from shell import ROOT, foretell

from foretell.cli.main import foretell as program
from foretell.plan import Plan

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
foretell(f"run {SCRIPT} --plan dp=2,filter=2,tp=2 --device cpu")

# %% [markdown]
# ## Or let another program do it
#
# The same plan as settings of torchtitan, Megatron, DeepSpeed or PyTorch alone. What a program
# has no setting for is refused by name.

# %%
foretell("export dp=8,zero=3,micro_batch=2,global_batch=64 --to fsdp2")

# %%
foretell("export dp=2,tp=4,pp=4,micro_batch=1,global_batch=256,recompute=full --to megatron")

# %%
foretell("export dp=8,zero=3,micro_batch=2,global_batch=64 --to megatron")

# %% [markdown]
# ## Predicted beside measured
#
# `foretell run` predicts a step for the machine it is on before it takes one, and prints both with
# the interval and the load of the machine. For machines that are elsewhere:
#
#     foretell bench --no-ops -o here                         # this machine, as a cluster
#     foretell predict train.py --on here/cluster.toml --plan dp=2 -o predicted.graph
#     foretell run train.py --plan dp=2 -o out --predicted-ms T    # what predict said
#     foretell compare predicted.graph out                         # where they differ
#
# prints both and the error, then how much of the gap each task explains. `foretell run …
# --profile` also traces one more step, for `foretell replay`, `whatif` and `report`.
#
# ## Feed it back
#
#     foretell fit out --on here/cluster.toml -o learned.json
#     foretell predict train.py --on here/cluster.toml --plan dp=2,zero=1 \
#         --calibration learned.json
#
# A run shows what no data sheet has: how fast the cores and the network really are. `fit` reads
# how long compute, messages and optimizer step took, and calibrates predictions of other plans.
# Here are runs that were made on two cores with a load of fifteen, three of each plan
# (`benchmarks/fed_back.py`); only those of the first plan are fed back. Bench counts what a core
# does at best, not what others leave of it: most of what `fit` learns here is that.

# %%
FED = ROOT / "benchmarks/measured/fed_back"


def query(command: str, script: str, *more: str) -> dict:
    """What a command answers of a script, on the cluster that bench wrote."""
    workload = ["--workload", script] if command == "fit" else [script]
    line = [command, *more, *workload, "--on", str(FED / "bench/cluster.toml"), "--json"]
    return json.loads(CliRunner().invoke(program, line, catch_exceptions=False).stdout)


with tempfile.TemporaryDirectory() as folder:
    learned = f"{folder}/learned.json"
    runs = [str(path) for path in sorted(FED.glob("linear-*"))]
    query("fit", str(FED / "linear_256.py"), *runs, "-o", learned)
    print(f"{'plan':42} measured     before  after fit")
    for plan, steps in json.loads((FED / "steps.json").read_text())["linear"].items():
        script = str(FED / f"linear_{Plan.parse(plan).global_batch}.py")
        before = query("predict", script, "--plan", plan)["step_s"]
        after = query("predict", script, "--plan", plan, "--calibration", learned)["step_s"]
        took = 1e3 * median(steps)
        print(f"{plan:42} {took:5.0f} ms {1e3 * before:7.0f} ms {1e3 * after:7.0f} ms")

# %% [markdown]
# [Running a plan](../concepts/running.md) says which part of a plan runs on what, what is
# refused, and the messages when a rank fails, dies or hangs.
