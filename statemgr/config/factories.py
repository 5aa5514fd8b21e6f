"""The names ("factories") of the state backends that come with statemgr, and what each stands for.

The classes are named, not imported: they are on a higher floor and load only where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Final

from statemgr.config.values import is_dotted_path
from statemgr.errors import ConfigError

KAFKA_CHANGELOG: Final = "kafka-changelog"
BLOB_STORE: Final = "blob-store"

#: Factory → the class of its backend.
BUILT_IN: Final = {
    KAFKA_CHANGELOG: "statemgr.backends.changelog.backend:KafkaChangelogBackend",
    BLOB_STORE: "statemgr.backends.blobs.backend:BlobStoreBackend",
}


def backend_classes() -> dict[str, str]:
    """Every factory that is installed here, with the class of its backend. Reads the metadata of installed packages."""
    return {**{entry.name: entry.value for entry in entry_points(group="statemgr.state_backends")}, **BUILT_IN}


def check_factories(key: str, factories: Iterable[str]) -> None:
    """Raises: ConfigError for a name that is neither a factory that is installed here nor a dotted path to a class."""
    for factory in factories:
        if factory in BUILT_IN or is_dotted_path(factory):
            continue
        known = backend_classes()
        if factory not in known:
            near = get_close_matches(factory, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{key} names the unknown factory {factory!r}", hint=hint, key=key)
