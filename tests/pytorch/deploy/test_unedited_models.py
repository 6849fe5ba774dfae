"""Models that say nothing of how they split, under tp, sp, cp, ep and pp: as one process trains."""

import importlib.util

import pytest

pytest.importorskip("torch")

from tests.pytorch.deploy.ranks import on_ranks
from tests.pytorch.deploy.unedited_models import MODELS

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
SPLITS = (
    "cp=2,tp=2,sp=yes",
    "tp=2",
    "tp=2,sp=yes",
    "cp=2",
    "dp=2,tp=2,sp=yes",
    "cp=2,tp=2",
    "dp=2,tp=2,zero=2",
)
EXPERTS = ("dp=2,ep=2", "dp=4,ep=2", "dp=2,ep=2,zero=3", "dp=2,ep=2,pp=2,micro_batch=2,zero=1")
EXPERTS += ("dp=2,ep=2,tp=2", "dp=2,ep=2,tp=2,sp=yes,zero=1", "dp=2,ep=2,tp=2,zero=3")
EXPERTS += ("dp=2,ep=2,cp=2", "dp=4,ep=2,tp=2,zero=2", "dp=2,ep=2,tp=2,pp=2,micro_batch=2")
EXPERTS += ("dp=2,ep=2,tp=2,cp=2,sp=yes",)
PIPELINES = ("pp=2,micro_batch=2", "pp=4,micro_batch=4,schedule=gpipe", "dp=2,pp=2,micro_batch=2")
PIPELINES += ("pp=2,micro_batch=2,schedule=interleaved,chunks=2", "pp=2,tp=2,micro_batch=4")
OWN = ("grouped", "tied", "packed", "routed")
THEIRS = ("hf-llama", "hf-qwen2", "hf-mixtral", "hf-gpt2")
MIXED = ("routed", "hf-mixtral")  # of experts
RUN = [(name, plan) for name in (*OWN, *THEIRS) for plan in (*SPLITS, *PIPELINES)]
RUN += [(name, plan) for name in MIXED for plan in EXPERTS]
FAST = {("grouped", "cp=2"), ("packed", "tp=2"), ("routed", "dp=2,ep=2")}
FAST |= {
    ("routed", "dp=2,ep=2,tp=2"),
    ("routed", "dp=2,ep=2,cp=2"),
    ("packed", "pp=2,micro_batch=2"),
    ("tied", "tp=2,sp=yes"),
    ("routed", "tp=2"),
    ("packed", "dp=2,tp=2,zero=2"),
}
REFUSED = {
    ("cnn", "cp=2"): "no block of Convolving",
    ("lstm", "tp=2,sp=yes"): "no block of Recurrent",
    ("lstm", "pp=2"): "for 2 stages",
    ("grouped", "cp=2,pp=2,micro_batch=4"): "no block of Grouped",
    ("grouped", "dp=2,ep=2"): "holds a matrix for each expert",
    ("routed", "dp=2,ep=2,shares=6+2"): "beside uneven shares",
    # beside a pipeline only nn.Linear is split; these have layers of their own
    ("packed", "pp=2,tp=2,micro_batch=4"): "no layer of Packed is known to split",
    ("hf-gpt2", "pp=2,tp=2,micro_batch=4"): "no layer of GPT2LMHeadModel is known to split",
}
RUN = [one for one in RUN if one not in REFUSED]


def verdict_of(name, text):
    """How far a plan's first steps are from one process, or why it is refused."""
    import torch

    from foretell.errors import InputError
    from foretell.plan import Plan
    from foretell.pytorch.deploy.verify import Case, verify

    torch.set_num_threads(1)
    make, batch, loss = MODELS[name]
    plan = Plan.parse(text)

    def parts(step):
        x, y = batch(step)
        each = zip(x.chunk(plan.dp), y.chunk(plan.dp), strict=True)
        return [((a,), b) for a, b in each]

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    try:
        found = verify(Case(make, sgd, parts, loss), plan, steps=2)
    except InputError as error:
        return error.message
    return [str(d) for d in found.differences], found.loss_off, found.gradient_off


def ranks_of(text):
    from foretell.plan import Plan

    return Plan.parse(text).ranks


def _case(name, plan):
    is_slow = (name, plan) not in FAST
    return pytest.param(name, plan, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("name", "plan"), [_case(*one) for one in RUN])
def test_it_trains_as_one_process_does(name, plan):
    if name in THEIRS and not HAS_TRANSFORMERS:
        pytest.skip("transformers is not installed")
    for found in on_ranks(ranks_of(plan), verdict_of, name, plan):
        assert not isinstance(found, str), found
        assert not found[0], found
        assert found[1] <= 1e-6
        assert found[2] <= 1e-5


@pytest.mark.parametrize(("name", "plan"), REFUSED)
def test_it_is_refused_by_name(name, plan):
    if name in THEIRS and not HAS_TRANSFORMERS:
        pytest.skip("transformers is not installed")
    for found in on_ranks(ranks_of(plan), verdict_of, name, plan):
        assert isinstance(found, str), found
        assert REFUSED[name, plan] in found
