"""How far a reader of one answer walks: functions and files that `whatif` and `plan` pass through.

    python benchmarks/walk.py [whatif|plan ...] [-v]

Counted are calls of our own functions while a command answers; importing and loading compiled loops
(`compiled/`) are left out. Depth is how many of our own functions stand on each other; one
that calls itself is read once. `-v` lists files, functions and the deepest stack.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType

from click.testing import CliRunner

import foretell
from foretell.cli.main import foretell as command

HOME = Path(foretell.__file__).resolve().parent
LOADER = str(HOME / "compiled")
STEP = str(next((HOME / "samples/traces").glob("*.json*")))
GPT = "gpt:layers=4,hidden=512,heads=8,seq=256,vocab=1000"
LINES = {
    "whatif": ["whatif", STEP, "amp"],
    "plan": ["plan", GPT, "--on", "dgx-a100:gpus=8"],
}


@dataclass
class Walk:
    """Our functions seen while a command ran, by file, and the deepest stack of them."""

    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    depth: int = 0
    deepest: list[str] = field(default_factory=list)
    _stack: list[str] = field(default_factory=list)
    _importing: int = 0

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call of ours, or its return (→ `sys.setprofile`)."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(HOME)):
            return
        if code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        elif not self._importing and not _by_import(frame) and _is_function(code):
            self._note(code, event == "call")

    def _note(self, code: CodeType, is_call: bool) -> None:
        if not is_call:
            del self._stack[-1:]  # what was entered before we looked returns too
            return
        file = str(Path(code.co_filename).relative_to(HOME))
        self.functions[file].add(code.co_qualname)
        self._stack.append(f"{file}:{code.co_qualname}")
        if len(self._stack) > self.depth and len(different := set(self._stack)) > self.depth:
            self.depth, self.deepest = len(different), list(self._stack)


def _by_import(frame: FrameType) -> bool:
    """Whether Python's own import machinery calls it."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.startswith("<frozen importlib")


def _is_function(code: CodeType) -> bool:
    """Class bodies, comprehensions and lambdas are read where they stand."""
    is_loader = code.co_filename.startswith(LOADER)
    return bool(code.co_flags & CO_NEWLOCALS) and not code.co_name.startswith("<") and not is_loader


def walk(arguments: list[str]) -> Walk:
    """Run a command and look at the functions it calls; importing is not looked at."""
    found = Walk()
    sys.setprofile(found.profile)
    try:
        done = CliRunner().invoke(command, arguments)
    finally:
        sys.setprofile(None)
    assert done.exit_code == 0, (done.output, done.exception)
    return found


def main(words: list[str]) -> None:
    """Print one line a command; with `-v` its files and its deepest stack."""
    for name in [w for w in words if w in LINES] or LINES:
        seen = walk(LINES[name])
        functions = sum(map(len, seen.functions.values()))
        print(f"{name}: {functions} functions in {len(seen.functions)} files, {seen.depth} deep")
        if "-v" in words:
            for file, names in sorted(seen.functions.items()):
                print(f"  {len(names):4} {file}: {' '.join(sorted(names))}")
            print("  " + "\n  ".join(f"{i:2} {line}" for i, line in enumerate(seen.deepest, 1)))


if __name__ == "__main__":
    main(sys.argv[1:])
