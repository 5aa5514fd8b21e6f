"""How large the records of the checkpoint topic may get, and what travels inside them. Pure.

A record that grew beyond a limit at some commit would end the job there, so that the parts are bounded: what is inline
in a task's record, how many TTLs may be outstanding, and how many input partitions and stores a job may have.
"""

from __future__ import annotations

#: Bytes of any record's key and value.
MOST_RECORD = 256 * 1024
#: Bytes of all chains, and of all attachments, inline in one record, and in all records of one publish together.
_CHAINS, _ATTACHMENTS = 64 * 1024, 16 * 1024
_CHAINS_OF_PUBLISH, _ATTACHMENTS_OF_PUBLISH = 768 * 1024, 512 * 1024
_CHAIN = 8 * 1024
#: Published blobs of a task whose TTL could not be removed, at most.
MOST_OUTSTANDING = 400
#: Bytes that an input partition may take in a record: its offset, and its number and offset in the JSON of both ends of
#: a micro-batch (see the format), with offsets up to 10^15.
_OF_PARTITION = 8 + 2 * (7 + 1 + 16 + 1)
#: Bytes of what a job record has beside its input partitions and stores.
_JOB = 8 * 1024


def inline_chain_limit(stores: int, tasks: int) -> int:
    """Bytes of a store's chain that may be inline, where ``tasks`` are published together."""
    stores = max(stores, 1)
    return min(_CHAIN, _CHAINS // stores, _CHAINS_OF_PUBLISH // (tasks * stores))


def inline_attachments_limit(tasks: int) -> int:
    """Bytes of a task's attachments that may be inline, where ``tasks`` are published together."""
    return min(_ATTACHMENTS, _ATTACHMENTS_OF_PUBLISH // tasks)


def most_partitions(settings: int) -> int:
    """How many input partitions fit a record whose stores' settings take this many bytes."""
    return (MOST_RECORD - _JOB - settings) // _OF_PARTITION
