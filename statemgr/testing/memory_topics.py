"""What a broker accepts as a topic: names, settings with their defaults, and which records a topic refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from confluent_kafka import KafkaError

from statemgr.testing.memory_log import failure

#: What a broker accepts as the name of a topic (``Topic.validate`` of Kafka).
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
#: Settings of a topic and their defaults, as ``describe_configs`` of a Kafka 4 broker lists them.
DEFAULTS = {
    "cleanup.policy": "delete",
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.type": "producer",
    "compression.zstd.level": "3",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": "9223372036854775807",
    "flush.ms": "9223372036854775807",
    "follower.replication.throttled.replicas": "",
    "index.interval.bytes": "4096",
    "leader.replication.throttled.replicas": "",
    "local.retention.bytes": "-2",
    "local.retention.ms": "-2",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "remote.log.copy.disable": "false",
    "remote.log.delete.on.disable": "false",
    "remote.storage.enable": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
#: Settings that allow only these values; ``cleanup.policy`` may be a list of them.
_CHOICES = {
    "cleanup.policy": {"compact", "delete"},
    "compression.type": {"uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"},
    "message.timestamp.type": {"CreateTime", "LogAppendTime"},
}


def check_name(name: str) -> None:
    """Raises: KafkaException for a name that no topic can have."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise failure(KafkaError.TOPIC_EXCEPTION, "Broker: Invalid topic")


def check_settings(given: Mapping[str, str]) -> None:
    """Raises: KafkaException for a setting that no topic has, or a value that it does not allow."""
    for name, value in given.items():
        if name not in DEFAULTS:
            raise failure(KafkaError.INVALID_CONFIG, f"Unknown topic config name: {name}")
        choices = _CHOICES.get(name)
        if choices is not None:
            is_valid = set(value.split(",") if name == "cleanup.policy" else [value]) <= choices
        elif re.fullmatch(r"-?\d+", DEFAULTS[name]):
            is_valid = re.fullmatch(r"-?\d+", value) is not None
        else:
            is_valid = True
        if not is_valid:
            raise failure(KafkaError.INVALID_CONFIG, f"Invalid value {value} for configuration {name}")


def check_record(
    config: Mapping[str, str], key: bytes | None, size: int, timestamp_ms: int | None, now_ms: int
) -> None:
    """Check a record as the leader of a partition does. A batch is taken for one record without compression.

    Args:
        config: the settings that somebody gave the topic. Without ``max.message.bytes`` there, any size is allowed,
            because tests cannot set ``message.max.bytes`` of the broker.
        size: bytes of the batch.
        timestamp_ms: of a producer that gives one.

    Raises: KafkaException.
    """
    settings = DEFAULTS | dict(config)
    if "max.message.bytes" in config and size > int(config["max.message.bytes"]):
        raise failure(KafkaError.MSG_SIZE_TOO_LARGE, "Broker: Message size too large")
    if key is None and "compact" in settings["cleanup.policy"]:
        raise failure(KafkaError.INVALID_RECORD, "Broker: Broker failed to validate record")
    if timestamp_ms is not None and settings["message.timestamp.type"] == "CreateTime":
        after, before = (int(settings[f"message.timestamp.{side}.max.ms"]) for side in ("after", "before"))
        if not -before <= timestamp_ms - now_ms <= after:
            raise failure(KafkaError.INVALID_TIMESTAMP, "Broker: Invalid timestamp")
