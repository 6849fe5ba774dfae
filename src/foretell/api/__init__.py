"""The public Python API: what `import foretell` offers and what every command calls.

A result is a small frozen value: one line as `repr`, a table when printed, HTML in a notebook,
`to_json()`, `to_pandas()`, `plot()`. A question loads what answers it, and nothing else.
"""

from typing import TYPE_CHECKING

from foretell.lazy import lazy

if TYPE_CHECKING:
    from foretell.api.planning import PlanResult as PlanResult
    from foretell.api.planning import Prediction as Prediction
    from foretell.api.planning import plan as plan
    from foretell.api.planning import predict as predict
    from foretell.api.result import Plot as Plot
    from foretell.api.result import Result as Result
    from foretell.api.result import Table as Table
    from foretell.api.scaling import ScalingResult as ScalingResult
    from foretell.api.scaling import oracle as oracle
    from foretell.api.scheduling import ModelSchedule as ModelSchedule
    from foretell.api.scheduling import ScheduleResult as ScheduleResult
    from foretell.api.scheduling import schedule as schedule
    from foretell.api.step import AdviceResult as AdviceResult
    from foretell.api.step import Simulation as Simulation
    from foretell.api.step import Step as Step
    from foretell.api.step import WhatIfResult as WhatIfResult
    from foretell.api.step import capture as capture

_WHERE = {
    "planning": "PlanResult Prediction plan predict",
    "result": "Plot Result Table",
    "scaling": "ScalingResult oracle",
    "scheduling": "ModelSchedule ScheduleResult schedule",
    "step": "AdviceResult Simulation Step WhatIfResult capture",
}
__all__ = sorted(" ".join(_WHERE.values()).split())
__getattr__ = lazy(__name__, _WHERE)
