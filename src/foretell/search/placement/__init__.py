"""Where each part of a model runs on a mix of machines, and how its replicas agree.

from foretell.search.placement import PlacementPlanner
planned = PlacementPlanner().plan(load("vgg19:batch=8"), load_cluster("tag"))
"""

from foretell.search.placement.planner import PlacementPlanner, plan_of
from foretell.search.placement.problem import Action, Placement, Problem, problem
from foretell.search.placement.search import Evaluator, graph

__all__ = [
    "Action",
    "Evaluator",
    "Placement",
    "PlacementPlanner",
    "Problem",
    "graph",
    "plan_of",
    "problem",
]
