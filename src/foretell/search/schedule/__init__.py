"""In which order the blocks of a pipeline run: schedules for any placement, training or inference.

schedule(problem, micro_batches=8, memory=6).answer()
"""

from foretell.search.schedule.find import schedule
from foretell.search.schedule.placement import load, read, shape, write
from foretell.search.schedule.problem import Block, Choice, Problem, Wait
from foretell.search.schedule.schedule import Schedule, wrong

__all__ = [
    "Block",
    "Choice",
    "Problem",
    "Schedule",
    "Wait",
    "load",
    "read",
    "schedule",
    "shape",
    "write",
    "wrong",
]
