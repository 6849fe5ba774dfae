"""Files of the user: read within limits, written whole or not at all."""

from __future__ import annotations

import os


def is_there(text: str) -> bool:
    """Whether a text is the path of something on this machine; no text is too odd to ask."""
    try:
        return os.path.exists(text)
    except (OSError, ValueError):  # too long for a name, or with a zero byte in it
        return False
