"""The layers of the package as a test: which room may import which, and no ring of modules.

Imports are read from the source, so nothing needs to be installed or run. An import inside a
function counts for the table too: it is a dependency all the same.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import foretell

SOURCE = Path(foretell.__file__).parent
ROOT = Path(__file__).parents[1]
LAB = ROOT / "lab" / "src" / "foretell_lab"

# room -> rooms it may import besides itself; those of `GROUND` are for everyone.
GROUND = {"compiled", "portable", "errors", "spec", "io", "operators", "lazy"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "compiled": set(),
    "portable": set(),
    "profile": set(),
    "operators": set(),
    "lazy": set(),
    "spec": {"errors"},
    "io": {"errors"},
    "pool": {"errors"},
    "graph": GROUND,
    "cluster": GROUND,
    "cost": GROUND | {"graph", "cluster"},
    "simulate": GROUND | {"graph", "cluster", "cost"},
    "memory": GROUND | {"graph"},
    "trace": GROUND | {"graph", "simulate", "memory"},
    "baseline": GROUND | {"graph", "cost", "simulate", "trace"},
    "samples": GROUND | {"graph", "cluster", "cost"},
    "whatif": GROUND | {"graph", "cluster", "cost", "trace", "memory"},
    "advise": GROUND | {"graph", "cluster", "cost", "simulate", "trace", "baseline", "whatif"},
    "workload": GROUND | {"graph", "cluster", "cost"},
    "plan": GROUND | {"graph", "cluster", "cost", "whatif", "workload"},
    "predict": GROUND | {"graph", "cluster", "cost", "simulate", "workload", "plan"},
}
ROOMS["search"] = set(ROOMS)
ROOMS["pytorch"] = GROUND | {"graph", "cluster", "cost", "plan", "simulate", "trace", "profile"}
ROOMS["pytorch"] |= {"pool", "workload", "predict"}
ROOMS["report"] = GROUND | {"graph", "cluster", "plan", "simulate"}
ROOMS["survey"] = set(ROOMS)
ROOMS["api"] = set(ROOMS)
ROOMS["studio"] = set(ROOMS)
ROOMS["cli"] = set(ROOMS)
ENTRANCES = {"", "__main__"}  # the package itself, which names what is public, and `python -m`

# The same for the second package, whose rooms may also import all of foretell.
LAB_ROOMS: dict[str, set[str]] = {
    "samples": set(),
    "fused": {"bench"},
    "emulation": set(),
    "policy": set(),
    "bench": set(),
    "loops": set(),
    "preset_docs": set(),
    "workers": set(),
    "challenge": {"workers"},
    "exhaustive": {"workers"},
    "validate": {"samples", "emulation", "fused"},
    "cli": {"fused", "emulation", "policy", "validate"},
}

# (importing room, imported module): of a room that is otherwise closed, only this.
ONLY = {
    "trace": {"foretell.simulate", "foretell.simulate.timeline"},  # Timeline, the type
}
TORCH_ROOMS = {"pytorch"}
TORCH_PACKAGES = {"torch", "torchvision", "torch_geometric", "torchtitan"}


MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path, source: Path = SOURCE) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


LAB_MODULES = sorted(LAB.rglob("*.py"))


def lab_name_of(path: Path) -> str:
    return name_of(path, LAB)


KNOWN = {name_of(path) for path in MODULES} | {lab_name_of(path) for path in LAB_MODULES}


def room_of(module: str) -> str:
    """`foretell.graph.text` → `graph`; the package itself has none."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, *, at_once: bool = False, source: Path = SOURCE) -> Iterator[str]:
    """Every module a file imports, and every name it takes from one as if it were a module.

    With `at_once` only what is imported when the file is: not in functions, nor for types.
    """
    for node in _imports(path, at_once):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = _absolute(path, node, source)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def _imports(path: Path, at_once: bool) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file; statements alone are walked, never expressions."""
    found: list[ast.Import | ast.ImportFrom] = []
    left: list[ast.AST] = [_tree(path)]
    while left:
        for child in _inside(left.pop()):
            if isinstance(child, ast.Import | ast.ImportFrom):
                found.append(child)
            elif not (at_once and (_is_function(child) or _is_for_types(child))):
                left.append(child)
    return found


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(part := getattr(node, name, None), list):
            yield from part


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _absolute(path: Path, node: ast.ImportFrom, source: Path) -> str:
    if not node.level:
        return node.module or ""
    package = name_of(path, source).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def ours(path: Path, *, at_once: bool = False, source: Path = SOURCE) -> set[str]:
    """The modules of both packages that a file imports."""
    return set(imports(path, at_once=at_once, source=source)) & KNOWN


def _rooms(modules: Iterable[Path], name_of: Callable[[Path], str]) -> list[str]:
    return sorted({room_of(name_of(path)) for path in modules})


@pytest.mark.parametrize("room", _rooms(MODULES, name_of))
def test_a_room_looks_only_down(room):
    if room in ENTRANCES:
        return
    assert room in ROOMS, f"room `{room}` has no row in the table: say what it may import"
    for path in (p for p in MODULES if room_of(name_of(p)) == room):
        for other in ours(path) - {"foretell"}:
            assert other.split(".")[0] == "foretell", f"{name_of(path)} imports {other} of the lab"
            allowed = room_of(other) in ROOMS[room] | {room}
            assert allowed, (
                f"{name_of(path)} imports {other}: `{room}` may import {sorted(ROOMS[room])}"
            )
            if room in ONLY and room_of(other) == "simulate":
                assert other in ONLY[room], f"{name_of(path)} imports {other}"


@pytest.mark.parametrize("room", _rooms(LAB_MODULES, lab_name_of))
def test_a_room_of_the_lab_looks_only_down(room):
    for path in (p for p in LAB_MODULES if room and room_of(lab_name_of(p)) == room):
        for other in ours(path, source=LAB):
            if other.startswith("foretell_lab."):
                assert room_of(other) in LAB_ROOMS[room] | {room}, f"{path.name} imports {other}"


@pytest.mark.parametrize("room", sorted(set(_rooms(MODULES, name_of)) - TORCH_ROOMS))
def test_torch_stays_in_its_room(room):
    for path in (p for p in MODULES if room_of(name_of(p)) == room):
        found = {name.split(".")[0] for name in imports(path)} & TORCH_PACKAGES
        assert not found, f"{name_of(path)} imports {found}"


def test_the_table_has_no_ring():
    """A room that may be imported by another may not, in any number of steps, import it back."""
    _assert_no_ring(ROOMS)
    _assert_no_ring(LAB_ROOMS)


def test_no_ring_of_modules():
    """Imports at module level form no ring, so that any module can be imported first."""
    graph = {name_of(path): ours(path, at_once=True) - {name_of(path)} for path in MODULES}
    graph |= {
        lab_name_of(path): ours(path, at_once=True, source=LAB) - {lab_name_of(path)}
        for path in LAB_MODULES
    }
    _assert_no_ring({name: others - _parents(name) for name, others in graph.items()})


def _parents(module: str) -> set[str]:
    """The packages a module is in: they are imported first, whatever it says."""
    parts = module.split(".")
    return {".".join(parts[:k]) for k in range(1, len(parts))}


def _assert_no_ring(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()
    for start in graph:
        _visit(start, graph, [], done)


def _visit(name: str, graph: dict[str, set[str]], path: list[str], done: set[str]) -> None:
    assert name not in path, " → ".join([*path[path.index(name) :], name])
    if name in done:
        return
    for other in sorted(graph.get(name, ())):
        _visit(other, graph, [*path, name], done)
    done.add(name)


SCRIPTS = sorted(p for folder in ("benchmarks", "docs") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_import_what_is_there(path):
    """No type checker reads benchmarks and examples: a name that was renamed is missed here."""
    for node in _imports(path, at_once=False):
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if not module or module.split(".")[0] != "foretell":
            continue
        file = SOURCE.parent.joinpath(*module.split("."))
        source = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        text = source.read_text()
        for alias in node.names:
            known = re.search(rf"\b{alias.name}\b", text) or f"{module}.{alias.name}" in KNOWN
            assert known, f"{module} has no {alias.name}"


# The test itself can fail


def test_what_an_import_is(tmp_path):
    package = tmp_path / "foretell" / "graph"
    package.mkdir(parents=True)
    path = package / "some.py"
    path.write_text(
        "import torch.nn as nn\n"
        "from foretell import spec\n"
        "from .text import parse\n"
        "if TYPE_CHECKING:\n    from foretell.simulate import Timeline\n"
        "def f():\n    from foretell.search.joint import look\n"
    )
    found = set(imports(path, source=tmp_path / "foretell"))
    assert {"torch.nn", "foretell.spec", "foretell.graph.text", "foretell.simulate"} <= found
    assert "foretell.search.joint" in found
    at_once = set(imports(path, at_once=True, source=tmp_path / "foretell"))
    assert {"foretell.search.joint", "foretell.simulate"} & at_once == set()
    assert {"torch.nn", "foretell.spec", "foretell.graph.text"} <= at_once


def test_a_ring_is_found():
    with pytest.raises(AssertionError, match="b → c → b"):
        _assert_no_ring({"a": {"b"}, "b": {"c"}, "c": {"b"}})
