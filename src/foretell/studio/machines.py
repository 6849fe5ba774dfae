"""Clusters a person chooses or writes in the page: presets by name, or the text of a file."""

from __future__ import annotations

from pathlib import Path

from foretell.cluster import Cluster, load
from foretell.errors import InputError
from foretell.io import write_text

LONGEST = 200_000  # letters of a cluster's text


def chosen(text: str | None) -> Cluster | None:
    """The cluster of a preset's spec; a path is refused: the page opens no files."""
    if not text or not text.strip():
        return None
    if "/" in text or "\\" in text or text.strip().endswith(".toml"):
        raise InputError(f"`{text[:60]}` is no preset", hint="paste the file's text below instead")
    return load(text.strip())


def written(text: str, folder: Path) -> Cluster:
    """The cluster a text describes, in the words of a cluster file."""
    if len(text) > LONGEST:
        raise InputError(f"the cluster's text has {len(text)} letters, {LONGEST} at most")
    path = folder / "cluster.toml"
    write_text(path, text)
    try:
        return load(str(path))
    except InputError as error:
        raise InputError(error.message.replace(str(path), "the text"), hint=error.hint) from None
    finally:
        path.unlink(missing_ok=True)
