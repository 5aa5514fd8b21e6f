"""Avro single-object encoding: how every record that is stored or sent becomes bytes. Pure.

``C3 01`` · CRC-64-AVRO fingerprint of the writer's schema (8 bytes, little-endian) · Avro binary body.
Readers resolve older versions of a record by the fingerprint. Source: Apache Avro specification,
"Single-object encoding".
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import fastavro

from statemgr.errors import CorruptError, CorruptRecord, InvalidError
from statemgr.model.codecs.schemas import Schemas, shipped_schemas
from statemgr.serdes.avro_weight import TooHeavy, Truncated

#: What a person does about a record that is refused.
_HINT = "it was not written by this software or by an older one: look who else writes to the topic"
MARK = b"\xc3\x01"
HEADER_SIZE = len(MARK) + 8

#: Makes the typed error of a decoder from what is wrong.
Refuse = Callable[[str], CorruptError]


def refuser(what: str, topic: str | None = None, partition: int | None = None, offset: int | None = None) -> Refuse:
    """Makes the error of a record of the checkpoint topic that is refused."""

    def refuse(why: str) -> CorruptRecord:
        return CorruptRecord(
            f"checkpoint record refused ({what}): {why}", topic=topic, partition=partition, offset=offset, hint=_HINT
        )

    return refuse


def encode(schema: str, value: dict[str, Any], schemas: Schemas | None = None) -> bytes:
    """Encode a record with the named schema.

    Raises: InvalidError when the value does not fit the schema.
    """
    known = schemas or shipped_schemas()
    sink = io.BytesIO()
    sink.write(MARK)
    sink.write(known.fingerprint(schema))
    try:
        fastavro.schemaless_writer(sink, known.parsed(schema), value)
    except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
        raise InvalidError(f"a value does not fit the schema {schema}: {error}") from error
    data = sink.getvalue()
    try:
        known.weight(schema).check(data, HEADER_SIZE)
    except TooHeavy as error:
        raise InvalidError(f"a record would not be read again: {error}") from error
    return data


def decode(reader: str, data: bytes, refuse: Refuse, schemas: Schemas | None = None) -> dict[str, Any]:
    """Decode a record that was written with the named schema or an older version of it.

    Members of unions of several records come as pairs (full name, fields).

    Raises: what ``refuse`` makes, for anything that is not exactly one such record.
    """
    known = schemas or shipped_schemas()
    if len(data) < HEADER_SIZE or not data.startswith(MARK):
        raise refuse("it is not an Avro single object")
    writer = known.writer_of(data[len(MARK) : HEADER_SIZE], reader)
    if writer is None:
        raise refuse(f"schema fingerprint {data[len(MARK) : HEADER_SIZE].hex()} is unknown (is newer software about?)")
    try:
        known.weight(writer).check(data, HEADER_SIZE)
    except (TooHeavy, Truncated) as error:
        raise refuse(f"it is not decoded as {writer}: {error}") from error
    source = io.BytesIO(data)
    source.seek(HEADER_SIZE)
    try:
        value = fastavro.schemaless_reader(
            source,
            known.parsed(writer),
            known.parsed(reader) if writer != reader else None,
            return_record_name=True,
            return_record_name_override=True,
        )
    except Exception as error:  # the parser meets arbitrary bytes; whatever it raises means the same
        raise refuse(f"it cannot be decoded as {writer}: {type(error).__name__}: {error}") from error
    if source.tell() != len(data):
        raise refuse(f"{len(data) - source.tell()} bytes are left after the record")
    assert isinstance(value, dict)
    return value
