"""Clusters a person chooses or writes in the page: presets by name, or the text of a file."""

from __future__ import annotations

from pathlib import Path

from foretell.cluster import Cluster, load
from foretell.errors import InputError
from foretell.io import write_text

LONGEST = 200_000  # letters of a cluster's text
MOST = 64  # clusters that are kept


def preset(text: str | None) -> Cluster | None:
    """The cluster of a preset's spec; a path is refused: the page opens no files."""
    if not text or not text.strip():
        return None
    if "/" in text or "\\" in text or text.strip().endswith(".toml"):
        raise InputError(f"`{text[:60]}` is no preset", hint="paste the file's text below instead")
    return load(text.strip())


def sized(text: str, gpus: int) -> Cluster:
    """So many GPUs of the machines a preset names."""
    from foretell.api import scaling

    if preset(text) is None:
        raise InputError("no machines are chosen", hint="choose a GPU and how many")
    return scaling.sized(text, gpus)


class Machines:
    """Clusters that tabs have written, by a key the page keeps; presets are their own key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, Cluster] = {}

    def put(self, text: str) -> str:
        """Keep the cluster of a text; its key."""
        cluster = parse_cluster(text, self._folder)
        key = "text " + cluster.fingerprint()
        if len(self._texts) >= MOST:
            self._texts.pop(next(iter(self._texts)))
        self._texts[key] = cluster
        return key

    def of(self, key: str | None) -> Cluster | None:
        """The cluster of a key or a preset, None where none is chosen."""
        return self._texts[key] if key in self._texts else preset(key)


def parse_cluster(text: str, folder: Path) -> Cluster:
    """The cluster described by the text of a cluster file."""
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
