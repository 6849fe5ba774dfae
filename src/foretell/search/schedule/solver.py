"""The one door to OR-tools CP-SAT: imported when first used, one worker, the same answer every
time.

Limits are counted in work, not by the clock: the solver's deterministic time, in CPU seconds of
the machine where its pace was measured. A slower or busier machine takes longer and finds the same
schedule.
"""

from dataclasses import dataclass
from typing import Any, Literal

from foretell.errors import UnmodelledError

Status = Literal["found", "best", "none", "unknown"]  # a solution, the best, proven none, no answer

# CPU seconds for one unit of deterministic time (models of order literals, models of intervals) and
# for one constraint (building and presolve): medians over our models on an AMD EPYC vCPU
ORDERS, INTERVALS = 3.5, 1.0
_BUILD = 1e-4


@dataclass
class Budget:
    """Seconds of work still to be spent."""

    left: float

    def part(self, share: float) -> "Budget":
        """A part of what is left, as a budget of its own."""
        return Budget(self.left * share)


def solver() -> Any:
    """OR-tools' `cp_model`, or an error that says how to get it."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UnmodelledError(
            "the schedule search needs OR-tools, which is not installed",
            hint="pip install 'foretell[solve]', or name a fixed schedule such as `1f1b`",
        ) from None
    return cp_model


def solve(model: Any, budget: Budget, limit: float, pace: float = ORDERS) -> tuple[Status, Any]:
    """Solve a model within a limit and the budget; the second value holds the solution's values."""
    cp = solver()
    engine = cp.CpSolver()
    limit = min(limit, budget.left)
    if limit <= 0:
        return "unknown", engine
    parameters = engine.parameters
    parameters.num_workers = 1
    parameters.random_seed = 1
    parameters.max_deterministic_time = limit / pace
    parameters.cp_model_probing_level = 0  # probing costs more than it saves on these models
    code = engine.solve(model)
    budget.left -= pace * engine.response_proto.deterministic_time
    budget.left -= _BUILD * len(model.proto.constraints)
    if code == cp.OPTIMAL:
        return "best", engine
    if code == cp.FEASIBLE:
        return "found", engine
    if code == cp.INFEASIBLE:
        return "none", engine
    if code == cp.MODEL_INVALID:
        raise AssertionError(f"the solver refused our model: {model.validate()}")
    return "unknown", engine
