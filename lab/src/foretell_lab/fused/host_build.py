"""Regions compiled for a CPU by Inductor C++, many kernels to one library.

A C++ compiler spends most of a kernel's time on the headers and the bindings around it. So a block
of regions goes through Inductor with the compiler held back, and all kernels then become one source
file, built by Inductor's own command (its flags, its precompiled header) and bound by its own text.
The kernels themselves are as Inductor wrote them. A block is plain data, so one process compiles
while another measures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import ModuleType
from typing import Any

from foretell_lab.fused.build import compiled
from foretell_lab.fused.region import Region

Tensor = Any
Run = Callable[[list[Tensor]], Any]
_BOUND = "static PyObject* {entry_func}_py"  # where Inductor's bindings of one kernel begin
_TABLE = "static PyMethodDef"  # and where they end
_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
# A step draws the seeds of all its dropouts at once: no region pays for them.
_SEEDS = re.compile(r"^\s*aten\.randint\.low_out\(.*\)\n", re.M)


@dataclass
class Wrapped:
    """A region's Python wrapper as Inductor wrote it; its loop nests, or why there is none."""

    at: int
    code: str = ""
    loops: int = 0
    why: str = ""


@dataclass
class Block:
    """Regions that share a library: the wrappers, and every kernel's arguments and source."""

    rows: list[Wrapped] = field(default_factory=list)
    kernels: dict[str, tuple[list[str], str]] = field(default_factory=dict)


def settle() -> None:
    """One thread, nothing kept from earlier runs, no checks that a step makes once for all."""
    import torch
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    inductor.size_asserts = False
    torch.set_num_threads(1)


def wrapped(regions: Sequence[tuple[int, Region]]) -> Block:
    """Regions through Inductor, the C++ compiler held back."""
    block = Block()
    with _kernels_by(lambda arguments, source: _noted(block, arguments, source)):
        for at, region in regions:
            try:
                made: Any = compiled(region, "cpu")
                code = _SEEDS.sub("", made.source_code)
                block.rows.append(Wrapped(at, code, _loops(code)))
            except Exception as why:  # a compiler fails in many ways; the region is left out
                block.rows.append(Wrapped(at, why=f"{type(why).__name__}: {str(why)[:160]}"))
    return block


def _noted(block: Block, arguments: list[str], source: str) -> Callable[..., None]:
    block.kernels[_key(arguments, source)] = (arguments, source)
    return lambda *tensors: None


def _key(arguments: Sequence[str], source: str) -> str:
    text = "|".join([*arguments, source])
    return "k" + blake2b(text.encode(), digest_size=8).hexdigest()


def _loops(code: str) -> int:
    """Loop nests of a region: the outermost blocks of its kernels, and calls of libraries."""
    return len(re.findall(r"^    \{$", code, re.M)) + len(re.findall(r"extern_kernels\.", code))


@contextmanager
def _kernels_by(make: Callable[[list[str], str], Any]) -> Iterator[None]:
    """Have wrappers get their kernels elsewhere."""
    from torch._inductor.async_compile import AsyncCompile

    plain = AsyncCompile.cpp_pybinding
    AsyncCompile.cpp_pybinding = lambda self, arguments, source: make(arguments, source)
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = plain


def build(block: Block, submit: Any = None) -> Callable[[], ModuleType]:
    """The library of a block; built now, or by `submit` in the meantime."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    made: Any = CppPythonBindingsCodeCache.load_async(_source(block), submit_fn=submit)
    return made  # type: ignore[no-any-return]


def _source(block: Block) -> str:
    """All kernels and their bindings as one source file."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    text: str = CppPythonBindingsCodeCache.suffix_template
    before, bound, after = _parts(text)
    parts = [_HEADER]
    for key, (_, source) in block.kernels.items():
        parts.append(re.sub(r"\bkernel\(", f"{key}(", source.replace(_HEADER, ""), count=1))
    parts.append(before.format(entry_func="kernel", extra_parse_arg=""))
    for key, (arguments, _) in block.kernels.items():
        given = (
            f"parse_arg<{a.replace('const ', '')}>(args, {n})" for n, a in enumerate(arguments)
        )
        call = f"{key}({', '.join(given)}); Py_RETURN_NONE;"
        parts.append(bound.format(entry_func=key, arg_len=len(arguments), call_entry_func=call))
    methods = "".join(f'{{"{key}", {key}_py, METH_VARARGS, ""}},\n' for key in block.kernels)
    parts.append(f"static PyMethodDef py_methods[] = {{\n{methods}{{NULL, NULL, 0, NULL}}}};\n")
    parts.append(after.format(entry_func="kernel"))
    return "\n".join(parts)


def _parts(text: str) -> tuple[str, str, str]:
    """Inductor's bindings: what comes before, one kernel's, and what follows the table of them."""
    start, table = text.index(_BOUND), text.index(_TABLE)
    end = text.index("static struct PyModuleDef")
    return text[:start], text[start:table], text[end:]


def runs(block: Block, library: ModuleType) -> dict[int, Run]:
    """The regions of a block, ready to run."""
    found: dict[int, Run] = {}
    with _kernels_by(lambda arguments, source: getattr(library, _key(arguments, source))):
        for row in block.rows:
            if row.code:
                space: dict[str, Any] = {"__name__": f"region_{row.at}"}
                exec(compile(row.code, f"region_{row.at}", "exec"), space)
                found[row.at] = space["call"]
    return found
