"""Tries to publish a transaction, for ``statemgr doctor``. It uses a temporary topic and deletes it afterwards.

It does not touch the checkpoint topic: a probe that dies half-way must not make the job's readers wait.
"""

from __future__ import annotations

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord
from statemgr.ids import IdSource, transactional_id
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.kafka.clients import REQUEST_S
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.publisher import TransactionalPublisher
from statemgr.kafka.topics import TopicAdmin, TopicSpec
from statemgr.ports import Clock


def probe_transaction(config: JobConfig, clock: Clock, ids: IdSource) -> int:
    """Publish one record in a transaction and read it back.

    Returns: how far the broker's clock is ahead of this machine's, in milliseconds (exact to the length of a request).
    Raises: UnavailableError, AccessDenied, ConfigError and the other errors of publishing.
    """
    topic = f"__statemgr_doctor_{ids.attempt_id()}"
    with TopicAdmin(config) as topics:
        topics.create_missing([TopicSpec(topic, 1, -1, {"message.timestamp.type": "LogAppendTime"})])
    try:
        publisher = TransactionalPublisher(config, transactional_id(config.job_name, config.job_id, "doctor"), clock)
        try:
            publisher.fence()
            with publisher.transaction() as transaction:
                transaction.send(topic, b"key", b"value", partition=0)
                before = clock.time_ns()
                transaction.flush()
                after = clock.time_ns()
        finally:
            publisher.close()
        return _written_at(config, clock, topic) - (before + after) // 2_000_000
    finally:
        _delete(config, topic)


def _written_at(config: JobConfig, clock: Clock, topic: str) -> int:
    changelog = ChangelogTopics(config, clock)
    try:
        start, end = changelog.bounds(topic, 0)
        for batch in changelog.read(topic, 0, start, end):
            for record in batch:
                if (record.key, record.value) == (b"key", b"value"):
                    return record.timestamp_ms
    finally:
        changelog.close()
    raise CorruptRecord("the broker did not return a record that was committed", topic=topic, partition=0)


def _delete(config: JobConfig, topic: str) -> None:
    metadata = TopicMetadata(config)
    try:
        metadata.ask(
            "deleting the probe's topic",
            lambda: metadata.client.delete_topics([topic], request_timeout=REQUEST_S),
            missing_is_none=True,
            topic=topic,
        )
    finally:
        metadata.close()
