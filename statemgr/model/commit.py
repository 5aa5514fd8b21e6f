"""A prepared commit: everything that is needed to publish one task's commit, already durable. Pure.

The process with the state makes it (a consumer loop, a Spark executor), and the process with the transaction publishes
it (the loop itself, Spark's driver). It is small, because its large parts are blobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Protocol, TypeVar

from statemgr.model.checkpoint import Attachment, BlobRef, Layout, Marker

T = TypeVar("T")
#: A put, or a delete if the value is None.
Change = tuple[bytes, bytes | None]


def are_all(kind: type | UnionType, found: Iterable[object]) -> bool:
    """Whether all of them are of a kind."""
    return all(issubclass(of, kind) for of in set(map(type, found)))


def size_of(changes: Mapping[bytes, bytes | None]) -> int:
    """Bytes of keys and values."""
    return sum(map(len, changes)) + sum(map(len, filter(None, changes.values())))


class ChangeSet(Protocol):
    """Changes in the order in which they are applied. They can be iterated any number of times."""

    @property
    def count(self) -> int:
        """The number of changes."""

    @property
    def size(self) -> int:
        """Bytes of all keys and values."""

    def __iter__(self) -> Iterator[Change]: ...


class StoreSession:
    """Exists from the opening of a store to its close. Sequence numbers of changes are valid within it, and backends
    keep their unpublished knowledge about the store in it.

    Attributes:
        freezes: how many times its changes were frozen.
    """

    def __init__(self) -> None:
        self.freezes = 0
        self._kept: dict[object, Any] = {}

    def kept_by(self, backend: object, make: Callable[[], T]) -> T:
        """The object that a backend keeps in this session, made at the first call. Safe from any thread."""
        kept: T = self._kept.setdefault(backend, make())
        return kept


class NumberedChanges(ChangeSet, Protocol):
    """The changes of one store since its last acknowledged commit, with consecutive sequence numbers.

    They go from ``first`` to ``end``, without ``end``. Numbers of different sessions cannot be compared.
    """

    @property
    def session(self) -> StoreSession:
        """The session that the numbers belong to."""

    @property
    def first(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def freeze(self) -> int:
        """The number of this freeze in its session."""

    def since(self, number: int) -> NumberedChanges:
        """The changes from ``number`` on, at which a commit must have begun or ended."""


@dataclass(frozen=True, slots=True)
class PreparedChanges:
    """What a commit sends to a changelog. Exactly one of ``local``, ``inline`` and ``blob`` is set.

    ``fill``: the changes are the whole state, and every other key in the topic needs a tombstone. ``local``: changes
    that stay in this process (never encoded). ``inline``: the bytes of a change segment. ``blob``: where it is.
    ``check``: a fill in this process calls it now and then, and stops if it raises (never encoded).
    """

    fill: bool
    local: ChangeSet | None = None
    inline: bytes | None = None
    blob: BlobRef | None = None
    check: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PreparedStore:
    """One store's part of a commit: its new state ID; factory → marker, for backends whose marker is known already; and
    factory → changes, for backends whose marker the publishing transaction gives. A backend in neither mapping gets no
    marker."""

    state_id: str
    markers: Mapping[str, Marker] = field(default_factory=dict)
    changes: Mapping[str, PreparedChanges] = field(default_factory=dict)

    @property
    def has_backup(self) -> bool:
        """Whether a backend has the store."""
        return bool(self.markers or self.changes)


@dataclass(frozen=True, slots=True)
class ProducedRecord:
    """One output record that is sent in the publishing transaction (``task.produce``).

    ``timestamp_ms``: epoch milliseconds; None for the time at which it is sent.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedCommit:
    """One task's prepared commit.

    Attributes:
        base_checkpoint_id: the checkpoint that it continues, None for the first.
        input_offsets: None if the publisher has those of the whole job.
        added_blobs: everything that this commit uploaded. The publish removes their TTL.
        added_bytes: their size, for the metrics of the process that uploaded them (never encoded).
        input_topic_ids: input topic → its ID in Kafka as text, if it is known.
    """

    job_name: str
    job_id: str
    task: str
    layout: Layout
    epoch: int
    attempt: str
    base_checkpoint_id: str | None
    input_offsets: Mapping[str, int] | None
    stores: Mapping[str, PreparedStore]
    added_blobs: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    produced: tuple[ProducedRecord, ...] = ()
    added_bytes: int = field(default=0, compare=False)
    input_topic_ids: Mapping[str, str] = field(default_factory=dict)
