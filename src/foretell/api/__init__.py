"""The public Python API: what `import foretell` offers and what every command calls.

A result is a small frozen value: one line as `repr`, a table when printed, HTML in a notebook,
`to_json()`, `to_pandas()`, `plot()`.
"""

from foretell.api.planning import PlanResult, Prediction, plan, predict
from foretell.api.result import Plot, Result, Table
from foretell.api.scaling import ScalingResult, oracle
from foretell.api.scheduling import ModelSchedule, ScheduleResult, schedule
from foretell.api.step import AdviceResult, Simulation, Step, WhatIfResult, capture

__all__ = [
    "AdviceResult",
    "ModelSchedule",
    "PlanResult",
    "Plot",
    "Prediction",
    "Result",
    "ScalingResult",
    "ScheduleResult",
    "Simulation",
    "Step",
    "Table",
    "WhatIfResult",
    "capture",
    "oracle",
    "plan",
    "predict",
    "schedule",
]
