"""Changelogs with plain keys and values: the newest record of a key is its value, and no value is a delete."""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.model.keys.partitioners import HASHES
from statemgr.operations.adopt.origins.kind import ONLY_PLAIN, Hint, kafka_deletes


class Raw:
    """Implements :class:`statemgr.operations.adopt.origins.Origin`. Topics and offsets are given by hand."""

    name = "raw"
    title = "plain changelogs"
    producers = HASHES
    leaves_out_uncommitted = False
    tables_without_changelog = False
    kinds = ONLY_PLAIN

    def store(self, topic: str, job: str) -> str | None:
        return None

    def other_jobs(self, topic: str, job: str) -> list[str]:
        return []

    def hint(self, topic: str, settings: Mapping[str, str], own_settings: Mapping[str, str]) -> Hint | None:
        """Who names a changelog knows what it has."""
        return kafka_deletes(settings)

    def is_internal(self, topic: str, job: str) -> bool:
        return False
