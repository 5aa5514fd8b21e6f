"""schemas: the shipped .avsc files, their fingerprints, and how older versions of a record are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastavro
import pytest

from statemgr.errors import CorruptRecord, InvalidError
from statemgr.model.codecs import decode_checkpoint, encode_key
from statemgr.model.codecs.generic import Codec
from statemgr.model.codecs.schemas import load_schema_files, single_objects
from statemgr.model.codecs.special_types import SHAPES
from statemgr.serdes.avro import HEADER_SIZE, MARK, header_of
from tests import model_samples as sample

#: Fingerprints of everything that has been written. Add new ones, and never change the others.
FROZEN = {
    "adopted_job.v1": "5ca3d247e4a88034",
    "adopted_job_key.v1": "e93cb87969249af6",
    "checkpoint.v1": "d596e89b96397b2b",
    "checkpoint_job.v2": "899d84b2c8cd646f",
    "checkpoint_key.v1": "c5e165864b0e8c1e",
    "checkpoint_key.v2": "472a55ea47f1e10d",
    "checkpoint_task.v2": "eeb967e8c933518c",
    "checkpoint_task.v3": "b526bf73ca7aaf11",
    "offer.v1": "652bb5fd37b4aaf7",
    "offer.v2": "ed5df5f3b8096d11",
    "offer_key.v1": "c6b352676cfd5c7f",
    "permit.v1": "ba5a4b91594540d9",
    "permit_key.v1": "4e96af5e2082b5cb",
    "prepared_commit.v1": "4b60ba104f69b719",
    "prepared_commit.v2": "9b1eb515339ca17a",
    "retired_layout.v1": "46e949be5461c8d2",
    "retired_layout_key.v1": "64d09f71d8e05090",
    "segment_chain.v1": "9790d8a3f270a040",
    "snapshot_index.v1": "da04ca6a8132632c",
}
NAMES = list(FROZEN)


def schema(name: str) -> Any:
    """Return a shipped schema as JSON."""
    return json.loads(load_schema_files()[name])


def fingerprint_of(definition: Any) -> bytes:
    """Return the fingerprint in the header of a schema's values."""
    header = header_of(definition)
    assert header[: len(MARK)] == MARK
    return header[len(MARK) :]


def crc_64_avro(data: bytes) -> bytes:
    """Compute the fingerprint from the Avro specification's definition, independently of the product."""
    empty = 0xC15D213AA4D7A795
    result = empty
    for byte in data:
        result ^= byte
        for _ in range(8):
            result = (result >> 1) ^ (empty if result & 1 else 0)
    return result.to_bytes(8, "little")


def named_types(definition: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return every named type that a schema defines."""
    if isinstance(definition, dict):
        if definition.get("type") in ("record", "fixed"):
            assert definition["name"] not in found, "defined twice in one file"
            found[definition["name"]] = definition
        for value in definition.values():
            named_types(value, found)
    elif isinstance(definition, list):
        for value in definition:
            named_types(value, found)
    return found


def test_every_schema_is_there() -> None:
    """Each record and version has one file."""
    assert list(load_schema_files()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_schema_can_be_loaded_alone(name: str) -> None:
    """A file needs no other file, is documented, and uses the project's namespace."""
    parsed = fastavro.parse_schema(schema(name))
    assert isinstance(parsed, dict)
    assert parsed["name"].startswith("statemgr.")
    assert all(definition.get("doc") for name, definition in named_types(schema(name), {}).items())


def test_shared_types_are_the_same_everywhere() -> None:
    """A named type that several files define is the same in the newest version of all of them."""
    seen: dict[str, str] = {}
    for name in {schema(name)["name"]: name for name in NAMES}.values():
        table = named_types(schema(name), {})

        def expand(definition: Any, table: dict[str, Any] = table) -> Any:
            if isinstance(definition, str):
                return expand(table[definition]) if definition in table else definition
            if isinstance(definition, list):
                return [expand(value) for value in definition]
            if isinstance(definition, dict):
                return {
                    key: expand(value) if key in ("type", "items", "values", "fields") else value
                    for key, value in definition.items()
                    if key != "namespace"
                }
            return definition

        for type_name, definition in table.items():
            text = json.dumps(expand(definition), sort_keys=True)
            assert seen.setdefault(type_name, text) == text, f"{type_name} in {name}"


@pytest.mark.parametrize("name", NAMES)
def test_fingerprint_is_that_of_the_specification(name: str) -> None:
    """The fingerprint is CRC-64-AVRO of the canonical form, little-endian, as other implementations compute it."""
    canonical = fastavro.schema.to_parsing_canonical_form(schema(name))
    assert fingerprint_of(schema(name)) == crc_64_avro(canonical.encode())
    assert single_objects(name).header == header_of(schema(name))


def test_fingerprint_of_a_known_schema() -> None:
    """The specification's own test vector gives "null" the fingerprint 63dd24e7cc258f8a."""
    assert fingerprint_of("null") == bytes.fromhex("63dd24e7cc258f8a")[::-1]


def test_fingerprints_are_frozen() -> None:
    """A changed schema needs a new version in a new file, because older data must stay readable."""
    assert {name: fingerprint_of(schema(name)).hex() for name in NAMES} == FROZEN


def test_fingerprints_are_documented() -> None:
    """The page about the formats lists every schema with its fingerprint."""
    page = (Path(__file__).parents[3] / "docs" / "format.md").read_text()
    for name, fingerprint in FROZEN.items():
        assert f"| `{name}` | `{fingerprint}` |" in page


def record(version: int, *fields: dict[str, Any]) -> bytes:
    """Return a schema file of the record 'Thing'."""
    doc = f"version {version}"
    return json.dumps(
        {"type": "record", "name": "Thing", "namespace": "statemgr", "doc": doc, "fields": list(fields)}
    ).encode()


A = {"name": "a", "type": "long"}
B = {"name": "b", "type": "string", "default": "none"}
OLD = {"thing.v1": record(1, A)}
NEW = {"thing.v1": record(1, A), "thing.v2": record(2, A, B)}


def test_older_version_is_resolved() -> None:
    """Data of an older version is read with its own schema, and new fields get their defaults."""
    data = single_objects("thing.v1", OLD).encode({"a": 5})
    assert single_objects("thing.v2", NEW).decode(data) == {"a": 5, "b": "none"}


def test_newer_version_is_a_typed_error() -> None:
    """Data of a newer version has an unknown fingerprint, and the error shows it."""
    data = single_objects("thing.v2", NEW).encode({"a": 5, "b": "x"})
    with pytest.raises(ValueError, match=data[len(MARK) : HEADER_SIZE].hex()):
        single_objects("thing.v1", OLD).decode(data)


def test_another_record_is_a_typed_error() -> None:
    """Data with a known schema of another record is refused."""
    data = encode_key(sample.RECORD.key_v1())
    with pytest.raises(CorruptRecord, match="unknown"):
        decode_checkpoint(data)


@pytest.mark.parametrize("value", [{"given_ms": "text"}, {}, {"given_ms": 2**63}, {"given_ms": None}])
def test_value_that_does_not_fit_is_invalid(value: dict[str, Any]) -> None:
    """An encoder refuses a value that does not fit the schema."""
    with pytest.raises(InvalidError, match=r"permit\.v1"):
        Codec("permit.v1", dict, SHAPES).encode({"permissions": [], **value})


@dataclass
class Thing:
    """A class that does not fit the schema of a permission's key, where a job's name is text."""

    job_name: int


def test_a_class_that_does_not_belong_to_its_schema() -> None:
    """If the type of a field differs from the schema's, the encoder raises TypeError, because the program is wrong."""
    with pytest.raises(TypeError, match="string"):
        Codec("permit_key.v1", Thing, SHAPES).encode(Thing(1))
