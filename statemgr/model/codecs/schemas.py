"""The Avro schemas of everything that is stored or sent, one file per record and version.

The installed package has them in ``statemgr/_schemas``, a source tree in ``schemas``. Each file is read once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from statemgr.errors import MissingError
from statemgr.serdes.avro import SingleObjects

_SUFFIX = ".avsc"
#: Bytes of memory for each byte of a record; what statemgr itself writes needs less than 20.
_RATIO = 32
#: Records that take up to this much memory are not limited further: an index of thousands of files takes less.
_FREE = 128 * 1024 * 1024


@cache
def load_schema_files() -> dict[str, bytes]:
    """Name (``checkpoint_task.v3``) → content of the ``.avsc`` file, for every schema.

    Raises: MissingError if the installation has none.
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


def single_objects(name: str, files: Mapping[str, bytes] | None = None) -> SingleObjects:
    """Writes with the named schema, and reads what any version of the same record wrote.

    Args:
        files: name → content of an ``.avsc`` file that can be parsed alone; those that are installed if None.
    """
    known = {other: json.loads(data) for other, data in (files or load_schema_files()).items()}
    record = known[name]["name"]
    versions = [schema for other, schema in known.items() if schema["name"] == record and other != name]
    return SingleObjects([*versions, known[name]], ratio=_RATIO, free=_FREE, named=True)
