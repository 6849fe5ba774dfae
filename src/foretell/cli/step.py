"""The step a command names, with progress shown and notes told on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretell.cli.output import say
from foretell.cli.progress import reading, working

if TYPE_CHECKING:
    from foretell.api import Step


def load_step(file: Path, cluster: str | None, real: float | None = None) -> Step:
    """The step in a file; `real` is the time of an un-profiled step, for traces."""
    from foretell.api import Step
    from foretell.cli.script import script_args

    is_script = file.suffix == ".py" or ".py:" in str(file)
    shown = working(f"running {file.name}") if is_script else reading(file)
    with shown as tell:
        step = Step.load(file, cluster, args=script_args(), unprofiled=real, progress=tell)
    for remark in step.remarks:
        say(remark)
    return step
