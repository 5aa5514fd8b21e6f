"""Refuses values that fastavro would store as other values. Pure.

Its writer cuts off the fraction of a number, what a date or a time has no place for, and time zones. It takes any
object for a boolean, bytes for a decimal, lets a float become infinite, drops fields that the schema lacks, and makes
lists of texts and maps. In a union of several types it takes the first one that fits a value, also a date for a text,
or the record with the most of its fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, NamedTuple

from fastavro.write import LOGICAL_WRITERS

from statemgr.errors import ConfigError

#: Raises: ValueError that names the place; any error of Python's for an object of another kind.
Check = Callable[[Any], None]

_BITS = {"int": 32, "long": 64}
#: The format for ``struct``, and bits, of a number with a fraction.
_REALS = {"float": ("<f", 32), "double": ("<d", 64)}
#: The objects that stand for the values of logical types, where some of them would be stored as others.
_OBJECTS = {
    "int-date": date,
    "int-time-millis": time,
    "long-time-micros": time,
    "long-timestamp-millis": datetime,
    "long-timestamp-micros": datetime,
    "long-local-timestamp-millis": datetime,
    "long-local-timestamp-micros": datetime,
    "bytes-decimal": Decimal,
    "fixed-decimal": Decimal,
}
#: A member of a record that names the record, among several in a union.
_TYPE = "-type"


class _Named(NamedTuple):
    """A type that has a name: a record with its fields, an enum, or a fixed of some bytes. Or a member of a union.

    ``objects``: what stands for its values.
    """

    kind: str
    fields: frozenset[str] = frozenset()
    check: Check | None = None
    size: int | None = None
    objects: tuple[type, ...] = ()


class Checks:
    """Makes the checks of one schema, as fastavro's ``parse_schema`` gives it."""

    def __init__(self) -> None:
        self._named: dict[str, _Named] = {}

    def of(self, schema: Any, at: str = "the value") -> Check | None:
        """The check of a type. ``at``: where the type is, for the error. None if every value is stored as it is.

        Raises: ConfigError for a union with several members of one type.
        """
        if isinstance(schema, list):
            names = [_name_of(member) for member in schema]
            if twice := {name for name in names if names.count(name) > 1}:
                # one of them would hide the other, and take its values
                raise ConfigError(
                    f"{at} is a union with several members of the type {min(twice)}, which Avro forbids",
                    hint="if values were written with this schema, keep it, and append a version in which the union "
                    "has each type once",
                )
            checks = [(member, self.of(member, at)) for member in schema if member != "null"]
            if len(checks) == 1:
                return _nullable(checks[0][1])
            return self._union(checks, at) if any(check for _, check in checks) else None
        kind = schema["type"] if isinstance(schema, Mapping) else schema
        logical = f"{kind}-{schema.get('logicalType')}" if isinstance(schema, Mapping) else ""
        found: Check | None
        match kind:
            case Mapping() | list():
                return self.of(kind, at)
            case "record" | "error":
                found = self._record(schema)
            case "enum" | "fixed":
                found = None
            case "array":
                found = _array(self.of(schema["items"], at), at)
            case "map":
                found = _map(self.of(schema["values"], at))
            case "int" | "long":
                found = _whole(_BITS[kind], at)
            case "boolean":
                found = _boolean(at)
            case "float" | "double":
                found = _real(*_REALS[kind], at)
            case _:
                found = self._named[kind].check if kind in self._named else None
        if logical in LOGICAL_WRITERS:
            found = _logical(logical, schema, found, at)
        if kind in ("enum", "fixed"):
            self._named[schema["name"]] = _Named(kind, check=found, size=schema.get("size"), objects=_objects(logical))
        return found

    def _record(self, schema: Mapping[str, Any]) -> Check:
        names = {_TYPE, *(field["name"] for field in schema["fields"])}
        fields: list[tuple[str, Check]] = []

        def check(value: Any) -> None:
            if not value.keys() <= names:
                raise ValueError(f"{schema['name']} has no field {min(map(repr, value.keys() - names))}")
            for name, field in fields:
                if name in value:
                    field(value[name])

        self._named[schema["name"]] = _Named("record", frozenset(names), check)
        for field in schema["fields"]:
            found = self.of(field["type"], f"{schema['name']}.{field['name']}")
            if found is not None:
                fields.append((field["name"], found))
        return check

    def _union(self, checks: Sequence[tuple[Any, Check | None]], at: str) -> Check:
        """The check of a union. ``checks``: its members, and the check of each one.

        Values of records with the same fields are not told apart, so what is in these is not checked.
        """
        members = {_name_of(member): check for member, check in checks}
        named = {_name_of(member): self._member(member) for member, _ in checks}
        records = {name: one.fields for name, one in named.items() if one.kind == "record"}

        def of_fields(value: Mapping[str, Any]) -> list[str]:
            if _TYPE in value:
                return [value[_TYPE]]
            fit = [name for name, fields in records.items() if value.keys() <= fields]
            return [*fit, "map"] if "map" in members else fit

        def check(value: Any) -> None:
            if isinstance(value, tuple):  # a pair has the name of its type first
                name, value = value
                fit = [name]
            elif isinstance(value, Mapping):
                fit = of_fields(value)
                if not fit:
                    raise ValueError(f"{at} takes no record with the fields {', '.join(sorted(map(repr, value)))}")
            else:
                fit = [name for name, one in named.items() if _takes(one, value)]
                if len(fit) > 1 and _stands_for_another(value, named[fit[0]]):
                    other = next((name for name in fit if not named[name].objects), None)
                    if other is not None:
                        kind = named[fit[0]].objects[0].__name__
                        raise ValueError(f"{at} would become a {kind}: to store {other}, give the pair ({other!r}, …)")
                fit = fit[:1]
                if fit == ["float"] and "double" in members:
                    return
            if len(fit) == 1 and (found := members.get(fit[0])) is not None:
                found(value)

        return check

    def _member(self, member: Any) -> _Named:
        name = _name_of(member)
        if name in self._named or not isinstance(member, Mapping):
            return self._named.get(name, _Named(name))
        if name == "array" and not _has_numbers(member["items"]):
            return _Named("array of no numbers")  # bytes are a sequence of numbers
        return _Named(name, objects=_objects(f"{name}-{member.get('logicalType')}"))


def _has_numbers(items: Any) -> bool:
    kinds = items if isinstance(items, list) else [items]
    return any((kind["type"] if isinstance(kind, Mapping) else kind) in (*_BITS, *_REALS) for kind in kinds)


def _objects(logical: str) -> tuple[type, ...]:
    return (_OBJECTS[logical],) if logical in _OBJECTS else ()


def _name_of(member: Any) -> str:
    """What stands for a member of a union in a pair: its type, or the name of a record, enum or fixed."""
    if not isinstance(member, Mapping):
        return str(member)
    return str(member.get("name", member["type"]))


def _takes(member: _Named, value: Any) -> bool:
    """Whether a value that is no mapping fits a member of a union."""
    if isinstance(value, member.objects):
        return True
    if isinstance(value, str):
        return member.kind in ("string", "enum") or date in member.objects
    if isinstance(value, bool | None):
        return False  # they are stored as they are
    match member.kind:
        case "int" | "long":
            most = 1 << (_BITS[member.kind] - 1)
            return isinstance(value, Integral) and -most <= int(value) < most
        case "float" | "double":
            return isinstance(value, Real)
        case "bytes":
            return isinstance(value, bytes | bytearray)
        case "fixed":
            return isinstance(value, bytes) and len(value) == member.size
        case "array":
            return isinstance(value, Sequence)
        case "array of no numbers":
            return isinstance(value, Sequence) and not isinstance(value, bytes)
    return False


def _stands_for_another(value: Any, member: _Named) -> bool:
    """Whether a member of a union takes a value as its own object, such as a number as a time."""
    return bool(member.objects) and not isinstance(value, member.objects)


def _nullable(check: Check | None) -> Check | None:
    if check is None:
        return None

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


def _logical(logical: str, schema: Mapping[str, Any], plain: Check | None, at: str) -> Check | None:
    """The check of a logical type that fastavro knows. ``plain``: that of the type without it. Of those that somebody
    else has registered with fastavro nothing is known, and UUIDs are stored as they are."""
    if logical not in _OBJECTS:
        return None
    if _OBJECTS[logical] is Decimal:
        return _decimal(schema, at)
    exact = _date(at) if logical == "int-date" else _time(logical, at)

    def check(value: Any) -> None:
        if isinstance(value, date | time):
            exact(value)
        elif plain is not None and not (logical == "int-date" and isinstance(value, str)):
            plain(value)

    return check


def _date(at: str) -> Check:
    def check(value: Any) -> None:
        if isinstance(value, datetime):
            raise ValueError(f"{at} takes a date without a time")

    return check


def _time(logical: str, at: str) -> Check:
    has_zone = logical.startswith("long-timestamp")

    def check(value: Any) -> None:
        if (value.tzinfo is not None) != has_zone:
            raise ValueError(f"{at} takes times {'with' if has_zone else 'without'} a time zone")
        if getattr(value, "nanosecond", 0):  # pandas' times have them
            raise ValueError(f"{at} takes whole microseconds")
        if logical.endswith("millis") and value.microsecond % 1000:
            raise ValueError(f"{at} takes whole milliseconds")

    return check


def _decimal(schema: Mapping[str, Any], at: str) -> Check:
    precision, scale = schema.get("precision", 0), schema.get("scale", 0)

    def check(value: Any) -> None:
        if not isinstance(value, Decimal):
            raise ValueError(f"{at} takes decimals, not {type(value).__name__}")
        exponent = value.as_tuple().exponent
        # a zero has no digits, but may have a large exponent
        fits = isinstance(exponent, int) and -scale <= exponent <= precision
        if not fits or (value and value.adjusted() + 1 + scale > precision):
            raise ValueError(f"{at} takes finite decimals of {precision} digits, {scale} of them after the point")
        if schema["type"] == "fixed" and value.is_zero() and value.is_signed():
            raise ValueError(f"{at} takes no zero with a minus sign: give its abs()")  # it would be stored as -2

    return check


def _boolean(at: str) -> Check:
    def check(value: Any) -> None:
        if bool(value) != value:
            raise ValueError(f"{at} takes True or False")

    return check


def _real(layout: str, bits: int, at: str) -> Check:
    def check(value: Any) -> None:
        if bits == 64 and isinstance(value, str | float):
            return  # the writer takes "NaN" and other texts of numbers
        try:
            stored = struct.unpack(layout, struct.pack(layout, value))[0]
        except OverflowError:
            raise ValueError(f"{at} takes numbers that fit into {bits} bits") from None
        if stored != value and isinstance(value, Integral):
            raise ValueError(f"{at} takes whole numbers that {bits} bits hold without a loss: give a float")

    return check
