"""Changelogs of Kafka Streams.

The format is that of Kafka Streams 4.3.1 (package ``org.apache.kafka.streams``). ``ProcessorStateManager`` names a
changelog ``<application.id>-<store>-changelog``. The records of a key-value store have the serialized key and the plain
serialized value, whether the store is plain, has timestamps (``ChangeLoggingTimestampedKeyValueBytesStore``) or has
timestamps and headers (``ChangeLoggingTimestampedKeyValueBytesStoreWithHeaders``). The timestamp that such a store
keeps in the first 8 bytes of its local values is the timestamp of the record, and its headers are the record's.

The settings and the name of the topic show other kinds (``kafka_streams_kinds``): ``WindowedChangelogTopicConfig``
gives the changelogs of windows and sessions the policy ``compact,delete`` and a ``retention.ms`` that is a day longer
than that of the store, ``VersionedChangelogTopicConfig`` sets ``min.compaction.lag.ms`` of those of versioned stores,
to at least a day, and ``KStreamImpl`` and ``KTableImpl`` name the stores that they make for themselves. But
applications may name operators, and override settings. So the records count, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from statemgr.config.units import DAY_MS
from statemgr.model.keys.partitioners import HASHES
from statemgr.operations.adopt.origins.kafka_streams_kinds import KINDS
from statemgr.operations.adopt.origins.kind import Hint, kafka_deletes

_SUFFIX = "-changelog"
#: How topics end that Kafka Streams writes for itself: those of ``repartition`` and ``groupBy``, and those of a
#: foreign-key join, whether it is named or not (``KTableImpl``).
_INTERNAL = re.compile(r"-repartition$|-subscription-(registration|response)(-\d+)?-topic$", re.IGNORECASE)
#: Beginnings of the names of stores that Kafka Streams makes for itself → their kinds.
_GENERATED = {
    "KTABLE-SUPPRESS-STATE-STORE-": "suppressed",
    "KTABLE-FK-JOIN-SUBSCRIPTION-STATE-STORE-": "subscriptions",
    "KSTREAM-OUTERSHARED-": "unmatched",
    "KSTREAM-LEFTSHARED-": "unmatched",
}
#: Ends of the names that stores of a named operator have → their kinds.
_NAMED = {
    "-subscription-store": "subscriptions",
    "-outer-shared-join-store": "unmatched",
    "-left-shared-join-store": "unmatched",
}
_TIMED = ("windows", "sessions")
#: Settings that only changelogs of some kinds have from Kafka Streams → these kinds.
_SET_FOR = {"retention.ms": _TIMED, "min.compaction.lag.ms": ("versioned",)}


class KafkaStreams:
    """Implements :class:`statemgr.operations.adopt.origins.Origin`."""

    name = "kafka-streams"
    title = "Kafka Streams"
    producers = HASHES
    leaves_out_uncommitted = False
    tables_without_changelog = True
    kinds = KINDS

    def store(self, topic: str, job: str) -> str | None:
        prefix = f"{job}-"
        if not (topic.startswith(prefix) and topic.endswith(_SUFFIX)) or len(topic) <= len(prefix) + len(_SUFFIX):
            return None
        return topic.removeprefix(prefix).removesuffix(_SUFFIX)

    def other_jobs(self, topic: str, job: str) -> list[str]:
        """An application.id may have hyphens, and so may the name of a store."""
        parts = topic.removeprefix(f"{job}-").split("-")
        return ["-".join([job, *parts[:number]]) for number in range(1, len(parts) - 1)]

    def hint(self, topic: str, settings: Mapping[str, str], own_settings: Mapping[str, str]) -> Hint | None:
        for name, kind in _GENERATED.items():
            if name in topic:
                return Hint([kind], "its name is that of a store that Kafka Streams makes for itself", certain=True)
        deleted = kafka_deletes(settings)
        if deleted is not None:
            return deleted if not topic.endswith(_SUFFIX) else deleted._replace(kinds=_TIMED)
        if not topic.endswith(_SUFFIX):
            return None  # the source topic of a table
        for end, kind in _NAMED.items():
            if topic.endswith(end + _SUFFIX):
                return Hint([kind], "its name is that of a store that Kafka Streams makes for itself")
        if int(settings.get("min.compaction.lag.ms", "0")) >= DAY_MS:
            return Hint(["versioned"], f"its min.compaction.lag.ms is {settings['min.compaction.lag.ms']}")
        for key, kinds in _SET_FOR.items():
            if key in own_settings:
                return Hint(kinds, f"its topic has a {key} of its own ({own_settings[key]})")
        return None

    def is_internal(self, topic: str, job: str) -> bool:
        return topic.startswith(f"{job}-") and _INTERNAL.search(topic) is not None
