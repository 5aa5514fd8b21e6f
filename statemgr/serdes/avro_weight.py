"""Estimates how much memory an Avro value takes when it is decoded, without decoding it. Pure.

An array says how many items it has, and items may take no bytes (``null``), so a few bytes can stand for gigabytes. A
schema that refers to itself nests as deeply as the bytes say, on the stack of the decoder. So a :class:`Weight` first
walks the bytes of a value with the writer's schema, and adds up the memory.

With most schemas few bytes cannot take much memory, and nesting is shallow. The schema alone shows this, and their
values are not walked.
Source: Apache Avro specification, "Binary encoding".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: Levels of records, arrays and maps in each other in a value.
MAX_DEPTH = 256
#: Levels of a value in Python, before it is written: a member of a union may have a level more.
_PYTHON_DEPTH = 2 * MAX_DEPTH
_UNBOUNDED = float("inf")
#: Bytes of memory of an object, on 64 bits, roughly.
_OBJECT = {"null": 0, "boolean": 0, "int": 32, "long": 32, "float": 24, "double": 24, "bytes": 40, "string": 56}
_FIXED_SIZE = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_CONTAINER, _POINTER, _ENTRY = 64, 9, 104
_RECORD, _FIELD = 136, 40
_LOGICAL = 64


class TooHeavy(ValueError):
    """The value would take more memory than its size allows, or is nested too deeply."""


def _too_deep() -> TooHeavy:
    return TooHeavy("it is nested too deeply")


class Truncated(ValueError):
    """The bytes end before the value does."""


class Weight:
    """Checks values of one schema.

    Args:
        schema: as fastavro's ``parse_schema`` gives it.
        ratio: bytes of memory that each byte of a value may take,
        free: in addition to this many bytes for any value.
    """

    def __init__(self, schema: Any, *, ratio: int, free: int) -> None:
        self._type = _Types().of(schema)
        self._ratio, self._free = ratio, free

    def check(self, data: bytes, start: int = 0) -> None:
        """Check the value that begins at ``start``. Raises: TooHeavy, Truncated."""
        size = len(data) - start
        allowed = self._free + self._ratio * size
        if self._type.most * size <= allowed and self._type.depth <= MAX_DEPTH:
            return
        try:
            self._type.walk(_Scale(data, allowed), start)
        except RecursionError:
            raise _too_deep() from None

    def check_depth(self, value: Any) -> None:
        """Check a value before it is written: the encoder nests on its own stack. Raises: TooHeavy."""
        if self._type.depth <= MAX_DEPTH:
            return
        left = [(value, 1)]
        while left:
            at, depth = left.pop()
            if depth > _PYTHON_DEPTH:
                raise _too_deep()
            if isinstance(at, Mapping):
                left.extend((item, depth + 1) for item in at.values())
            elif isinstance(at, list | tuple):
                left.extend((item, depth + 1) for item in at)


class _Scale:
    """The bytes of a value, and the memory that is left for it."""

    def __init__(self, data: bytes, allowed: float) -> None:
        self.data, self._left = data, allowed
        self._depth = 0

    def descend(self, levels: int) -> None:
        """Go into a record, an array or a map (1), or out of it (-1)."""
        self._depth += levels
        if self._depth > MAX_DEPTH:
            raise _too_deep()

    def add(self, memory: float) -> None:
        self._left -= memory
        if self._left < 0:
            raise TooHeavy("it would take far more memory than its size")

    def skip(self, size: int, at: int) -> int:
        """The position after ``size`` bytes."""
        if not 0 <= size <= len(self.data) - at:
            raise Truncated("the bytes end within a value")
        return at + size

    def long(self, at: int) -> tuple[int, int]:
        """A zigzag variable-length number, and the position after it."""
        value = shift = 0
        while True:
            if at >= len(self.data) or shift > 63:
                raise Truncated("a number is not whole")
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1), at
            shift += 7

    def block(self, at: int) -> tuple[int, int]:
        """The number of items that follow. After a negative number comes also their size in bytes."""
        count, at = self.long(at)
        if count < 0:
            _, at = self.long(at)
        return abs(count), at


class _Type(NamedTuple):
    """``size``: the fewest bytes of a value. ``memory``: the memory that they take. ``most``: the most memory for one
    byte, anywhere in a value. ``walk``: weighs the value at a position and returns the position after it.
    ``depth``: most levels of records, arrays and maps."""

    size: float
    memory: float
    most: float
    walk: Callable[[_Scale, int], int]
    depth: float = 0


class _Types:
    """Makes the types of one schema."""

    def __init__(self) -> None:
        self._named: dict[str, _Type] = {}

    def of(self, schema: Any) -> _Type:
        """``most`` is infinite for an array whose items take no bytes, and with ``depth`` for a schema that refers to
        itself."""
        if isinstance(schema, list):
            return _union([self.of(branch) for branch in schema])
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        extra = _LOGICAL if isinstance(schema, Mapping) and "logicalType" in schema else 0
        match kind:
            case Mapping() | list():
                return self.of(kind)
            case "record" | "error":
                found = self._record(schema)
            case "array":
                return _items(self.of(schema["items"]), _POINTER)
            case "map":
                return _items(_entry(self.of(schema["values"])), _ENTRY)
            case "fixed":
                found = _fixed(schema["size"], _OBJECT["bytes"] + schema["size"] + extra)
            case "enum":
                found = _number(0)
            case "bytes" | "string":
                return _text(_OBJECT[kind] + extra)
            case "int" | "long":
                return _number(_OBJECT[kind] + extra)
            case "null" | "boolean" | "float" | "double":
                return _fixed(_FIXED_SIZE[kind], _OBJECT[kind] + extra)
            case _:
                # one that is not known yet refers to itself
                itself = _Type(1, 0, _UNBOUNDED, lambda s, at: self._named[kind].walk(s, at), _UNBOUNDED)
                return self._named.get(kind) or itself
        self._named[schema["name"]] = found
        return found

    def _record(self, schema: Mapping[str, Any]) -> _Type:
        fields = [self.of(field["type"]) for field in schema["fields"]]
        own = _RECORD + _FIELD * len(fields)

        def walk(scale: _Scale, at: int) -> int:
            scale.add(own)
            scale.descend(1)
            for field in fields:
                at = field.walk(scale, at)
            scale.descend(-1)
            return at

        size, memory = sum(field.size for field in fields), own + sum(field.memory for field in fields)
        most = max([memory / max(size, 1), *(field.most for field in fields)])
        return _Type(size, memory, most, walk, 1 + max((field.depth for field in fields), default=0))


def _union(branches: list[_Type]) -> _Type:
    def walk(scale: _Scale, at: int) -> int:
        number, at = scale.long(at)
        if not 0 <= number < len(branches):
            raise Truncated("a union has no such branch")
        return branches[number].walk(scale, at)

    most = max(max(branch.most, branch.memory / (branch.size + 1)) for branch in branches)
    return _Type(1, max(branch.memory for branch in branches), most, walk, max(branch.depth for branch in branches))


def _entry(value: _Type) -> _Type:
    key = _text(_OBJECT["string"])
    most = max(key.most, value.most)

    def walk(scale: _Scale, at: int) -> int:
        return value.walk(scale, key.walk(scale, at))

    return _Type(key.size + value.size, key.memory + value.memory, most, walk, value.depth)


def _items(item: _Type, slot: float) -> _Type:
    is_nothing = not item.size and not item.memory

    def walk(scale: _Scale, at: int) -> int:
        scale.add(_CONTAINER)
        scale.descend(1)
        while True:
            count, at = scale.block(at)
            if not count:
                scale.descend(-1)
                return at
            scale.add(count * slot)
            for _ in range(0 if is_nothing else count):
                at = item.walk(scale, at)

    each = (item.memory + slot) / item.size if item.size else _UNBOUNDED
    return _Type(1, _CONTAINER, max(_CONTAINER, each, item.most), walk, 1 + item.depth)


def _text(memory: float) -> _Type:
    def walk(scale: _Scale, at: int) -> int:
        size, at = scale.long(at)
        end = scale.skip(size, at)
        scale.add(memory + size)
        return end

    return _Type(1, memory / 2, memory / 2, walk)  # empty texts are one object


def _number(memory: float) -> _Type:
    def walk(scale: _Scale, at: int) -> int:
        scale.add(memory)
        return scale.long(at)[1]

    return _Type(1, memory / 2, memory / 2, walk)  # numbers of one byte are shared objects


def _fixed(size: int, memory: float) -> _Type:
    def walk(scale: _Scale, at: int) -> int:
        scale.add(memory)
        return scale.skip(size, at)

    return _Type(size, memory, memory / max(size, 1), walk)
