"""What a consumer loop asks of its input topics before it reads them."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from statemgr.errors import ConfigError, MissingState, UnavailableError
from statemgr.kafka.clients import is_missing, translate

_METADATA_SECONDS = 30.0


def check_topics(consumer: Consumer, topics: Sequence[str], tasks: int) -> None:
    """Raises: MissingState; ConfigError unless each has one partition per task; AccessDenied, UnavailableError."""
    for topic in topics:
        try:
            found = consumer.list_topics(topic, timeout=_METADATA_SECONDS).topics[topic]
        except KafkaException as error:
            raise UnavailableError(f"the brokers do not answer: {error.args[0].str()}", topic=topic) from error
        if found.error is not None and is_missing(found.error):
            hint = f"create it with {tasks} partitions, or correct task.inputs"
            raise MissingState("the input topic does not exist", hint=hint, topic=topic)
        if found.error is not None:
            raise translate(found.error, "asking for the input topic", topic=topic)
        if len(found.partitions) != tasks:
            raise ConfigError(
                f"the input topic has {len(found.partitions)} partitions, the job {tasks} tasks",
                hint="set job.tasks to the number of partitions; of several topics all must have as many",
                topic=topic,
                key="job.tasks",
            )


def check_offset(consumer: Consumer, source: TopicPartition, offset: int) -> None:
    """The consumer would jump in silence, as its auto.offset.reset says. Raises: MissingState."""
    low, high = consumer.get_watermark_offsets(source, timeout=_METADATA_SECONDS)
    if low <= offset <= high:
        return
    raise MissingState(
        f"the checkpoint continues at offset {offset}, the topic has {low} to {high}",
        hint="its retention is shorter than the job was down" if offset < low else "was the topic made anew?",
        topic=source.topic,
        partition=source.partition,
    )
