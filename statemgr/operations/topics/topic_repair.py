"""Copies the valid records of a checkpoint topic to a new topic, and lists the records that it leaves out.

It reads committed records only, and keeps their order, keys, values and deletes. The copy is one transaction, so the
new topic has all of it or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from confluent_kafka import Message

from statemgr.config import JobConfig
from statemgr.errors import CorruptError, InvalidError
from statemgr.kafka.checkpoint_assembly import PARTITION
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader, offset_of
from statemgr.kafka.topics import TopicAdmin, checkpoint_topic_spec
from statemgr.kafka.transactions.publisher import publish_alone
from statemgr.model import codecs
from statemgr.model.jobs.adopted_job import decode_adopted_job, is_adopted_job
from statemgr.model.jobs.layouts import decode_retired_layout, is_retired_layout
from statemgr.model.jobs.offers import decode_offer, is_offer
from statemgr.model.jobs.permissions import decode_permit, is_permit
from statemgr.ports import Clock

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A record that no version of statemgr can have written: its offset, its key as text, and what is wrong."""

    offset: int
    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Repaired:
    """The number of valid records, and the records that are not valid."""

    copied: int
    left_out: tuple[LeftOut, ...]


def look(config: JobConfig, clock: Clock) -> Repaired:
    """Report what a repair would do. Raises: MissingState, UnavailableError."""
    return _sort(config, clock)[0]


def copy_valid(config: JobConfig, clock: Clock, target: str) -> Repaired:
    """Copy the valid records to ``target``, which is created if missing and must be empty. Fence owners first.

    Raises: InvalidError if the target has records; UnavailableError, AccessDenied.
    """
    # keep the records' own times: with the broker's time of the copy, old checkpoints would look young
    spec = replace(checkpoint_topic_spec(config), name=target, created_with={})
    with TopicAdmin(config, clock) as admin:
        admin.create_missing([spec])
        admin.verify([spec])
        start, end = admin.bounds(target, PARTITION)
    if end > start:
        raise InvalidError(
            "the target topic already has records", hint="choose another with `statemgr topics repair --to`"
        )
    result, valid = _sort(config, clock)
    records = ((message.key(), message.value()) for message in valid)
    publish_alone(config, clock, "repair", target, records)
    return result


def _sort(config: JobConfig, clock: Clock) -> tuple[Repaired, list[Message]]:
    valid: list[Message] = []
    left_out = []
    for message in _records(config, clock):
        why = _problem(config.checkpoint_topic, message)
        if why is None:
            valid.append(message)
        else:
            key = message.key()
            shown = "(none)" if key is None else repr(key[:_SHOWN])[2:-1]
            left_out.append(LeftOut(offset_of(message), shown, why))
    return Repaired(len(valid), tuple(left_out)), valid


def _records(config: JobConfig, clock: Clock) -> Iterator[Message]:
    with TopicMetadata(config, clock) as metadata:
        start, end = metadata.bounds(config.checkpoint_topic, PARTITION)
    for batch in PartitionReader(config, clock).read(config.checkpoint_topic, PARTITION, start, end):
        yield from batch


def _problem(topic: str, message: Message) -> str | None:
    """Why a record is not valid, or None if it is. Records of other jobs on the same topic are valid."""
    data, value = message.key(), message.value()
    if data is None:
        return "it has no key"
    place = codecs.Place(topic, PARTITION, offset_of(message))
    try:
        if is_permit(data):
            decode_permit(data, value, place)
            return None
        if is_offer(data):
            decode_offer(data, value, place)
            return None
        if is_retired_layout(data):
            decode_retired_layout(data, value, place)
            return None
        if is_adopted_job(data):
            decode_adopted_job(data, value, place)
            return None
        key = codecs.decode_key(data, place)
        if value is None:
            return "it deletes a version 1 record, which nothing here does" if key.sequence is None else None
        if key.sequence is None:
            if key.record_version != 1:
                return f"record version {key.record_version} is unknown"
            codecs.decode_record_v1(key, value, place)
        elif key.task:
            codecs.decode_task(data, key, value, place)
        else:
            codecs.decode_job(data, key, value, place)
    except CorruptError as error:
        return error.message
    return None
