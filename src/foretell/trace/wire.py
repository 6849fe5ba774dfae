"""Protocol-buffer bytes read and written by hand: numbers, lengths and fields, no more.

Chakra's messages are small and fixed; a dependency for them would be larger than they are.
Encoding: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Value = int | bytes


def messages(data: bytes) -> Iterator[bytes]:
    """The messages of a file in which each is preceded by its length."""
    at = 0
    while at < len(data):
        length, at = _varint(data, at)
        if at + length > len(data):
            raise ValueError(f"a message of {length} bytes is cut short at byte {at}")
        yield data[at : at + length]
        at += length


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of every field; nested messages and text as bytes, numbers as they are."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError(f"field number 0 at byte {at}")
        if kind == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        length, at = _varint(message, at) if kind == BYTES else (_FIXED.get(kind, -1), at)
        if length < 0 or at + length > len(message):
            raise ValueError(f"field {number} is cut short or of unknown kind {kind}")
        yield number, message[at : at + length]
        at += length


_FIXED = {FIXED64: 8, FIXED32: 4}


def numbers(value: Value) -> list[int]:
    """Repeated numbers, packed or not."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        one, at = _varint(value, at)
        found.append(one)
    return found


def doubles(value: bytes) -> list[float]:
    """Packed doubles."""
    return list(struct.unpack(f"<{len(value) // 8}d", value[: len(value) // 8 * 8]))


def signed(value: int) -> int:
    """A 64-bit number that may be negative."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"a number is cut short at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def varint(value: int) -> bytes:
    """A number as bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def double_field(number: int, value: float) -> bytes:
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)


def packed_field(number: int, values: Iterable[int]) -> bytes:
    return bytes_field(number, b"".join(map(varint, values)))


def doubles_field(number: int, values: Iterable[float]) -> bytes:
    return bytes_field(number, b"".join(struct.pack("<d", v) for v in values))


def framed(message: bytes) -> bytes:
    """A message preceded by its length."""
    return varint(len(message)) + message
