"""An origin: another stream processor whose changelogs statemgr can adopt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from statemgr.model.commit import Change


class OldRecord(NamedTuple):
    """One record of an old job's changelog, as Kafka has it. There are millions."""

    key: bytes
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    offset: int


class Skip(Enum):
    """Why a record of the old changelog is no change of the state."""

    BOOKKEEPING = "bookkeeping of the old job"
    UNCOMMITTED = "made from input that the old job did not commit"


Decoded = Change | Skip
#: Takes a record of one partition of a changelog. Raises: InvalidError if it is of a kind of store that is unknown.
Decoder = Callable[[OldRecord], Decoded]


class Origin(Protocol):
    """A format. Stateless."""

    @property
    def name(self) -> str:
        """As the command line calls it."""

    @property
    def leaves_out_uncommitted(self) -> bool:
        """Whether a decoder recognises changes that were made from input which the old job did not commit."""

    @property
    def title(self) -> str:
        """As people call it."""

    def store(self, topic: str, job: str) -> str | None:
        """The name of the store whose changelog a topic is, if it is one of the old job ``job``; None if it is not."""

    def problem(self, topic: str, settings: Mapping[str, str]) -> str | None:
        """Why a changelog cannot be adopted, judged by its name and its settings: the end of a sentence about it."""

    def is_internal(self, topic: str, job: str) -> bool:
        """Whether an input topic is internal to the old job, which writes it for itself."""

    def decoder(self, topic: str, committed: Mapping[str, int]) -> Decoder | None:
        """A function that turns a record of one partition into a plain key and value; None if they are plain already.

        Args:
            committed: input topic → next offset that the old job would have read in the partition of the same number.
        """


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint says that the changes of a task end: a partition of a changelog, and the offset after them."""

    topic: str
    partition: int
    end: int


@dataclass(frozen=True)
class OldCheckpoints:
    """What the newest checkpoints of an old job say.

    Attributes:
        offsets: source partition → next offset.
        places: (store, task) → where its changes end.
        by_topic: (changelog, task) → the same, also for changelogs whose store is not named.
        snapshots: (store, task) → the index blob of its snapshot.
        made_ms: when the checkpoint of each task was made, in epoch milliseconds; 0 if it does not say.
    """

    tasks: int
    offsets: Mapping[str, int]
    places: Mapping[tuple[str, int], Place]
    by_topic: Mapping[tuple[str, int], Place]
    snapshots: Mapping[tuple[str, int], str]
    made_ms: tuple[int, ...]

    @property
    def changelogs(self) -> dict[str, str]:
        """Store → topic, as far as the stores are named."""
        return {store: place.topic for (store, _), place in self.places.items()}

    @property
    def topics(self) -> list[str]:
        """The topics of all changelogs."""
        return sorted({topic for topic, _ in self.by_topic})


@runtime_checkable
class CheckpointingOrigin(Origin, Protocol):
    """A format that keeps offsets, and where the changes end, in a topic of checkpoints."""

    def checkpoint_topic(self, job: str) -> str:
        """The topic's name, unless it is given."""

    def checkpoints(self, records: Iterable[OldRecord]) -> OldCheckpoints:
        """The newest checkpoint of each task, from all records of the topic in their order.

        Raises: CorruptRecord; InvalidError if the job cannot be adopted.
        """
