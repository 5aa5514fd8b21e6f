"""An origin: another stream processor whose changelogs statemgr can adopt. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from statemgr.operations.adopt.origins.kind import Hint, Kind, OldRecord


class Origin(Protocol):
    """A format. Stateless."""

    @property
    def name(self) -> str:
        """As the command line calls it."""

    @property
    def leaves_out_uncommitted(self) -> bool:
        """Whether a decoder recognises changes that were made from input which the old job did not commit."""

    @property
    def tables_without_changelog(self) -> bool:
        """Whether the changelog of a table may be the topic that it is read from."""

    @property
    def title(self) -> str:
        """As people call it."""

    def store(self, topic: str, job: str) -> str | None:
        """The name of the store whose changelog a topic is, if it is one of the old job ``job``; None if it is not."""

    def other_jobs(self, topic: str, job: str) -> list[str]:
        """Longer names of jobs whose topic it may be as well, by its name alone."""

    @property
    def producers(self) -> Sequence[str]:
        """How the producers of an input may choose a partition by the keys of messages in the keys of stores, by name
        (:data:`statemgr.model.keys.partitioners.PRODUCERS`)."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """Kinds of stores by name. The first one is what a store is if nothing tells otherwise."""

    def hint(self, topic: str, settings: Mapping[str, str], own_settings: Mapping[str, str]) -> Hint | None:
        """What a changelog's name and settings say about its kind; None if nothing.

        Args:
            own_settings: those that somebody gave the topic; the others are defaults.
        """

    def is_internal(self, topic: str, job: str) -> bool:
        """Whether an input topic is internal to the old job, which writes it for itself."""


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
        made_ms: when the checkpoint of each task was made, or its record was written if that is earlier, in epoch
            milliseconds; 0 if it does not say.
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
