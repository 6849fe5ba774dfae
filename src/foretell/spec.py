"""One grammar for what a person types: `name:field=value,field=value`.

What-ifs, planners, workloads and clusters are frozen dataclasses whose fields are their options.
`Spec` gives each a `str()` that parses back to an equal object, so that the command line, the
history of a graph, plan files and test names all say the same thing in the same words.
No braces, quotes or spaces are needed: a shell leaves a spec alone. What the grammar would take
apart inside a text is written as in a URL: `%2C` is a comma, `%20` a space, `%25` a per cent sign.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from foretell.errors import InputError, unknown

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_MOST, _SHOWN = 1 << 63, 200  # of a whole number; letters of a value that is wrong
_APART = re.compile(r"[%,\s]")  # what `options` would take apart or strip
_CODES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A frozen dataclass that prints as `name:field=value` and parses back."""

    name: ClassVar[str] = ""

    def __str__(self) -> str:
        hints = typing.get_type_hints(type(self))
        changed = [
            f"{f.name}={_written(getattr(self, f.name), hints[f.name])}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != _default(f)
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
    """`a=1,b=2` → {a: 1, b: 2}; a value may hold anything but a comma and spaces around it."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise InputError(
                f"`{item}` in `{where or text}` is not `field=value`",
                hint="separate options with commas, without spaces",
            )
        if key in found:
            raise InputError(
                f"`{key}` is given twice in `{where or text}`", hint="keep one of them"
            )
        found[key] = value.strip()
    return found


def parse(text: str, kinds: Mapping[str, type[Spec]], what: str) -> Spec:
    """The object a spec stands for, from a table of what may be named."""
    name, given = split(text)
    if name not in kinds:
        raise unknown(what, name, kinds)
    return kinds[name].of(given)


def is_whole(text: str) -> bool:
    """Whether a text is a whole number of at most 18 ASCII digits, as `int` reads it."""
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 19


def write(value: Any) -> str:
    """The text of one option's value, such that `read` gives it back."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _write_float(float(value))
    if isinstance(value, tuple):
        return _write_tuple(value)
    return _escaped(value) if isinstance(value, str) else str(value)


def read(text: str, kind: Any, where: str) -> Any:
    """The value of one option from its text, as the type its field declares."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(text, args, where)
    if origin is tuple:
        return _read_tuple(text, args, where)
    if origin is typing.Literal:
        found = [a for a in args if text == write(a) or _unescaped(text) == a]
        if not found:
            raise unknown(f"value of {where}", text, map(write, args))
        return found[0]
    return _read_plain(text, kind, where)


def _written(value: Any, kind: Any) -> str:
    """The text of a field's value; a text `none` where nothing would be read is written in code."""
    text = write(value)
    if isinstance(value, str) and text.lower() == "none" and type(None) in typing.get_args(kind):
        return _code(text[0]) + text[1:]
    return text


def _write_float(value: float) -> str:
    if value.is_integer() and abs(value) < 1e15:  # beyond it the digits would no longer be short
        return repr(int(value))
    return repr(value).replace("e+", "e")  # `+` separates the items of a tuple


def _write_tuple(value: tuple[Any, ...]) -> str:
    if value == ("",) or any(isinstance(item, tuple) for item in value):
        raise InputError(
            f"{value!r} cannot be written as an option",
            hint="the items of a tuple are numbers or words, joined by `+`",
        )
    return "+".join(write(item).replace("+", _code("+")) for item in value)


def _escaped(text: str) -> str:
    return _APART.sub(lambda found: _code(found[0]), text)


def _code(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def _unescaped(text: str) -> str:
    return _CODES.sub(lambda c: bytes.fromhex(c[0].replace("%", "")).decode(errors="replace"), text)


def _read_union(text: str, args: tuple[Any, ...], where: str) -> Any:
    """None where it is allowed and given, else the value as the first type that accepts it."""
    if type(None) in args and text.lower() == "none":
        return None
    kinds = [a for a in args if a is not type(None)]
    for kind in kinds[:-1]:
        try:
            return read(text, kind, where)
        except InputError:
            continue
    return read(text, kinds[-1], where)


def _read_tuple(text: str, args: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    parts = text.split("+") if text else []
    if args[-1] is Ellipsis:
        return tuple(read(part, args[0], where) for part in parts)
    if len(parts) != len(args):
        raise InputError(
            f"{where} is `{text}`: {len(parts)} values, not {len(args)}",
            hint="join them with `+`",
        )
    return tuple(read(part, kind, where) for part, kind in zip(parts, args, strict=True))


def _read_plain(text: str, kind: Any, where: str) -> Any:
    if kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise InputError(f"{where} is `{text}`, not yes or no")
    try:
        value = kind(text if kind in (int, float) else _unescaped(text))
        if value != value or (kind is int and not -_MOST < value < _MOST):
            raise ValueError  # NaN is no number anybody could want
        return value
    except ValueError:
        noun = {int: "a whole number", float: "a number"}.get(kind, f"a {kind.__name__}")
        raise InputError(f"{where} is `{text[:_SHOWN]}`, not {noun}") from None


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
