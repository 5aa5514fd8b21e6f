"""Avro values that evolve: each value names the schema that it was written with. Pure.

A value's bytes are an Avro single object: ``C3 01`` · CRC-64-AVRO fingerprint of the writer's schema (8 bytes,
little-endian) · Avro binary body. Source: Apache Avro specification, "Single-object encoding". All versions of the
schema are known, the newest is written, and what an older one wrote is resolved into the newest when it is read.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import fastavro
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from statemgr.errors import ConfigError, CorruptError, InvalidError
from statemgr.serdes.avro_weight import TooHeavy, Truncated, Weight
from statemgr.serdes.serde import Serde

_MARK = b"\xc3\x01"
_HEADER = len(_MARK) + 8
#: Bytes of memory for each byte of a value. Only items of no bytes need more, and there is no reason for many of them.
_RATIO = 1000
_FREE = 16 * 1024 * 1024


def avro_serde(schemas: Sequence[str]) -> Serde:
    """A serde for values of one Avro type.

    Args:
        schemas: every version of the type's schema as JSON, oldest first; the last one is written, and is what
            older values are resolved into. A field that is new needs a default.

    Raises: ConfigError for none, or one that is no schema.
    """
    if not schemas:
        raise ConfigError("an Avro serde needs a schema", hint="stores.<name>.value.avro.schemas lists its versions")
    known = {}
    for text in schemas:
        try:
            schema = json.loads(text)
            header = _MARK + bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))
            known[header] = parse_schema(schema, named_schemas={})
        except Exception as error:  # the parser meets arbitrary JSON; whatever it raises means the same
            raise ConfigError(f"this is no Avro schema: {type(error).__name__}: {error}") from error
    # the last of the list, also when an older one has the same fingerprint
    newest = known[header]
    weights = {of_writer: Weight(schema, ratio=_RATIO, free=_FREE) for of_writer, schema in known.items()}

    def serialize(value: Any) -> bytes:
        sink = io.BytesIO()
        sink.write(header)
        try:
            fastavro.schemaless_writer(sink, newest, value)
        except Exception as error:  # an arbitrary value; whatever the writer raises means the same
            raise InvalidError(f"a value does not fit its Avro schema: {type(error).__name__}: {error}") from error
        data = sink.getvalue()
        try:
            weights[header].check(data, _HEADER)
        except TooHeavy as error:
            raise InvalidError(f"a value is too large for Avro: {error}") from None
        return data

    def deserialize(data: bytes) -> Any:
        writer = known.get(data[:_HEADER])
        if writer is None:
            raise _unknown(data)
        try:
            weights[data[:_HEADER]].check(data, _HEADER)
        except (TooHeavy, Truncated) as error:
            raise CorruptError(f"an Avro value is not decoded: {error}") from None
        source = io.BytesIO(data)
        source.seek(_HEADER)
        try:
            value = fastavro.schemaless_reader(source, writer, newest)
        except Exception as error:  # arbitrary bytes again
            raise CorruptError(
                f"a value cannot be read with its Avro schema: {type(error).__name__}: {error}",
                hint="a field that the newest schema adds needs a default",
            ) from error
        if source.tell() != len(data):
            raise CorruptError(f"{len(data) - source.tell()} bytes are left after an Avro value")
        return value

    return Serde(serialize, deserialize, "avro")


def _unknown(data: bytes) -> CorruptError:
    if len(data) < _HEADER or not data.startswith(_MARK):
        return CorruptError("a value is no Avro single object", hint="is the serde the one it was written with?")
    return CorruptError(
        f"a value was written with an Avro schema of the unknown fingerprint {data[len(_MARK) : _HEADER].hex()}",
        hint="stores.<name>.value.avro.schemas must list every schema that values were written with",
    )
