"""One grammar for what a person types: `name:field=value,field=value`.

What-ifs, planners, workloads and clusters are frozen dataclasses whose fields are their options.
`Spec` gives each a `str()` that parses back to an equal object, so that the command line, the
history of a graph, plan files and test names all say the same thing in the same words.
No braces, quotes or spaces are needed: a shell leaves a spec alone.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from foretell.errors import InputError, unknown

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A frozen dataclass that prints as `name:field=value` and parses back."""

    name: ClassVar[str] = ""

    def __str__(self) -> str:
        changed = [
            f"{f.name}={write(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Make one from the text of its options."""
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in options:
            if key not in fields:
                raise unknown(f"option of `{cls.name}`", key, fields)
        missing = [n for n, f in fields.items() if _is_required(f) and n not in options]
        if missing:
            raise InputError(
                f"`{cls.name}` needs {', '.join(f'`{m}`' for m in missing)}",
                hint=f"write `{cls.name}:{','.join(f'{m}=…' for m in missing)}`",
            )
        values = {k: read(v, hints[k], f"`{cls.name}` option `{k}`") for k, v in options.items()}
        return cls(**values)


def split(text: str) -> tuple[str, dict[str, str]]:
    """`name:a=1,b=2` → (`name`, {a: 1, b: 2}), all still text."""
    name, _, rest = text.strip().partition(":")
    if not name:
        raise InputError(f"empty name in spec `{text}`", hint="write `name:field=value,…`")
    return name, options(rest, where=text)


def options(text: str, where: str = "") -> dict[str, str]:
    """`a=1,b=2` → {a: 1, b: 2}; a value may hold anything but a comma."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(
                f"`{item}` in `{where or text}` is not `field=value`",
                hint="separate options with commas, without spaces",
            )
        if key in found:
            raise InputError(f"`{key}` is given twice in `{where or text}`")
        found[key.replace("-", "_")] = value
    return found


def parse(text: str, kinds: Mapping[str, type[Spec]], what: str) -> Spec:
    """The object a spec stands for, from a table of what may be named."""
    name, given = split(text)
    if name not in kinds:
        raise unknown(what, name, kinds)
    return kinds[name].of(given)


def write(value: Any) -> str:
    """The text of one option's value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, tuple):
        return "+".join(map(write, value))
    return str(value)


def read(text: str, kind: Any, where: str) -> Any:
    """The value of one option from its text, as the type its field declares."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if type(None) in args and text.lower() == "none":
            return None
        return read(text, next(a for a in args if a is not type(None)), where)
    if origin is tuple:
        return tuple(read(part, args[0], where) for part in text.split("+")) if text else ()
    if origin is typing.Literal:
        if text not in args:
            raise unknown(f"value of {where}", text, map(str, args))
        return text
    return _read_plain(text, kind, where)


def _read_plain(text: str, kind: Any, where: str) -> Any:
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise InputError(f"{where} is `{text}`, not yes or no")
    try:
        return kind(text)
    except ValueError:
        noun = {int: "a whole number", float: "a number"}.get(kind, f"a {kind.__name__}")
        raise InputError(f"{where} is `{text}`, not {noun}") from None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
