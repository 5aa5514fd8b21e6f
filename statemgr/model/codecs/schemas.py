"""The Avro schemas of everything that is stored or sent, one file per record and version.

They lie inside the installed package (``statemgr/_schemas``) or, in a source tree, beside it (``schemas``).
They are read once; nothing else is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from statemgr.errors import MissingError
from statemgr.serdes.avro_weight import Weight

_SUFFIX = ".avsc"
#: Bytes of memory for each byte of a record; what statemgr itself writes needs less than 20.
_RATIO = 32
#: Bytes of memory that are not worth looking for: an index of thousands of files takes less.
_FREE = 128 * 1024 * 1024


def load_schema_files() -> dict[str, bytes]:
    """Name (``checkpoint_task.v2``) → content of the ``.avsc`` file, for every schema.

    Raises: MissingError when the installation has none.
    """
    for directory in _places():
        if directory.is_dir():
            found = {
                entry.name.removesuffix(_SUFFIX): entry.read_bytes()
                for entry in directory.iterdir()
                if entry.name.endswith(_SUFFIX)
            }
            if found:
                return dict(sorted(found.items()))
    raise MissingError("the Avro schemas are not installed", hint="install statemgr again")


def _places() -> list[Traversable | Path]:
    package = resources.files("statemgr")
    return [package / "_schemas", Path(str(package)).parent / "schemas"]


def schema(name: str) -> dict[str, Any]:
    """The schema of that name as JSON. Raises: KeyError when there is none."""
    parsed: dict[str, Any] = json.loads(load_schema_files()[name])
    return parsed


class Schemas:
    """A set of schemas, found by name or by fingerprint.

    Args:
        files: name → content of an ``.avsc`` file that can be parsed alone.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._parsed: dict[str, Any] = {name: fastavro.parse_schema(json.loads(data)) for name, data in files.items()}
        self._fingerprints = {name: schema_fingerprint(json.loads(data)) for name, data in files.items()}
        self._weights = {name: Weight(parsed, ratio=_RATIO, free=_FREE) for name, parsed in self._parsed.items()}
        self._names = {value: name for name, value in self._fingerprints.items()}

    def parsed(self, name: str) -> Any:
        """The schema in fastavro's parsed form."""
        return self._parsed[name]

    def weight(self, name: str) -> Weight:
        """What checks how much memory a record of the schema will take."""
        return self._weights[name]

    def fingerprint(self, name: str) -> bytes:
        """The schema's fingerprint, 8 bytes as in the single-object encoding."""
        return self._fingerprints[name]

    def writer_of(self, fingerprint: bytes, reader: str) -> str | None:
        """Name of the schema with this fingerprint, if data written with it can be read as ``reader``.

        That is so for the versions of one record: schemas with the same full name, resolved by Avro's rules.
        """
        name = self._names.get(fingerprint)
        if name is None or self._parsed[name]["name"] != self._parsed[reader]["name"]:
            return None
        return name


@cache
def shipped_schemas() -> Schemas:
    """The installed schemas, read and parsed once."""
    return Schemas(load_schema_files())


def schema_fingerprint(definition: Any) -> bytes:
    """CRC-64-AVRO of the schema's parsing canonical form, 8 bytes little-endian."""
    return bytes.fromhex(fingerprint(to_parsing_canonical_form(definition), "CRC-64-AVRO"))
