"""Changelogs with plain keys and values: the newest record of a key is its value, and no value is a delete."""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.model.origins.origin import Decoder


class Raw:
    """Implements :class:`statemgr.model.origins.Origin`. Topics and offsets are given by hand."""

    name = "raw"
    title = "plain changelogs"
    leaves_out_uncommitted = False

    def store(self, topic: str, job: str) -> str | None:
        return None

    def problem(self, topic: str, settings: Mapping[str, str]) -> str | None:
        if "delete" in settings.get("cleanup.policy", ""):
            return f"its cleanup.policy is {settings['cleanup.policy']}, so that Kafka deletes old keys by itself"
        return None

    def is_internal(self, topic: str, job: str) -> bool:
        return False

    def decoder(self, topic: str, committed: Mapping[str, int]) -> Decoder | None:
        return None
