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

from foretell.lazy import lazy

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

# Modules and the public names that live there.
_PUBLIC = {
    "api.planning": "PlanResult Prediction",
    "api.scaling": "ScalingResult oracle",
    "api.scheduling": "ModelSchedule ScheduleResult schedule",
    "api.step": "AdviceResult Simulation Step WhatIfResult capture",
    "cluster": "Cluster",
    "cost": "price",
    "errors": "ForetellError",
    "graph": "Builder Graph concat load parse replicate save",
    "plan.plan": "Plan",
    "pytorch.deploy": "deploy parallelize",
    "simulate.timeline": "Timeline",
    "trace": "read",
}
# Public functions that share their name with a subpackage, which can be called as the function
# (docs/decisions/0030-callable-packages.md), and where each function lives.
_CALLABLE = {
    "plan": "foretell.api.planning",
    "predict": "foretell.api.planning",
    "simulate": "foretell.simulate.engine",
}
_MODULES = ("profile",)  # public as a whole

__all__ = ["__version__", *" ".join(_PUBLIC.values()).split(), *_CALLABLE, *_MODULES]  # noqa: PLE0604, RUF100
_found = lazy(__name__, _PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _CALLABLE or name in _MODULES:
        return import_module(f"foretell.{name}")
    return _found(name)


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
