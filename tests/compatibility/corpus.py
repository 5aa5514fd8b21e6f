"""A job as it is on its servers, in one file: topics with their records and IDs, blobs, and what is in the stores.

The file is msgpack in a zstandard frame. The broker and the blob store are those of :mod:`statemgr.testing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
import zstandard
from confluent_kafka import Uuid

from statemgr import JobConfig
from statemgr.blobs.memory import _Space, _spaces
from statemgr.ports import BlobInfo
from statemgr.testing.memory_kafka import Topic
from statemgr.testing.memory_log import Entry, Log, Txn
from statemgr.testing.memory_servers import MemoryServers

DIRECTORY = Path(__file__).parent


@dataclass(frozen=True)
class Truth:
    """What a task has at one checkpoint: its input offsets, and store → key → value."""

    task: str
    checkpoint_id: str
    inputs: Mapping[str, int]
    stores: Mapping[str, Mapping[bytes, bytes]]


def save(file: Path, servers: MemoryServers, config: JobConfig, truths: Sequence[Truth]) -> None:
    """Write a job that nobody runs."""
    settings = {
        key: value for key, value in config.to_mapping().items() if not key.startswith(("kafka.", "blob.store.uri"))
    }
    broker, transactions = servers.broker, dict[int, int]()

    def entry(one: Entry | None) -> Any:
        if one is None:
            return None
        owner = None
        if one.owner is not None:
            owner = (transactions.setdefault(id(one.owner), len(transactions)), one.owner.committed)
        return [one.key, one.value, [*one.headers], one.timestamp, owner, one.is_marker]

    topics = {
        name: {
            "id": (topic.topic_id.get_most_significant_bits(), topic.topic_id.get_least_significant_bits()),
            "config": topic.config,
            "partitions": [[log.start, [entry(one) for one in log.entries]] for log in topic.logs],
        }
        for name, topic in broker.topics.items()
    }
    blobs = {name: [data, asdict(info)] for name, (data, info) in _spaces[_space(servers)].blobs.items()}
    whole = {
        "now_ms": servers.now_ms,
        "config": settings,
        "topics": topics,
        "blobs": blobs,
        "truths": [asdict(truth) for truth in truths],
    }
    file.write_bytes(zstandard.compress(msgpack.packb(whole), 19))


@contextmanager
def loaded(file: Path) -> Iterator[tuple[MemoryServers, Sequence[Truth]]]:
    """The job on servers of its own, at the time of its end, and what its checkpoints have, oldest first."""
    whole = msgpack.unpackb(zstandard.decompress(file.read_bytes()), strict_map_key=False)
    servers = MemoryServers(whole["config"], whole["now_ms"])
    servers.open()
    try:
        transactions: dict[int, Txn] = {}

        def entry(one: Any) -> Entry | None:
            if one is None:
                return None
            key, value, headers, timestamp, owner, is_marker = one
            txn = None
            if owner is not None:
                txn = transactions.setdefault(owner[0], Txn(timestamp[1], committed=owner[1]))
            return Entry(key, value, [tuple(header) for header in headers], tuple(timestamp), txn, is_marker)

        for name, topic in whole["topics"].items():
            logs = [Log([entry(one) for one in entries], start) for start, entries in topic["partitions"]]
            servers.broker.topics[name] = Topic(Uuid(*topic["id"]), logs, topic["config"], 1)
        space = _spaces.setdefault(_space(servers), _Space())
        space.blobs.update({name: (data, BlobInfo(**info)) for name, (data, info) in whole["blobs"].items()})
        yield servers, [Truth(**truth) for truth in whole["truths"]]
    finally:
        servers.close()


def _space(servers: MemoryServers) -> str:
    return str(servers.config.get("blob.store.uri")).removeprefix("memory://")
