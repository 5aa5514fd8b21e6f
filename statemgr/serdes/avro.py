"""Avro values that evolve: each value names the schema that it was written with. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from statemgr.errors import ConfigError, CorruptError, InvalidError
from statemgr.serdes.serde import Serde
from statemgr.serdes.single_object import SingleObjects

#: Bytes of memory for each byte of a value. Only items of no bytes need more, and there is no reason for many of them.
_RATIO = 1000
_FREE = 16 * 1024 * 1024


def avro_serde(schemas: Sequence[str]) -> Serde:
    """A serde for values of one Avro type.

    Args:
        schemas: every version of the type's schema as JSON, oldest first. The last one is written, and older values are
            resolved into it. A field that it adds needs a default.

    Raises: ConfigError if there is no schema, or if one of them is not a schema.
    """
    if not schemas:
        raise ConfigError("an Avro serde needs a schema", hint="list its versions in stores.<name>.value.avro.schemas")
    try:
        objects = SingleObjects([json.loads(text) for text in schemas], ratio=_RATIO, free=_FREE)
    except Exception as error:  # the parser meets arbitrary JSON; whatever it raises means the same
        raise ConfigError(f"this is not an Avro schema: {type(error).__name__}: {error}") from error

    def serialize(value: Any) -> bytes:
        try:
            return objects.encode(value)
        except ValueError as error:
            raise InvalidError(f"a value does not fit its Avro schema: {error}") from error

    def deserialize(data: bytes) -> Any:
        try:
            return objects.decode(data)
        except ValueError as error:
            raise CorruptError(
                f"a value cannot be read with its Avro schema: {error}",
                hint="list every schema that wrote values in stores.<name>.value.avro.schemas, "
                "and give every field that the newest one adds a default",
            ) from error

    return Serde(serialize, deserialize, "avro")
