"""In which order the blocks of a pipeline run: schedules for any placement, training or inference.

schedule(problem, micro_batches=8, memory=6).answer()
"""

from foretell.search.schedule.find import PipelineSchedule, StageCost, best_schedule, schedule
from foretell.search.schedule.problem import Block, Choice, Problem, Wait, load, read, shape, write
from foretell.search.schedule.schedule import Schedule, wrong

__all__ = [
    "Block",
    "Choice",
    "PipelineSchedule",
    "Problem",
    "Schedule",
    "StageCost",
    "Wait",
    "best_schedule",
    "load",
    "read",
    "schedule",
    "shape",
    "write",
    "wrong",
]
