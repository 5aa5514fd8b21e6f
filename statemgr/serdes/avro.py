"""Avro single objects, whose values name the schema they were written with, and the serde for them. Pure.

``C3 01`` · CRC-64-AVRO fingerprint of the writer's schema (8 bytes, little-endian) · Avro binary body. A value of an
older schema is resolved into the newest when it is read. Every value is weighed before it is decoded.
Source: Apache Avro specification, "Single-object encoding".
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import fastavro
from fastavro.schema import fingerprint, parse_schema, to_parsing_canonical_form

from statemgr.errors import ConfigError, CorruptError, InvalidError
from statemgr.serdes.avro_defaults import convert_defaults, unshared
from statemgr.serdes.avro_exact import Check, Checks
from statemgr.serdes.avro_weight import Weight
from statemgr.serdes.serde import Serde

MARK = b"\xc3\x01"
HEADER_SIZE = len(MARK) + 8
#: Bytes of memory for each byte of a value. Only items that take no bytes need more, and nobody needs many of those.
_RATIO = 1000
_FREE = 16 * 1024 * 1024


def header_of(schema: Any) -> bytes:
    """The first bytes of every value that is written with a schema."""
    return _header(to_parsing_canonical_form(schema))


@lru_cache
def _header(canonical: str) -> bytes:
    return MARK + bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))


def _logical(schema: Any) -> list[tuple[Any, int, int]]:
    """The logical type, scale and precision of each type of a schema in order, which its fingerprint leaves out."""
    if isinstance(schema, list):
        return [one for branch in schema for one in _logical(branch)]
    if not isinstance(schema, dict):
        return [(None, 0, 0)]
    inner = [schema[name] for name in ("items", "values") if name in schema]
    inner += [field["type"] for field in schema.get("fields", ())]
    return [(schema.get("logicalType"), schema.get("scale") or 0, schema.get("precision") or 0), *_logical(inner)]


def _is_read_alike(older: Any, newer: Any) -> bool:
    """Whether the newer of two schemas with one fingerprint reads what the older one wrote as it was written."""
    return all(
        old[:2] == new[:2] and old[2] <= new[2] for old, new in zip(_logical(older), _logical(newer), strict=True)
    )


class AvroBody:
    """Values of one schema ↔ Avro's binary encoding. Every decoder of Avro checks weight, depth and end here.

    Args:
        schema: as fastavro's ``parse_schema`` gives it. Its defaults may be converted in place.
        ratio: bytes of memory that each byte of a value may take,
        free: in addition to this many bytes for any value.
        named: for values that this software makes itself, which need no check, and whose defaults stay as they are.
            Members of a union of records are read as pairs of a full name and the fields.

    Raises: any error of the parser, for what is not a schema.
    """

    def __init__(self, schema: Any, *, ratio: int = _RATIO, free: int = _FREE, named: bool = False) -> None:
        self.schema = schema
        self._named = named
        self._weight = Weight(schema, ratio=ratio, free=free)
        self._is_logical = '"logicalType":' in json.dumps(schema)

    @cached_property
    def _as_newest(self) -> tuple[Check | None, bool]:
        """What only the newest version of a type needs: the check of values that are written, and whether older values
        share its defaults, which it converts."""
        return (None, False) if self._named else (Checks().of(self.schema), convert_defaults(self.schema))

    def prepare(self) -> None:
        """Call this for the version that is written. Raises: any error, if no value can be written with it."""
        _ = self._as_newest

    def encode(self, value: Any, header: bytes) -> bytes:
        """``header``, and then the value.

        Raises: ValueError if the value does not fit the schema, or would not be read again as it is.
        """
        check, _ = self._as_newest
        self._weight.check_depth(value)
        sink = io.BytesIO()
        sink.write(header)
        try:
            if check is not None:
                check(value)
            fastavro.schemaless_writer(sink, self.schema, value)
        except Exception as error:  # an arbitrary value; whatever the writer raises means the same
            raise ValueError(f"{type(error).__name__}: {error}") from error
        data = sink.getvalue()
        if self._is_logical:
            self.decode(data, len(header))  # the writer takes dates, times and UUIDs that the reader refuses
        else:
            self._weight.check(data, len(header))
        return data

    def decode(self, data: bytes, start: int, reader: AvroBody | None = None) -> Any:
        """The value from ``start`` to the end, resolved into the schema of ``reader`` if there is one.

        Raises: ValueError if the bytes are not exactly one value, or would take too much memory.
        """
        self._weight.check(data, start)
        # what the reader leaves out is skipped without a look at the end, which the byte more shows
        source = io.BytesIO(data if reader is None else data + b"\0")
        source.seek(start)
        names, is_shared = self._named, reader is not None and reader._as_newest[1]
        try:
            value = fastavro.schemaless_reader(
                source,
                self.schema,
                None if reader is None else reader.schema,
                return_record_name=names,
                return_record_name_override=names,
            )
        except Exception as error:  # arbitrary bytes; whatever the parser raises means the same
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if (left := len(data) - source.tell()) != 0:
            raise ValueError(f"{left} bytes are left after it" if left > 0 else "the bytes end within it")
        return unshared(value) if is_shared else value


class SingleObjects:
    """Values of one Avro type ↔ bytes.

    Args:
        schemas: every version of the type's schema, oldest first. The last one is written.
        ratio, free, named: as for :class:`AvroBody`.

    Raises: ConfigError if values do not say which of two versions wrote them; any error of the parser, for what is not
        a schema.
    """

    def __init__(self, schemas: Sequence[Any], *, ratio: int = _RATIO, free: int = _FREE, named: bool = False) -> None:
        self._known: dict[bytes, AvroBody] = {}
        for schema in schemas:
            self.header = header_of(schema)
            self._newest = AvroBody(parse_schema(schema, named_schemas={}), ratio=ratio, free=free, named=named)
            older = self._known.get(self.header)
            if older is not None and not _is_read_alike(older.schema, self._newest.schema):
                raise ConfigError(
                    "two versions of an Avro schema differ only in a logical type, or in the scale or a smaller "
                    "precision of a decimal, and values do not say which of them wrote them",
                    hint="keep the old field as it is, and add a field with the new type and a default",
                )
            self._known[self.header] = self._newest
        self._newest.prepare()
        self.headers = frozenset(self._known)
        self.schema = self._newest.schema

    def encode(self, value: Any) -> bytes:
        """Raises: ValueError, as :meth:`AvroBody.encode`."""
        return self._newest.encode(value, self.header)

    def decode(self, data: bytes) -> Any:
        """Raises: ValueError if the bytes are not exactly one value of a known schema."""
        body = self._known.get(data[:HEADER_SIZE])
        if body is None:
            raise ValueError(unknown_header(data[:HEADER_SIZE]))
        return body.decode(data, HEADER_SIZE, None if body is self._newest else self._newest)


def unknown_header(data: bytes) -> str:
    """The reason why bytes without the header of a known schema cannot be read."""
    if len(data) < HEADER_SIZE or not data.startswith(MARK):
        return "it is not an Avro single object"
    return f"it was written with a schema of the unknown fingerprint {data[len(MARK) : HEADER_SIZE].hex()}"


def avro_serde(schemas: Sequence[str]) -> Serde:
    """A serde for values of one Avro type.

    Args:
        schemas: every version of the type's schema as JSON, oldest first. The last one is written, and older values are
            resolved into it. A field that it adds needs a default.

    Raises: ConfigError if there is no schema, if one of them is not a schema, or if two differ only in a logical type,
        or in the scale or a smaller precision of a decimal.
    """
    if not schemas:
        raise ConfigError("an Avro serde needs a schema", hint="list its versions in stores.<name>.value.avro.schemas")
    try:
        objects = SingleObjects([json.loads(text) for text in schemas])
    except ConfigError:
        raise
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
