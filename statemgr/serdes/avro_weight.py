"""How much memory an Avro value takes when it is decoded, found out without decoding it. Pure.

An array says how many items it has, and items may take no bytes (``null``): a few bytes can stand for gigabytes. A
schema that refers to itself nests as deeply as the bytes say, on the stack of the decoder. So the bytes of a value are
walked first, by the writer's schema, and their weight is added up.

Most schemas cannot make much of few bytes, which their compilation finds out; then nothing is walked.
Source: Apache Avro specification, "Binary encoding".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Levels of a value whose schema refers to itself.
MAX_DEPTH = 256
_UNBOUNDED = float("inf")
#: Bytes of memory of an object, on 64 bits, roughly.
_OBJECT = {"null": 0, "boolean": 0, "int": 32, "long": 32, "float": 24, "double": 24, "bytes": 40, "string": 56}
_FIXED_SIZE = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_POINTER = 9
_ENTRY = 104
_RECORD, _FIELD = 136, 40
_LOGICAL = 64

#: ``walk(data, position)`` → the position after the value.
_Walk = Callable[[bytes, int], int]


class TooHeavy(ValueError):
    """The value would take more memory than its size allows, or is nested too deeply."""


class Truncated(ValueError):
    """The bytes end within the value, or are none."""


class Weight:
    """Checks values of one schema.

    Args:
        schema: as fastavro's ``parse_schema`` gives it.
        ratio: bytes of memory that each byte of a value may take,
        free: beyond so many bytes for any value.
    """

    def __init__(self, schema: Any, *, ratio: int, free: int) -> None:
        self._schema = schema
        self._ratio, self._free = ratio, free
        self._factor = _Heaviest().of(schema)

    def check(self, data: bytes, start: int = 0) -> None:
        """Check the value that begins at ``start``. Raises: TooHeavy, Truncated."""
        size = len(data) - start
        allowed = self._free + self._ratio * size
        if self._factor * size <= allowed:
            return
        _Walker(self._schema, allowed).walk(data, start)


class _Heaviest:
    """The most memory that a byte of a value can become, by its schema."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._known: dict[str, tuple[float, float, float]] = {}

    def of(self, schema: Any) -> float:
        """Infinite for a schema with items of no bytes in an array, or one that refers to itself."""
        return self._of(schema)[2]

    def _of(self, schema: Any) -> tuple[float, float, float]:
        """Fewest bytes; memory then; most memory for a byte anywhere in it."""
        if isinstance(schema, list):
            branches = [self._of(branch) for branch in schema]
            most = max(max(most, memory / (size + 1)) for size, memory, most in branches)
            return 1, max(memory for _, memory, _ in branches), most
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        if isinstance(kind, Mapping | list):
            return self._of(kind)
        if kind in ("record", "error"):
            return self._of_record(schema)
        if kind == "array":
            return self._of_items(self._of(schema["items"]), _POINTER, 64)
        if kind == "map":
            size, memory, most = self._of(schema["values"])
            return self._of_items((size + 1, memory, most), _ENTRY + _OBJECT["string"], 64)
        extra = _LOGICAL if isinstance(schema, Mapping) and "logicalType" in schema else 0
        if kind == "fixed":
            found = (float(schema["size"]), _OBJECT["bytes"] + schema["size"] + extra)
            self._known[schema["name"]] = (*found, found[1] / max(found[0], 1))
            return self._known[schema["name"]]
        if kind == "enum":
            self._known[schema["name"]] = (1, 0, 1)
            return 1, 0, 1
        if kind in _OBJECT:
            size = float(_FIXED_SIZE.get(kind, 1))
            # the objects of a one-byte number or of an empty text are shared ones
            memory = (_OBJECT[kind] / 2 if kind in ("int", "long", "string", "bytes") else _OBJECT[kind]) + extra
            return size, memory, memory / max(size, 1)
        return self._known.get(kind, (1, 0, _UNBOUNDED))  # one that is not known yet refers to itself

    def _of_record(self, schema: Mapping[str, Any]) -> tuple[float, float, float]:
        fields = [self._of(field["type"]) for field in schema["fields"]]
        size = sum(found[0] for found in fields)
        memory = _RECORD + _FIELD * len(fields) + sum(found[1] for found in fields)
        most = max([memory / max(size, 1), *(found[2] for found in fields)])
        self._known[schema["name"]] = size, memory, most
        return size, memory, most

    def _of_items(self, item: tuple[float, float, float], slot: float, container: float) -> tuple[float, float, float]:
        size, memory, most = item
        each = (memory + slot) / size if size else _UNBOUNDED
        return 1, container, max(container, each, most)


class _Walker:
    """One walk over a value, with what it may weigh."""

    def __init__(self, schema: Any, allowed: float) -> None:
        self._left = allowed
        self._depth = 0
        self._named: dict[str, _Walk] = {}
        self._start = self._compile(schema)

    def walk(self, data: bytes, start: int) -> int:
        """The position after the value. Raises: TooHeavy, Truncated."""
        try:
            return self._start(data, start)
        except RecursionError:
            raise TooHeavy("it is nested too deeply") from None

    def _weighs(self, memory: float) -> None:
        self._left -= memory
        if self._left < 0:
            raise TooHeavy("it would take far more memory than its size")

    def _compile(self, schema: Any) -> _Walk:
        if isinstance(schema, list):
            return self._union([self._compile(branch) for branch in schema])
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        if isinstance(kind, Mapping | list):
            return self._compile(kind)
        match kind:
            case "record" | "error":
                return self._record(schema)
            case "array":
                return self._array(schema["items"])
            case "map":
                return self._map(self._compile(schema["values"]))
            case "fixed":
                self._named[schema["name"]] = self._fixed(schema["size"], _OBJECT["bytes"] + schema["size"])
                return self._named[schema["name"]]
            case "enum":
                self._named[schema["name"]] = self._number(0)
                return self._named[schema["name"]]
            case "bytes" | "string":
                return self._text(_OBJECT[kind])
            case "int" | "long":
                return self._number(_OBJECT[kind])
            case "null" | "boolean" | "float" | "double":
                return self._fixed(_FIXED_SIZE[kind], _OBJECT[kind])
        return lambda data, at: self._named[kind](data, at)

    def _record(self, schema: Mapping[str, Any]) -> _Walk:
        fields: list[_Walk] = []
        own = _RECORD + _FIELD * len(schema["fields"])

        def walk(data: bytes, at: int) -> int:
            self._weighs(own)
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise TooHeavy("it is nested too deeply")
            for field in fields:
                at = field(data, at)
            self._depth -= 1
            return at

        self._named[schema["name"]] = walk
        fields.extend(self._compile(field["type"]) for field in schema["fields"])
        return walk

    def _union(self, branches: list[_Walk]) -> _Walk:
        def walk(data: bytes, at: int) -> int:
            number, at = _long(data, at)
            if not 0 <= number < len(branches):
                raise Truncated("a union has no such branch")
            return branches[number](data, at)

        return walk

    def _array(self, items: Any) -> _Walk:
        item = self._compile(items)
        takes_none = isinstance(items, str) and items == "null"

        def walk(data: bytes, at: int) -> int:
            self._weighs(64)
            while True:
                count, at = _block(data, at)
                if not count:
                    return at
                self._weighs(count * _POINTER)
                for _ in range(0 if takes_none else count):
                    at = item(data, at)

        return walk

    def _map(self, value: _Walk) -> _Walk:
        key = self._text(_OBJECT["string"])

        def walk(data: bytes, at: int) -> int:
            self._weighs(64)
            while True:
                count, at = _block(data, at)
                if not count:
                    return at
                self._weighs(count * _ENTRY)
                for _ in range(count):
                    at = value(data, key(data, at))

        return walk

    def _text(self, memory: int) -> _Walk:
        def walk(data: bytes, at: int) -> int:
            size, at = _long(data, at)
            if not 0 <= size <= len(data) - at:
                raise Truncated("a text is longer than the bytes that are left")
            self._weighs(memory + size)
            return at + size

        return walk

    def _number(self, memory: int) -> _Walk:
        def walk(data: bytes, at: int) -> int:
            self._weighs(memory)
            return _long(data, at)[1]

        return walk

    def _fixed(self, size: int, memory: int) -> _Walk:
        def walk(data: bytes, at: int) -> int:
            self._weighs(memory)
            if size > len(data) - at:
                raise Truncated("the bytes end within a value")
            return at + size

        return walk


def _long(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag variable-length number, and the position after it."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Truncated("a number is not whole")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7


def _block(data: bytes, at: int) -> tuple[int, int]:
    """How many items follow; a negative number is followed by their size, too."""
    count, at = _long(data, at)
    if count < 0:
        _, at = _long(data, at)
    return abs(count), at
