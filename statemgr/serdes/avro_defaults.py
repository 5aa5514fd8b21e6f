"""The defaults of fields, which a schema has in JSON's form: text for bytes, a number for a date. Pure.

fastavro returns the schema's own object to every value that lacks the field, and writes it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastavro.read import LOGICAL_READERS

#: What JSON has for the values of a type.
_JSON: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "int": int,
    "long": int,
    "float": (int, float),
    "double": (int, float),
    "bytes": str,
    "string": str,
    "fixed": str,
    "enum": str,
    "array": list,
    "map": dict,
    "record": dict,
    "error": dict,
}


def convert_defaults(schema: Any) -> bool:
    """Replace each default by the value that it stands for.

    Args:
        schema: as fastavro's ``parse_schema`` gives it.

    Returns: whether one of them is a list or a map, which values must not share (:func:`unshared`).
    """
    named: dict[str, Mapping[str, Any]] = {}
    tops = [one for one in (schema if isinstance(schema, list) else [schema]) if isinstance(one, dict)]
    fields = _fields(tops, named)
    found = [(field, _value(field["default"], field["type"], named)) for field in fields if "default" in field]
    for field, value in found:
        field["default"] = value
    for one in tops:  # a schema without this mark is parsed again for each value, and must then have JSON's form
        one.setdefault("__named_schemas", named)
        one["__fastavro_parsed"] = True
    return any(isinstance(value, dict | list) for _, value in found)


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
    """The value that JSON's form of a default stands for. Unchanged if it is of another type."""
    if isinstance(schema, list):
        schema = next((member for member in schema if _is_of(given, member, named)), None)
    if not _is_of(given, schema, named):
        return given
    schema = named.get(schema, schema) if isinstance(schema, str) else schema
    if isinstance(schema, str):
        schema = {"type": schema}
    match kind := schema["type"]:
        case "bytes" | "fixed":
            given = given.encode("latin-1")
        case "float" | "double":
            given = float(given)
        case "array":
            given = [_value(item, schema["items"], named) for item in given]
        case "map":
            given = {name: _value(item, schema["values"], named) for name, item in given.items()}
        case "record" | "error":
            given = {
                field["name"]: _value(given.get(field["name"], field.get("default")), field["type"], named)
                for field in schema["fields"]
            }
    read = LOGICAL_READERS.get(f"{kind}-{schema.get('logicalType')}")
    return read(given, schema, None) if read else given


def _is_of(given: Any, schema: Any, named: Mapping[str, Mapping[str, Any]]) -> bool:
    kind = named.get(schema, schema) if isinstance(schema, str) else schema
    kind = kind["type"] if isinstance(kind, Mapping) else kind
    of = _JSON.get(kind) if isinstance(kind, str) else None
    return of is not None and isinstance(given, of) and (isinstance(given, bool) == (kind == "boolean"))
