"""Refuses values that fastavro would store as other values. Pure.

Its writer cuts off the fraction of a number, takes any object for a boolean, lets a float become infinite, drops fields
that the schema lacks, and makes lists of texts and maps. In a union of several types it looks for one that fits, so
these need no check.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

#: Raises: ValueError that names the place; any error of Python's for an object of another kind.
Check = Callable[[Any], None]

_BITS = {"int": 32, "long": 64}
#: A member of a record that names the record, among several in a union.
_TYPE = "-type"


class Checks:
    """Makes the checks of one schema, as fastavro's ``parse_schema`` gives it."""

    def __init__(self) -> None:
        self._named: dict[str, Check] = {}

    def of(self, schema: Any, at: str = "the value") -> Check | None:
        """The check of a type. ``at``: where the type is, for the error. None if every value is stored as it is."""
        if isinstance(schema, list):
            members = [self.of(member, at) for member in schema if member != "null"]
            return _nullable(members[0]) if len(members) == 1 and members[0] is not None else None
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        is_logical = isinstance(schema, Mapping) and "logicalType" in schema
        found: Check | None
        match kind:
            case Mapping() | list():
                return self.of(kind, at)
            case "record" | "error":
                found = self._record(schema)
            case "array":
                found = _array(self.of(schema["items"], at), at)
            case "map":
                found = _map(self.of(schema["values"], at))
            case "int" | "long":
                found = _whole(_BITS[kind], at)
                return _if_float(found) if is_logical else found
            case "boolean":
                found = _boolean(at)
            case "float":
                found = _float(at)
            case _:
                found = self._named.get(kind)
        return None if is_logical else found  # other objects stand for its values

    def _record(self, schema: Mapping[str, Any]) -> Check:
        names = {_TYPE, *(field["name"] for field in schema["fields"])}
        fields: list[tuple[str, Check]] = []

        def check(value: Any) -> None:
            if not value.keys() <= names:
                raise ValueError(f"{schema['name']} has no field {min(map(repr, value.keys() - names))}")
            for name, field in fields:
                if name in value:
                    field(value[name])

        self._named[schema["name"]] = check
        for field in schema["fields"]:
            found = self.of(field["type"], f"{schema['name']}.{field['name']}")
            if found is not None:
                fields.append((field["name"], found))
        return check


def _nullable(check: Check) -> Check:
    def nullable(value: Any) -> None:
        if isinstance(value, tuple):  # a pair has the name of its type first
            value = value[-1]
        if value is not None:
            check(value)

    return nullable


def _array(item: Check | None, at: str) -> Check:
    def check(value: Any) -> None:
        if isinstance(value, str | bytes | Mapping):
            raise ValueError(f"{at} takes a list, not {type(value).__name__}")
        if item is not None:
            for one in value:
                item(one)

    return check


def _map(item: Check | None) -> Check | None:
    if item is None:
        return None

    def check(value: Any) -> None:
        for one in value.values():
            item(one)

    return check


def _whole(bits: int, at: str) -> Check:
    most = 1 << (bits - 1)

    def check(value: Any) -> None:
        if not (type(value) is int or int(value) == value) or not -most <= value < most:
            raise ValueError(f"{at} takes whole numbers of {bits} bits")

    return check


def _if_float(check: Check) -> Check:
    return lambda value: check(value) if isinstance(value, float) else None


def _boolean(at: str) -> Check:
    def check(value: Any) -> None:
        if bool(value) != value:
            raise ValueError(f"{at} takes True or False")

    return check


def _float(at: str) -> Check:
    def check(value: Any) -> None:
        try:
            struct.pack("<f", value)
        except OverflowError:
            raise ValueError(f"{at} takes numbers that fit into 32 bits") from None

    return check
