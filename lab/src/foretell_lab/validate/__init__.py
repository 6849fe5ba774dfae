"""How right it is: every accuracy figure, recomputed from measurements.

Measured data are not part of the package; `truth_folder` finds them.
"""

from __future__ import annotations

import os
from pathlib import Path

from foretell.errors import InputError

PLACES = ("truth", "../shared/truth")  # looked at from the current folder, in this order


def truth_folder(given: Path | None = None) -> Path:
    """The folder of measured data: the one given, `FORETELL_TRUTH`, or one of the usual places."""
    named = given or os.environ.get("FORETELL_TRUTH")
    places = [Path(place) for place in ([named] if named else PLACES)]
    for place in places:
        if place.is_dir():
            return place
    raise InputError(
        f"no folder of measured data at {' or '.join(f'`{p}`' for p in places)}",
        hint="name it with --truth, or in the variable FORETELL_TRUTH",
    )
