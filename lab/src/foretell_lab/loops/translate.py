"""Loops in Python written again in C++, word by word.

A loop may use numbers, arrays of numbers, tuples and named tuples of them, other loops, and what
`runtime.hpp` has of NumPy. Types are the C++ compiler's to find: a function becomes a template, a
variable is what it is first set to. A loop whose parameters all say their type can be called from
Python.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

_WORDS = {
    "and", "auto", "bool", "break", "case", "char", "class", "const", "default", "delete", "do",
    "double", "else", "enum", "export", "float", "for", "if", "inline", "int", "long", "new", "not",
    "operator", "or", "private", "public", "register", "return", "short", "signed", "static",
    "struct", "switch", "template", "this", "throw", "try", "typename", "union", "unsigned",
    "using", "void", "while", "xor", "I", "rt", "py", "std",
}  # fmt: skip
DTYPES = {
    "bool_": "bool", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "I",
    "uint8": "uint8_t", "float32": "float", "float64": "double",
}  # fmt: skip
_LETTERS = {
    "F": "double", "I": "I", "J": "int32_t", "S": "int16_t", "C": "int8_t", "B": "bool",
    "U": "uint8_t", "H": "float",
}  # fmt: skip
_SCALARS = {"int": "I", "float": "double", "bool": "bool"}
_BINARY = {
    ast.Add: "rt::add", ast.Sub: "rt::sub", ast.Mult: "rt::mul", ast.Div: "rt::over",
    ast.FloorDiv: "rt::floordiv", ast.Mod: "rt::mod", ast.Pow: "rt::power",
    ast.MatMult: "rt::matmul",
}  # fmt: skip
_PLAIN = {
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip
_COMPARE = {
    ast.Eq: "rt::eq", ast.NotEq: "rt::ne", ast.Lt: "rt::lt", ast.LtE: "rt::le", ast.Gt: "rt::gt",
    ast.GtE: "rt::ge",
}  # fmt: skip
_CHANGE = {
    ast.Add: "rt::add_to", ast.Sub: "rt::sub_to", ast.Mult: "rt::mul_to", ast.Div: "rt::over_to",
    ast.BitOr: "rt::or_to", ast.BitAnd: "rt::and_to", ast.RShift: "rt::right_to",
}  # fmt: skip
_NUMPY = {
    "ceil": "std::ceil", "floor": "std::floor", "round": "std::rint", "sqrt": "std::sqrt",
    "log2": "rt::log2", "exp": "rt::exp", "arange": "rt::arange", "searchsorted":
    "rt::searchsorted", "flatnonzero": "rt::flatnonzero", "argmax": "rt::argmax",
}  # fmt: skip
_RANDOM = {"seed", "random", "randint", "exponential"}
_METHODS = {"any": "rt::any", "max": "rt::max_of", "copy": "rt::copy", "sort": "rt::sort"}


class Unsupported(Exception):
    """Something that has no translation."""


class Untyped(Unsupported):
    """A parameter that does not say its type."""


def unit(loops: list[FunctionType], entries: list[FunctionType]) -> str:
    """One C++ file of some loops, those that call others behind them, with their entries."""
    made = Unit(set(loops))
    for loop in entries:
        made.enter(loop)
    return made.text()


class Unit:
    """A C++ file on its way."""

    def __init__(self, known: set[FunctionType]) -> None:
        self.known = known
        self.done: dict[FunctionType, str] = {}
        self.tuples: dict[type, str] = {}
        self.arrays: dict[str, str] = {}
        self.body: list[str] = []
        self.entries: list[str] = []

    def text(self) -> str:
        """The whole file."""
        parts = [*self.tuples.values(), *self.arrays.values(), *self.body, *self.entries]
        return '#include "runtime.hpp"\n\n' + "\n\n".join(parts) + "\n"

    def enter(self, loop: FunctionType) -> None:
        """A loop that Python calls."""
        try:
            types = [self.typed(a.annotation, loop) for a in _tree(loop).args.args]
        except Untyped:
            return  # a part of others
        name = self.function(loop)
        names = [f"a{i}" for i in range(len(types))]
        self.entries.append(
            f'extern "C" __attribute__((visibility("default"))) PyObject* call_{name}'
            f"(PyObject* given) {{\n    return py::call<std::tuple<{', '.join(types)}>>(given, "
            f"[]({', '.join(f'const auto& {n}' for n in names)}) "
            f"{{ return {name}({', '.join(names)}); }});\n}}"
        )

    def typed(self, note: ast.expr | None, loop: FunctionType) -> str:
        """The C++ type that an annotation says."""
        if isinstance(note, ast.Name):
            if note.id in _SCALARS:
                return _SCALARS[note.id]
            if len(note.id) == 2 and note.id[0] in _LETTERS and note.id[1].isdigit():
                return f"rt::A<{_LETTERS[note.id[0]]}, {note.id[1]}>"
            found = loop.__globals__.get(note.id)
            if isinstance(found, type) and issubclass(found, tuple):
                return self.named(found, loop)
        if isinstance(note, ast.Subscript) and isinstance(note.value, ast.Name):
            items = note.slice.elts if isinstance(note.slice, ast.Tuple) else [note.slice]
            return f"std::tuple<{', '.join(self.typed(item, loop) for item in items)}>"
        raise Untyped(f"{loop.__module__}.{loop.__name__}: a parameter without a type")

    def named(self, found: Any, loop: FunctionType) -> str:
        """A named tuple whose fields say their types."""
        self.tuple_of(found)
        notes = inspect.get_annotations(found)
        types = [self.typed(_note(notes[field]), loop) for field in found._fields]
        return f"{found.__name__}<{', '.join(types)}>"

    def tuple_of(self, found: Any) -> str:
        """A named tuple as a template."""
        name = str(found.__name__)
        if found not in self.tuples:
            fields = [_name(f) for f in found._fields]
            types = ", ".join(f"class T{i}" for i in range(len(fields)))
            held = " ".join(f"T{i} {field};" for i, field in enumerate(fields))
            given = ", ".join(f"const T{i}& x{i}" for i in range(len(fields)))
            sets = ", ".join(f"{field}(x{i})" for i, field in enumerate(fields))
            gets = " else ".join(
                f"if constexpr (K == {i}) return ({field});" for i, field in enumerate(fields)
            )
            every = ", ".join(f"T{i}" for i in range(len(fields)))
            self.tuples[found] = (
                f"template <{types}>\nstruct {name} {{\n    static constexpr bool named = true;\n"
                f"    {held}\n    {name}({given}) : {sets} {{}}\n"
                f"    template <int K> const auto& get() const {{ {gets} }}\n"
                f"    auto all() const {{ return std::make_tuple({', '.join(fields)}); }}\n}};\n"
                f"namespace py {{\ntemplate <{types}>\nstruct In<{name}<{every}>> {{\n"
                f"    static {name}<{every}> get(PyObject* x, Held& held) {{\n"
                f"        return std::apply([](const auto&... one) {{ "
                f"return {name}<{every}>(one...); }}, In<std::tuple<{every}>>::get(x, held));\n"
                f"    }}\n}};\n}}"
            )
        return name

    def function(self, loop: FunctionType) -> str:
        """The name of a loop's template, which is written before it is used."""
        if loop not in self.done:
            name = f"{loop.__module__.removeprefix('foretell.')}.{loop.__name__}".replace(".", "_")
            written = Function(self, loop).text(name)
            self.done[loop] = name
            self.body.append(written)
        return self.done[loop]

    def constant(self, name: str, value: Any, module: str) -> str:
        """A number, or an array that is part of the file."""
        if isinstance(value, bool | np.bool_):
            return "true" if value else "false"
        if isinstance(value, int | np.integer):
            return f"I({int(value)})"
        if isinstance(value, float | np.floating):
            return _real(float(value))
        if isinstance(value, np.ndarray) and value.ndim == 1:
            key = f"{module.removeprefix('foretell.')}_{name}".replace(".", "_")
            if key not in self.arrays:
                kind = DTYPES["bool_" if value.dtype == bool else str(value.dtype)]
                items = ", ".join(_item(v) for v in value.tolist())
                self.arrays[key] = (
                    f"static {kind} {key}_values[] = {{{items}}};\n"
                    f"static const rt::A<{kind}, 1> {key} = [] {{ rt::A<{kind}, 1> a; "
                    f"a.p = {key}_values; a.n[0] = {len(value)}; a.s[0] = 1; return a; }}();"
                )
            return key
        raise Unsupported(f"{module}: `{name}` is {type(value).__name__}")


class Function:
    """One loop on its way."""

    def __init__(self, whole: Unit, loop: FunctionType) -> None:
        self.whole, self.loop, self.tree = whole, loop, _tree(loop)
        self.locals = {a.arg for a in self.tree.args.args}
        self.parameters = set(self.locals)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.locals.add(node.id)
        self.fresh = 0
        self.places = _declared(self.tree, self.parameters)

    def text(self, name: str) -> str:
        """The template."""
        args = [a.arg for a in self.tree.args.args]
        changed = {n for n in args if n in _stored(self.tree)}
        kinds = ", ".join(f"class T{i}" for i in range(len(args)))
        given = ", ".join(
            f"T{i} {_name(n)}" if n in changed else f"const T{i}& {_name(n)}"
            for i, n in enumerate(args)
        )
        body = self.block(self.tree.body)
        return f"template <{kinds}>\nauto {name}({given}) {{\n{body}\n}}"

    def block(self, statements: list[ast.stmt]) -> str:
        """Statements one after another."""
        found = []
        for s in statements:
            found += [
                f"std::decay_t<decltype(rt::val({self.expr(value)}))> {_name(n)}{{}};"
                for n, value in self.places.above.get(s, {}).items()
            ]
            found += self.statement(s)
        return textwrap.indent("\n".join(found), "    ")

    def statement(self, s: ast.stmt) -> list[str]:
        """One statement."""
        match s:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return []
            case ast.Expr():
                return [f"{self.expr(s.value)};"]
            case ast.Return():
                return ["return;" if s.value is None else f"return rt::val({self.expr(s.value)});"]
            case ast.Break():
                return ["break;"]
            case ast.Continue():
                return ["continue;"]
            case ast.AnnAssign(target=ast.Name(id=name), value=None, annotation=ast.Name(id=kind)):
                return [f"{_SCALARS[kind]} {_name(name)}{{}};"]
            case ast.Assign():
                return self.assign(s)
            case ast.AugAssign():
                return self.change(s)
            case ast.If():
                rest = f" else {{\n{self.block(s.orelse)}\n}}" if s.orelse else ""
                return [f"if ({self.truth(s.test)}) {{\n{self.block(s.body)}\n}}{rest}"]
            case ast.While():
                return [f"while ({self.truth(s.test)}) {{\n{self.block(s.body)}\n}}"]
            case ast.For():
                return [f"{self.over(s)} {{\n{self.block(s.body)}\n}}"]
        raise self.unsupported(s)

    def over(self, s: ast.For) -> str:
        """The head of a loop."""
        assert isinstance(s.target, ast.Name)
        name = _name(s.target.id)
        match s.iter:
            case ast.Call(func=ast.Name(id="range"), args=args):
                low, high, step = "I(0)", "", 1
                if len(args) == 1:
                    high = self.expr(args[0])
                else:
                    low, high = self.expr(args[0]), self.expr(args[1])
                if len(args) == 3:
                    step = ast.literal_eval(args[2])
                end = self.name()
                test = "<" if step > 0 else ">"
                return (
                    f"for (I {name} = {low}, {end} = {high}; {name} {test} {end}; {name} += {step})"
                )
        every, at = self.name(), self.name()
        found = self.expr(s.iter)
        return (
            f"for (auto [{every}, {at}] = std::make_pair({found}, I(0)); {at} < rt::len({every}); "
            f"{at}++) if (auto {name} = rt::ld({every}, {at}); true)"
        )

    def assign(self, s: ast.Assign) -> list[str]:
        """Names and places that are set."""
        if len(s.targets) > 1:
            first = [self.set(s.targets[-1], self.expr(s.value), s)]
            value = self.expr(s.targets[-1])
            return [*first, *(self.set(t, value, s) for t in s.targets[:-1])]
        target = s.targets[0]
        if not isinstance(target, ast.Tuple):
            return [self.set(target, self.expr(s.value), s)]
        if isinstance(s.value, ast.Tuple):
            given = [(self.name(), self.expr(v)) for v in s.value.elts]
            found = [f"auto {n} = rt::val({v});" for n, v in given]
            values = [n for n, _ in given]
        else:
            name, begin, source = self.name(), 0, s.value
            match source:
                case ast.Subscript(slice=ast.Slice(lower=low, upper=_), value=inner):
                    if not isinstance(inner, ast.Subscript):
                        begin = 0 if low is None else ast.literal_eval(low)
                        source = inner
            found = [f"auto&& {name} = {self.expr(source)};"]
            values = [f"rt::get<{begin + i}>({name})" for i in range(len(target.elts))]
        return [*found, *(self.set(t, v, s) for t, v in zip(target.elts, values, strict=True))]

    def set(self, target: ast.expr, value: str, s: ast.stmt) -> str:
        """One name or place that is set."""
        if isinstance(target, ast.Name):
            name = _name(target.id)
            if target.id == "_":
                return f"(void){value};"
            if target.id in self.places.here.get(s, set()):
                return f"auto {name} = rt::val({value});"
            return f"{name} = {value};"
        if isinstance(target, ast.Subscript):
            index = target.slice
            if isinstance(index, ast.Name) and self.is_row(index.id):
                return f"rt::put({self.expr(target.value)}, {self.expr(index)}, {value});"
            return f"rt::set({self.place(target)}, {value});"
        raise self.unsupported(target)

    def is_row(self, name: str) -> bool:
        """Whether a name holds numbers of places: it was made by NumPy, or is called so."""
        return name in _rows(self.tree)

    def change(self, s: ast.AugAssign) -> list[str]:
        """Something that is changed where it is."""
        name = _CHANGE.get(type(s.op))
        if name is None:
            raise self.unsupported(s)
        place = (
            _name(s.target.id) if isinstance(s.target, ast.Name) else self.place(s.target)  # type: ignore[arg-type]
        )
        return [f"{name}({place}, {self.expr(s.value)});"]

    def place(self, node: ast.Subscript) -> str:
        return f"rt::at({self.expr(node.value)}, {self.index(node.slice)})"

    def index(self, node: ast.expr) -> str:
        """What stands between brackets."""
        items = node.elts if isinstance(node, ast.Tuple) else [node]
        return ", ".join(self.one_index(item) for item in items)

    def one_index(self, node: ast.expr) -> str:
        match node:
            case ast.Slice(lower=None, upper=None):
                return "rt::All()"
            case ast.Slice(lower=low, upper=None) if low is not None:
                return f"rt::from({self.expr(low)})"
            case ast.Slice(lower=low, upper=high) if high is not None:
                begin = "I(0)" if low is None else self.expr(low)
                return f"rt::slice({begin}, {self.expr(high)})"
        return self.expr(node)

    def truth(self, node: ast.expr) -> str:
        return self.expr(node)

    def expr(self, node: ast.expr) -> str:
        """An expression."""
        match node:
            case ast.Constant(value=bool() as value):
                return "true" if value else "false"
            case ast.Constant(value=int() as value):
                return f"I({value})"
            case ast.Constant(value=float() as value):
                return _real(value)
            case ast.Name():
                return self.name_of(node.id)
            case ast.Attribute():
                return self.attribute(node)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Tuple():
                items = ", ".join(f"rt::val({self.expr(e)})" for e in node.elts)
                return f"std::make_tuple({items})"
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
                return f"I({-value})"
            case ast.UnaryOp(op=ast.USub()):
                return f"rt::neg({self.expr(node.operand)})"
            case ast.UnaryOp(op=ast.Not()):
                return f"(!({self.expr(node.operand)}))"
            case ast.UnaryOp(op=ast.Invert()):
                return f"(~({self.expr(node.operand)}))"
            case ast.BoolOp():
                word = " && " if isinstance(node.op, ast.And) else " || "
                return f"({word.join(f'bool({self.expr(v)})' for v in node.values)})"
            case ast.IfExp():
                test, one, other = (self.expr(x) for x in (node.test, node.body, node.orelse))
                return f"({test} ? rt::val({one}) : rt::val({other}))"
            case ast.Compare():
                return self.compare(node)
            case ast.BinOp():
                one, other = self.expr(node.left), self.expr(node.right)
                if type(node.op) in _PLAIN:
                    return f"({one} {_PLAIN[type(node.op)]} {other})"
                return f"{_BINARY[type(node.op)]}({one}, {other})"
            case ast.Call():
                return self.call(node)
        raise self.unsupported(node)

    def name_of(self, name: str) -> str:
        if name in self.locals:
            return _name(name)
        return self.whole.constant(name, self.loop.__globals__[name], self.loop.__module__)

    def attribute(self, node: ast.Attribute) -> str:
        if isinstance(node.value, ast.Name) and node.value.id not in self.locals:
            holder = self.loop.__globals__[node.value.id]
            if holder is np:
                return {"inf": "rt::inf", "nan": "rt::nan"}[node.attr]
            if isinstance(holder, ModuleType):
                return self.whole.constant(node.attr, getattr(holder, node.attr), holder.__name__)
        return f"{self.expr(node.value)}.{_name(node.attr)}"

    def subscript(self, node: ast.Subscript) -> str:
        match node.value:
            case ast.Attribute(attr="shape") if isinstance(node.slice, ast.Constant):
                return f"{self.expr(node.value.value)}.n[{ast.literal_eval(node.slice)}]"
            case ast.Name(id=name) if name not in self.locals:
                value = self.loop.__globals__[name]
                if isinstance(value, tuple):
                    item = value[ast.literal_eval(node.slice)]
                    return self.whole.constant(name, item, self.loop.__module__)
        match node.slice:
            case ast.Slice(step=ast.UnaryOp()):
                return f"rt::reversed({self.expr(node.value)})"
            case ast.Constant(value=int() as at) if self.is_tuple(node.value):
                return f"rt::get<{at}>({self.expr(node.value)})"
        return f"rt::ld({self.expr(node.value)}, {self.index(node.slice)})"

    def is_tuple(self, node: ast.expr) -> bool:
        """Whether a name is a tuple of this function, made by commas."""
        if not isinstance(node, ast.Name):
            return False
        return any(
            isinstance(s, ast.Assign)
            and isinstance(s.targets[0], ast.Name)
            and s.targets[0].id == node.id
            and isinstance(s.value, ast.Tuple)
            for s in ast.walk(self.tree)
        ) or (node.id in self.parameters and self._noted_tuple(node.id))

    def _noted_tuple(self, name: str) -> bool:
        note = next(a.annotation for a in self.tree.args.args if a.arg == name)
        is_tuple = isinstance(note, ast.Subscript) and isinstance(note.value, ast.Name)
        return is_tuple and note.value.id == "tuple"  # type: ignore[union-attr]

    def compare(self, node: ast.Compare) -> str:
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
            items = node.comparators[0]
            assert isinstance(items, ast.Tuple)
            one = self.expr(node.left)
            found = " || ".join(f"{one} == {self.expr(e)}" for e in items.elts)
            return f"({found})" if isinstance(node.ops[0], ast.In) else f"(!({found}))"
        values = [self.expr(node.left), *(self.expr(c) for c in node.comparators)]
        parts = [
            f"{_COMPARE[type(op)]}({values[i]}, {values[i + 1]})" for i, op in enumerate(node.ops)
        ]
        return parts[0] if len(parts) == 1 else f"({' && '.join(parts)})"

    def call(self, node: ast.Call) -> str:
        """A call: of a loop, of Python, of NumPy, or of an array's method."""
        match node.func:
            case ast.Name(id="len"):
                return f"rt::len({self.expr(node.args[0])})"
            case ast.Name(id="int"):
                return f"I({self.expr(node.args[0])})"
            case ast.Name(id="float"):
                return f"double({self.expr(node.args[0])})"
            case ast.Name(id="bool"):
                return f"bool({self.expr(node.args[0])})"
            case ast.Name(id="max" | "min" as word):
                return f"rt::{word}({self.arguments(node)})"
            case ast.Name(id=name):
                return self.called(self.loop.__globals__[name], node)
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="np"), attr="random")):
                word = node.func.attr
                if word not in _RANDOM:
                    raise self.unsupported(node)
                return f"rt::{word}({self.arguments(node)})"
            case ast.Attribute(value=ast.Name(id="np"), attr=word):
                return self.numpy(word, node)
            case ast.Attribute(value=ast.Name(id=holder), attr=word) if holder not in self.locals:
                return self.called(getattr(self.loop.__globals__[holder], word), node)
            case ast.Attribute(attr="sum") if node.keywords:
                return f"rt::sum_down({self.expr(node.func.value)})"
            case ast.Attribute(attr="sum"):
                return f"rt::sum({self.expr(node.func.value)})"
            case ast.Attribute(attr="astype"):
                return f"rt::as<{_dtype(node.args[0])}>({self.expr(node.func.value)})"
            case ast.Attribute(attr=word) if word in _METHODS:
                return f"{_METHODS[word]}({self.expr(node.func.value)})"
        raise self.unsupported(node)

    def called(self, found: Any, node: ast.Call) -> str:
        inner = getattr(found, "__wrapped__", found)
        if inner in self.whole.known:
            return f"{self.whole.function(inner)}({self.arguments(node)})"
        if isinstance(found, type) and issubclass(found, tuple):
            return f"{self.whole.tuple_of(found)}({self.arguments(node)})"
        raise self.unsupported(node)

    def arguments(self, node: ast.Call) -> str:
        if node.keywords:
            raise self.unsupported(node)
        return ", ".join(f"rt::arg({self.expr(a)})" for a in node.args)

    def numpy(self, word: str, node: ast.Call) -> str:
        args = node.args
        if word in _NUMPY:
            return f"{_NUMPY[word]}({self.arguments(node)})"
        if word in DTYPES:
            return f"{DTYPES[word]}({self.expr(args[0])})"
        if word == "argsort":
            return f"rt::argsort({self.expr(args[0])})"
        if word == "array" and isinstance(args[0], ast.List):
            return f"rt::array<I>({', '.join(self.expr(e) for e in args[0].elts)})"
        if word in ("zeros", "empty", "ones", "full"):
            shape = args[0].elts if isinstance(args[0], ast.Tuple) else [args[0]]
            sizes = ", ".join(f"I({self.expr(e)})" for e in shape)
            if word in ("zeros", "empty"):
                kind = _dtype(args[1]) if len(args) > 1 else "double"
                return f"rt::{word}<{kind}>({sizes})"
            value = "1" if word == "ones" else self.expr(args[1])
            rest = args[1:] if word == "ones" else args[2:]
            kind = f"std::decay_t<decltype(rt::val({value}))>" if word == "full" else "double"
            kind = _dtype(rest[0]) if rest else kind
            return f"rt::full<{kind}>({value}, {sizes})"
        raise self.unsupported(node)

    def name(self) -> str:
        self.fresh += 1
        return f"_{self.fresh}"

    def unsupported(self, node: ast.AST) -> Unsupported:
        where = f"{self.loop.__module__}.{self.loop.__name__}"
        return Unsupported(f"{where}: no translation of `{ast.unparse(node)}`")


class Declared:
    """Where names are declared: where they are set first, or above a statement that holds that."""

    def __init__(self) -> None:
        self.here: dict[ast.stmt, set[str]] = {}
        self.above: dict[ast.stmt, dict[str, ast.expr]] = {}


def _declared(tree: ast.FunctionDef, parameters: set[str]) -> Declared:
    found = Declared()
    uses: dict[str, list[tuple[tuple[ast.AST, ...], ast.stmt, ast.expr | None]]] = {}
    _collect(tree.body, (tree,), {}, uses)
    noted = {
        s.target.id
        for s in ast.walk(tree)
        if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
    }
    for name, every in uses.items():
        if name in parameters or name in noted or not any(value for _, _, value in every):
            continue
        for statement, value in _placed(every) or [_above(every, 0)]:
            if value is None:
                found.here.setdefault(statement, set()).add(name)
            else:
                found.above.setdefault(statement, {})[name] = value
    return found


def _shared(every: list[Any]) -> int:
    """How deep the blocks go that all uses lie in."""
    paths, depth = [path for path, _, _ in every], 0
    while all(len(p) > depth and p[depth] is paths[0][depth] for p in paths):
        depth += 1
    return depth


Placed = tuple[ast.stmt, ast.expr | None]  # declared by a statement, or above it as a value is


def _placed(every: list[Any]) -> list[Placed] | None:
    """Where to declare a name; none where it is used before this block has set it."""
    depth, at = _shared(every), 0
    found: list[Placed] = []
    while at < len(every):
        path, statement, value = every[at]
        if len(path) == depth and value is not None:
            return [*found, (statement, None)]
        if len(path) == depth:
            return [_above(every, depth)] if at else None
        group = [u for u in every[at:] if len(u[0]) > depth and u[0][depth] is path[depth]]
        inside = _placed(group)
        if inside is None:
            return [_above(every, depth)] if at or _is_set(group) else None
        found += inside
        at += len(group)
    return found


def _is_set(every: list[Any]) -> bool:
    """Whether the first that happens to a name is that it is set."""
    return every[0][2] is not None


def _above(every: list[Any], depth: int) -> Placed:
    """A name that is set in a statement and used behind it: declared above that."""
    path, statement, _ = every[0]
    while len(path) > depth and not isinstance(path[depth], ast.stmt):
        depth -= 1
    values = [(u[2], u[0]) for u in every if u[2] is not None]
    inside = {
        step.target.id
        for _, where in values
        for step in where[max(depth, 1) :]
        if isinstance(step, ast.For) and isinstance(step.target, ast.Name)
    }
    plain = [
        v for v, _ in values if not inside & {n.id for n in ast.walk(v) if isinstance(n, ast.Name)}
    ]
    return (path[depth] if len(path) > depth else statement), (plain or [values[0][0]])[0]


class Arm(ast.AST):
    """One of the blocks of a statement."""


def _collect(body: list[ast.stmt], path: Any, loops: Any, uses: Any) -> None:
    for s in body:
        _note_names(s, path, loops, uses)
        match s:
            case ast.If():
                for arm in (s.body, s.orelse):
                    _collect(arm, (*path, s, Arm()), loops, uses)
            case ast.While():
                _collect(s.body, (*path, s, Arm()), loops, uses)
            case ast.For(target=ast.Name(id=name)):
                _collect(s.body, (*path, s, Arm()), {**loops, name: s}, uses)


def _note_names(s: ast.stmt, path: Any, loops: Any, uses: Any) -> None:
    """Every name that a statement itself uses, with what it is set to."""
    sets: dict[str, ast.expr] = {}
    if isinstance(s, ast.Assign):
        for target in s.targets:
            sets |= _targets(target, s.value)
    for node in _own(s):
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and name.id not in loops:
                uses.setdefault(name.id, []).append((path, s, sets.get(name.id)))


def _targets(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    if isinstance(target, ast.Name):
        return {target.id: value}
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
        found: dict[str, ast.expr] = {}
        for one, of in zip(target.elts, values, strict=True):
            found |= _targets(one, of)
        return found
    return {}


def _own(s: ast.stmt) -> Iterator[ast.AST]:
    match s:
        case ast.If() | ast.While():
            yield s.test
        case ast.For():
            yield s.iter
        case ast.Assign():  # what is set comes first: it may be declared by it
            yield from s.targets
            yield s.value
        case _:
            yield s


def _stored(tree: ast.FunctionDef) -> set[str]:
    return {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _rows(tree: ast.FunctionDef) -> set[str]:
    """Names that are set to rows of places."""
    found = {"order"} & {a.arg for a in tree.args.args}
    for s in ast.walk(tree):
        match s:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="flatnonzero" | "argsort")),
            ):
                found.add(name)
    return found


def _tree(loop: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(loop))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _note(text: Any) -> ast.expr:
    words = text if isinstance(text, str) else getattr(text, "__forward_arg__", "") or text.__name__
    return ast.parse(words, mode="eval").body


def _dtype(node: ast.expr) -> str:
    assert isinstance(node, ast.Attribute)
    return DTYPES[node.attr]


def _name(name: str) -> str:
    return f"{name}_" if name in _WORDS else name


def _item(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _real(value) if isinstance(value, float) else str(value)


def _real(value: float) -> str:
    if value != value:
        return "rt::nan"
    if value in (float("inf"), float("-inf")):
        return "rt::inf" if value > 0 else "-rt::inf"
    return f"double({value!r})"
