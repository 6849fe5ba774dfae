"""Scripts that nobody changed train under a plan as they do by themselves."""

import math
import multiprocessing
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.pytorch.deploy.ranks import on_ranks
from tests.pytorch.intake.table import SCRIPTS, SLOW, TABLE

PLANS = ("dp=2", "dp=2,zero=3", "tp=2")
STEPS = 6
CASES = {case.name: case for case in (*TABLE, *SLOW) if case.ranks == 1}


class _Enough(BaseException):
    pass


def trained(name, plan, is_double=False):
    """Losses, parameters and gradients of the first steps of a script."""
    import torch

    from foretell.plan import Plan
    from foretell.pytorch.deploy.unedited import Training, Wanted
    from foretell.pytorch.intake.child import run, single_rank
    from foretell.pytorch.intake.request import Script

    torch.set_default_dtype(torch.float64 if is_double else torch.float32)
    case = CASES[name]
    script = Script(name if case.is_module else str(SCRIPTS / name), case.args, case.is_module)
    sys.path.insert(0, "")
    multiprocessing.current_process()._config["daemon"] = False  # loaders have workers
    os.environ["TENSORBOARD_LOGDIR"] = ""
    single_rank(script)
    found = {}

    def enough():
        if not found:  # a script may catch whatever is raised in it
            found["parameters"] = {n: p.tolist() for n, p in job.parameters().items()}
            found["losses"] = [float(x) for x in job.losses]
        raise _Enough

    def fail(error):
        found["refused"] = error.message
        raise _Enough

    with tempfile.TemporaryDirectory() as here:
        os.chdir(SCRIPTS if case.is_module else here)
        job = Training(
            Plan.parse(plan) if plan else None, Wanted(STEPS, kept=2, is_still=True), enough, fail,
            scratch=Path(tempfile.mkdtemp()),
        )  # fmt: skip
        with open("/dev/null", "w") as sys.stdout:
            try:
                with job.open():
                    run(script, job)
            except (_Enough, SystemExit):
                pass
            finally:
                sys.stdout = sys.__stdout__
        os.chdir("/")
    grads = [{n: g.double().tolist() for n, g in step.items()} for step in job.gradients]
    return found | {"gradients": grads, "notes": job.notes, "made": len(job.made)}


def off(wanted, mine, least=0.0):
    """How far values, or lists of such, are apart, relative to the largest."""
    xs, ys = flat(wanted), flat(mine)
    assert len(xs) == len(ys)
    scale = max([abs(x) for x in xs] + [least, 1e-12])
    return max((abs(x - y) / scale for x, y in zip(xs, ys, strict=True)), default=0.0)


def flat(value):
    return [x for row in value for x in flat(row)] if isinstance(value, list) else [value]


REFUSED = {("optimizer_in_backward.py", plan): "inside the backward" for plan in PLANS} | {
    ("lbfgs.py", plan): "one vector" for plan in PLANS[1:]
}
ROUGH = {"accumulation_scaler.py": 2e-2, "custom_optimizer.py": 5e-2, "image_workers.py": 2e-2}
ROUGH |= {"lbfgs.py": 1e-5}


# Some gradients of the first step are what fp32 leaves of zero, and Adam makes whole steps of their
# signs: in double precision it shows whether a plan trains as one process does.
DOUBLE = {"graph_network.py": ("tp=2",)}
UNCALLED = "functional.py"  # its model is never called as a module: `run` says so
LONG = ("transformer_compiled.py", "torchtitan_style.py", "diffusion.py")  # seconds of torch alone
EVERY = [
    pytest.param(
        name,
        plan,
        marks=() if (k + place) % len(PLANS) == 0 and name not in LONG else pytest.mark.slow,
    )
    for k, name in enumerate(n for n in CASES if n != UNCALLED)
    for place, plan in enumerate(PLANS)
]


SPLIT = [("transformer_compiled.py", "pp=2"), ("torchtitan_style.py", "pp=2")]
SPLIT += [("hf_trainer.py", "pp=2"), ("hf_trainer.py", "cp=2")]
SPLIT += [("transformer_compiled.py", f"pp=2,recompute={how}") for how in ("full", "selective")]
EVERY += [pytest.param(*one, marks=pytest.mark.slow if k else ()) for k, one in enumerate(SPLIT)]


@cache
def alone_of(name, is_double=False):
    """What a script does by itself."""
    (found,) = on_ranks(1, trained, name, "", is_double, limit=240)
    return found


def test_a_script_without_blocks_is_refused_stages_by_name():
    for rank in on_ranks(2, trained, "plain_loop.py", "pp=2"):
        assert "pp: `0` gives (8, 32)" in rank["refused"]


def test_a_script_that_calls_no_module_deploys_nothing():
    assert [rank["made"] for rank in on_ranks(2, trained, UNCALLED, "dp=2", limit=240)] == [0, 0]


@pytest.mark.parametrize(("name", "plan"), EVERY)
def test_a_script_trains_as_it_does_by_itself(name, plan):
    if not CASES[name].is_here:
        pytest.skip(f"{CASES[name].needs} is not installed")
    is_double = plan in DOUBLE.get(name, ())
    ranks = on_ranks(2, trained, name, plan, is_double, limit=240)
    if (name, plan) in REFUSED:
        assert all(REFUSED[name, plan] in rank["refused"] for rank in ranks)
        return
    alone = alone_of(name, is_double)
    assert len(alone["losses"]) == STEPS
    assert not any(map(math.isnan, alone["losses"]))
    for rank in ranks:
        assert "refused" not in rank, rank["refused"]
        assert rank["made"], "nothing was deployed"
        compare(alone, rank, ROUGH.get(name), 1e-6 if is_double else 1.0)


def compare(alone, rank, rough, digit=1.0):
    """The first loss to 1e-6 and gradient to 1e-5; from then on roundings are carried on.

    `digit`: of the format that all is computed in, relative to that of fp32.

    An adaptive optimizer's first step is that of a sign, which a rounding may turn.
    """
    assert off(alone["losses"][0], rank["losses"][0]) <= (rough or digit * 1e-6)
    assert off(alone["losses"], rank["losses"]) <= (rough or digit * 1e-4)
    for step, (mine, wanted) in enumerate(zip(rank["gradients"], alone["gradients"], strict=True)):
        assert mine.keys() == wanted.keys()
        least = 0.05 * max(map(abs, flat([wanted[n] for n in wanted])), default=0.0)
        for name in wanted:
            limit = math.inf if rough else digit * (1e-5, 1e-3)[step]  # bf16: losses alone
            assert off(wanted[name], mine[name], least) <= limit, name
        for name in [n for n in wanted if not rough and max(map(abs, flat(wanted[n]))) > least]:
            assert off(alone["parameters"][name], rank["parameters"][name]) <= digit * 1e-3, name
