"""Predicts how a DNN training step will run, searches for a faster way to run it, and runs it.

    step = foretell.Step.from_trace("step.json.gz")
    step.whatif("amp", "compile")
    best = foretell.plan("llama-3.1-8b", "dgx-h100:nodes=2")

Names are loaded when first used: importing the package is quick and never imports torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell import profile as profile
    from foretell.api import AdviceResult as AdviceResult
    from foretell.api import ModelSchedule as ModelSchedule
    from foretell.api import PlanResult as PlanResult
    from foretell.api import Prediction as Prediction
    from foretell.api import ScalingResult as ScalingResult
    from foretell.api import ScheduleResult as ScheduleResult
    from foretell.api import Simulation as Simulation
    from foretell.api import Step as Step
    from foretell.api import WhatIfResult as WhatIfResult
    from foretell.api import capture as capture
    from foretell.api import oracle as oracle
    from foretell.api import plan as plan
    from foretell.api import predict as predict
    from foretell.api import schedule as schedule
    from foretell.cluster import Cluster as Cluster
    from foretell.cost.price import price as price
    from foretell.errors import ForetellError as ForetellError
    from foretell.graph import Builder as Builder
    from foretell.graph import Graph as Graph
    from foretell.graph import concat as concat
    from foretell.graph import load as load
    from foretell.graph import parse as parse
    from foretell.graph import replicate as replicate
    from foretell.graph import save as save
    from foretell.plan.plan import Plan as Plan
    from foretell.pytorch.deploy.apply import deploy as deploy
    from foretell.pytorch.deploy.apply import parallelize as parallelize
    from foretell.simulate.engine import simulate as simulate
    from foretell.simulate.timeline import Timeline as Timeline
    from foretell.trace import read as read

__version__ = "0.1.0"

# Public names and the module each lives in.
_PUBLIC = {
    "AdviceResult": "foretell.api.step",
    "Builder": "foretell.graph",
    "Cluster": "foretell.cluster",
    "ForetellError": "foretell.errors",
    "Graph": "foretell.graph",
    "ModelSchedule": "foretell.api.scheduling",
    "Plan": "foretell.plan.plan",
    "PlanResult": "foretell.api.planning",
    "Prediction": "foretell.api.planning",
    "ScalingResult": "foretell.api.scaling",
    "ScheduleResult": "foretell.api.scheduling",
    "Simulation": "foretell.api.step",
    "Step": "foretell.api.step",
    "Timeline": "foretell.simulate.timeline",
    "WhatIfResult": "foretell.api.step",
    "capture": "foretell.api.step",
    "concat": "foretell.graph",
    "deploy": "foretell.pytorch.deploy",
    "load": "foretell.graph",
    "oracle": "foretell.api.scaling",
    "parallelize": "foretell.pytorch.deploy",
    "parse": "foretell.graph",
    "price": "foretell.cost",
    "read": "foretell.trace",
    "replicate": "foretell.graph",
    "save": "foretell.graph",
    "schedule": "foretell.api.scheduling",
}
# Public functions that share their name with a subpackage, which can be called as the function
# (docs/decisions/0030-callable-packages.md), and where each function lives.
_CALLABLE = {
    "plan": "foretell.api.planning",
    "predict": "foretell.api.planning",
    "simulate": "foretell.simulate.engine",
}
_MODULES = ("profile",)  # public as a whole

__all__ = ["__version__", *_PUBLIC, *_CALLABLE, *_MODULES]  # noqa: PLE0604, RUF100


def __getattr__(name: str) -> Any:
    if name in _CALLABLE or name in _MODULES:
        return import_module(f"foretell.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module `foretell` has no `{name}`")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallableModule(ModuleType):
    """A subpackage that can be called: it runs the public function of the same name."""

    @property
    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_CALLABLE[name]), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._function)


class _Package(ModuleType):
    """This package: a subpackage named in `_CALLABLE` becomes callable when it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE and type(value) is ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
