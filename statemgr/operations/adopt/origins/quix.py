"""Changelogs of Quix Streams.

The format is that of Quix Streams 3.28.1: ``quixstreams.models.topics.TopicManager`` names a changelog
``changelog__<consumer group>--<stream>--<store>``. ``quix_kinds`` reads the records.
"""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.model.keys.partitioners import PRODUCERS, QUIX
from statemgr.operations.adopt.origins.kind import Hint, Kind, kafka_deletes
from statemgr.operations.adopt.origins.quix_kinds import KINDS

#: The store that an application uses unless it names one.
_DEFAULT_STORE = "default"


class QuixStreams:
    """Implements :class:`statemgr.operations.adopt.origins.Origin`."""

    name = "quix"
    title = "Quix Streams"
    producers = tuple(name for name in PRODUCERS if name.startswith(QUIX))
    leaves_out_uncommitted = True
    tables_without_changelog = False
    kinds: Mapping[str, Kind] = KINDS

    def store(self, topic: str, job: str) -> str | None:
        """The part of the name after the stream; the stream itself for the default store."""
        prefix = f"changelog__{job}--"
        if not topic.startswith(prefix):
            return None
        stream, _, store = topic.removeprefix(prefix).rpartition("--")
        return (stream if stream and store == _DEFAULT_STORE else store) or None

    def other_jobs(self, topic: str, job: str) -> list[str]:
        """A consumer group may have two hyphens, which also divide the parts of the name."""
        parts = topic.partition(f"__{job}--")[2].split("--")
        return ["--".join([job, *parts[:number]]) for number in range(1, len(parts) - 1)]

    def hint(self, topic: str, settings: Mapping[str, str], own_settings: Mapping[str, str]) -> Hint | None:
        """Only what the settings say: each record names its column family."""
        return kafka_deletes(settings)

    def is_internal(self, topic: str, job: str) -> bool:
        return topic.startswith(f"repartition__{job}--")
