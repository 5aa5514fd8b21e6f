"""Avro single objects: values that name the schema they were written with. Pure.

``C3 01`` · CRC-64-AVRO fingerprint of the writer's schema (8 bytes, little-endian) · Avro binary body. A value of an
older schema is resolved into the newest when it is read. Every value is weighed before it is decoded.
Source: Apache Avro specification, "Single-object encoding".
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import fastavro
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from statemgr.serdes.avro_weight import Weight

MARK = b"\xc3\x01"
HEADER_SIZE = len(MARK) + 8


def header_of(schema: Any) -> bytes:
    """The first bytes of every value that is written with a schema."""
    return MARK + bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))


class SingleObjects:
    """Values of one Avro type ↔ bytes.

    Args:
        schemas: every version of the type's schema, oldest first. The last one is written.
        ratio: bytes of memory that each byte of a value may take,
        free: beyond so many bytes for any value.
        named: members of a union of records are read as pairs of a full name and the fields.

    Raises: any error of the parser, for what is not a schema.
    """

    def __init__(self, schemas: Sequence[Any], *, ratio: int, free: int, named: bool = False) -> None:
        self._known: dict[bytes, tuple[Any, Weight]] = {}
        self._named = named
        for schema in schemas:
            self.schema = parse_schema(schema, named_schemas={})
            self.header = header_of(schema)
            self._weight = Weight(self.schema, ratio=ratio, free=free)
            self._known[self.header] = self.schema, self._weight

    def encode(self, value: Any) -> bytes:
        """Raises: ValueError if the value does not fit the schema, or would take too much memory when it is read."""
        sink = io.BytesIO()
        sink.write(self.header)
        try:
            fastavro.schemaless_writer(sink, self.schema, value)
        except Exception as error:  # an arbitrary value; whatever the writer raises means the same
            raise ValueError(f"{type(error).__name__}: {error}") from error
        data = sink.getvalue()
        self._weight.check(data, HEADER_SIZE)
        return data

    def decode(self, data: bytes) -> Any:
        """Raises: ValueError if the bytes are not exactly one value of a known schema."""
        header = data[:HEADER_SIZE]
        if header not in self._known:
            raise ValueError(unknown_header(header))
        schema, weight = self._known[header]
        weight.check(data, HEADER_SIZE)
        source = io.BytesIO(data)
        source.seek(HEADER_SIZE)
        reader = None if schema is self.schema else self.schema
        names = self._named
        try:
            value = fastavro.schemaless_reader(
                source, schema, reader, return_record_name=names, return_record_name_override=names
            )
        except Exception as error:  # arbitrary bytes; whatever the parser raises means the same
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if source.tell() != len(data):
            raise ValueError(f"{len(data) - source.tell()} bytes are left after it")
        return value


def unknown_header(data: bytes) -> str:
    """The reason why bytes without the header of a known schema cannot be read."""
    if len(data) < HEADER_SIZE or not data.startswith(MARK):
        return "it is not an Avro single object"
    return f"it was written with a schema of the unknown fingerprint {data[len(MARK) : HEADER_SIZE].hex()}"
