"""The defaults of fields, which a schema has in JSON's form: text for bytes, a number for a date. Pure.

fastavro returns the schema's own object to every value that lacks the field, and writes it as it is. A default is
converted only where nothing else can be meant. Any other one stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastavro.read import LOGICAL_READERS
from fastavro.write import LOGICAL_WRITERS

from statemgr.serdes.avro_exact import Checks


def convert_defaults(schema: Any) -> bool:
    """Replace the default of each field of bytes, of a fixed or of a logical type by the value that it stands for.

    Args:
        schema: as fastavro's ``parse_schema`` gives it.

    Returns: whether one of them is a list or a map, which values must not share (:func:`unshared`).
    """
    named: dict[str, Mapping[str, Any]] = {}
    tops = [one for one in (schema if isinstance(schema, list) else [schema]) if isinstance(one, dict)]
    fields = [field for field in _fields(tops, named) if "default" in field]
    for field in fields:
        field["default"] = _value(field["default"], field["type"], named)
    for one in tops:  # a schema without this mark is parsed again for each value, and must then have JSON's form
        one.setdefault("__named_schemas", named)
        one["__fastavro_parsed"] = True
    return any(isinstance(field["default"], dict | list) for field in fields)


def unshared(value: Any) -> Any:
    """A copy of a value whose lists and maps are its own."""
    if isinstance(value, dict):
        return {name: unshared(item) for name, item in value.items()}
    if isinstance(value, list):
        return [unshared(item) for item in value]
    return value


def _fields(schema: Any, named: dict[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All fields of all records, and in ``named`` the types that have names."""
    if isinstance(schema, list):
        return [field for member in schema for field in _fields(member, named)]
    if not isinstance(schema, Mapping):
        return []
    if "name" in schema:
        named[schema["name"]] = schema
    own = list(schema.get("fields", ()))
    inner = [schema.get("items"), schema.get("values"), *(field["type"] for field in own)]
    return own + _fields(inner, named)


def _value(given: Any, schema: Any, named: Mapping[str, Mapping[str, Any]]) -> Any:
    """The value that JSON's form of a default stands for. As it is given if the type is a list, a map, a record or a
    union of several types, or has no such value."""
    if isinstance(schema, list):
        members = [member for member in schema if member != "null"]
        if len(members) != 1:
            return given
        schema = members[0]
    schema = named.get(schema, schema) if isinstance(schema, str) else schema
    schema = {"type": schema} if isinstance(schema, str) else schema
    kind, value = schema["type"], given
    if kind in ("bytes", "fixed"):
        if not isinstance(given, str) or any(letter > "\xff" for letter in given):
            return given
        value = given.encode("latin-1")
        if len(value) != schema.get("size", len(value)):
            return given
    logical = f"{kind}-{schema.get('logicalType')}"
    if logical not in LOGICAL_READERS:
        return value
    try:
        value = LOGICAL_READERS[logical](value, schema, None)
        if kind in ("int", "long") and (type(given) is not int or LOGICAL_WRITERS[logical](value, schema) != given):
            return given  # a negative time of day
        if (check := Checks().of(schema)) is not None:
            check(value)  # the reader rounds a decimal of too many digits
    except Exception:  # a time that Python does not have, or a text that is no UUID
        return given
    return value
