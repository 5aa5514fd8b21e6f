"""Changelogs of Kafka Streams.

The format is that of Kafka Streams 4.3.1 (package ``org.apache.kafka.streams``). ``ProcessorStateManager`` names a
changelog ``<application.id>-<store>-changelog``. The records of a key-value store have the serialized key and the plain
serialized value, whether the store is plain, has timestamps (``ChangeLoggingTimestampedKeyValueBytesStore``) or has
timestamps and headers (``ChangeLoggingTimestampedKeyValueBytesStoreWithHeaders``). The timestamp that such a store
keeps in the first 8 bytes of its local values is the timestamp of the record, and its headers are the record's.

The settings and the name of the topic show other kinds: ``WindowedChangelogTopicConfig`` gives the
changelogs of windows and sessions the policy ``compact,delete``, ``VersionedChangelogTopicConfig`` lets those of
versioned stores wait at least a day for compaction, and ``KStreamImpl`` and ``KTableImpl`` name the stores that they
make for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.config.units import DAY_MS
from statemgr.model.origins.origin import Decoder

_SUFFIX = "-changelog"
#: Beginnings of the names of stores whose records only Kafka Streams understands → what these stores are.
_OWN_FORMATS = {
    "KTABLE-SUPPRESS-STATE-STORE-": "a buffer of suppressed results",
    "KTABLE-FK-JOIN-SUBSCRIPTION-STATE-STORE-": "the subscriptions of a foreign-key join",
    "KSTREAM-OUTERSHARED-": "the rows that an outer join of streams has not matched",
    "KSTREAM-LEFTSHARED-": "the rows that a left join of streams has not matched",
}


class KafkaStreams:
    """Implements :class:`statemgr.model.origins.Origin`."""

    name = "kafka-streams"
    title = "Kafka Streams"
    leaves_out_uncommitted = False

    def store(self, topic: str, job: str) -> str | None:
        prefix = f"{job}-"
        if not (topic.startswith(prefix) and topic.endswith(_SUFFIX)) or len(topic) <= len(prefix) + len(_SUFFIX):
            return None
        return topic.removeprefix(prefix).removesuffix(_SUFFIX)

    def problem(self, topic: str, settings: Mapping[str, str]) -> str | None:
        for name, kind in _OWN_FORMATS.items():
            if name in topic:
                return f"it is {kind}, in a format of Kafka Streams alone"
        if "delete" in settings.get("cleanup.policy", ""):
            return (
                f"its cleanup.policy is {settings['cleanup.policy']}, so it is that of a store of windows or sessions, "
                "or of a join of streams, whose old keys Kafka deletes by itself"
            )
        if int(settings.get("min.compaction.lag.ms", "0")) >= DAY_MS:
            return (
                f"its min.compaction.lag.ms is {settings['min.compaction.lag.ms']}, so it is that of a versioned "
                "store, which keeps several values of a key"
            )
        return None

    def is_internal(self, topic: str, job: str) -> bool:
        return topic.startswith(f"{job}-") and (topic.endswith("-repartition") or "-KTABLE-FK-JOIN-" in topic)

    def decoder(self, topic: str, committed: Mapping[str, int]) -> Decoder | None:
        """None: all records that :meth:`problem` lets pass are plain."""
        return None
