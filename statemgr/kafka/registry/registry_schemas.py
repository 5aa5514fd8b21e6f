"""Schemas of a Schema Registry, which may be hostile: what they refer to, and the type that they describe.

The client follows references without a limit, so a schema that refers to itself ends the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastavro.repository import AbstractSchemaRepository
from fastavro.repository.base import SchemaRepositoryError
from fastavro.schema import load_schema

from statemgr.serdes.avro import AvroBody

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

#: References of a schema, those of its references included.
MAX_REFERENCES = 200
_ROOT = "$root"


class EndlessReferences(ValueError):
    """Schemas refer to each other in a circle, or to more than :data:`MAX_REFERENCES`."""


def referenced(client: SchemaRegistryClient, schema: Schema) -> dict[str, str]:
    """The texts of all schemas that a schema refers to, by the names that it has for them.

    Raises: EndlessReferences; what the client raises.
    """
    found: dict[str, str] = {}
    left, count = [(schema, frozenset[tuple[str | None, int | None]]())], 0
    while left:
        at, above = left.pop()
        for reference in at.references or ():
            place = (reference.subject, reference.version)
            count += 1
            if place in above:
                raise EndlessReferences(f"its schema refers to itself, through {reference.subject}")
            if count > MAX_REFERENCES:
                raise EndlessReferences(f"its schema has more than {MAX_REFERENCES} references")
            one = client.get_version(str(reference.subject), int(reference.version or 0), True).schema
            found[str(reference.name)] = str(one.schema_str)
            left.append((one, above | {place}))
    return found


def avro_body(client: SchemaRegistryClient, schema: Schema) -> AvroBody | None:
    """The type that an Avro schema describes; None for plain bytes, which the client writes without their length.

    Raises: EndlessReferences; ValueError for a schema with rules; any error of the parser; what the client raises.
    """
    rules = schema.rule_set
    if rules is not None and (rules.domain_rules or rules.encoding_rules):
        raise ValueError("its schema has rules, which statemgr does not run")
    texts = {**referenced(client, schema), _ROOT: str(schema.schema_str)}
    parsed = load_schema(_ROOT, repo=_Texts(texts))
    kind = parsed.get("type") if isinstance(parsed, dict) else parsed
    return None if kind == "bytes" else AvroBody(parsed)


class _Texts(AbstractSchemaRepository):
    """Schemas by name. Each load may lead to the next, so their number has a limit."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._left = MAX_REFERENCES + 1

    def load(self, name: str) -> Any:
        self._left -= 1
        if name not in self._texts or self._left < 0:
            raise SchemaRepositoryError(f"there is no schema {name!r}")
        return json.loads(self._texts[name])
