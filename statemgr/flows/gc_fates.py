"""The request for a garbage collection, and its report. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from statemgr.errors import StatemgrError
from statemgr.ports import BlobInfo

#: Orphans that the report names as examples.
_EXAMPLES = 20


class Fate(StrEnum):
    """The class of a blob below the job's prefix."""

    #: a retained checkpoint needs or names it
    KEPT = "kept"
    #: no checkpoint needs it, and it is younger than the grace period: it may belong to a commit in progress
    YOUNG = "young"
    #: no checkpoint needs it, and it is old: garbage
    ORPHAN = "orphans"
    #: old, and its task has no checkpoint on the topic, or none that could be read in time: left alone
    UNKNOWN = "unknown"
    #: a name that statemgr never gives: left alone
    FOREIGN = "foreign"


@dataclass(frozen=True, kw_only=True)
class Request:
    """``grace_ms``: None is the shortest. ``delete`` orphans; ``fix``: REMOVE_TTL on what would expire.
    ``allow_no_checkpoints``: also for a job, or a task, that has none."""

    grace_ms: int | None = None
    delete: bool = False
    fix: bool = False
    allow_no_checkpoints: bool = False


@dataclass
class Pile:
    """A number of blobs and their bytes."""

    blobs: int = 0
    size: int = 0

    def add(self, info: BlobInfo) -> None:
        """Count one blob."""
        self.blobs += 1
        self.size += info.size


@dataclass
class Collection:
    """What was found and done.

    ``expiring``: published blobs that still have a TTL (``fixed``: had). ``missing``: blobs that retained checkpoints
    need and that are not there; then nothing was deleted. ``unfinished`` uploads older than the grace period, and how
    many were ``abandoned``. ``failed``: blobs that could not be deleted or fixed, and why.
    """

    grace_ms: int
    piles: dict[Fate, Pile] = field(default_factory=lambda: {fate: Pile() for fate in Fate})
    examples: list[str] = field(default_factory=list)
    deleted: Pile = field(default_factory=Pile)
    expiring: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unfinished: int = 0
    abandoned: int = 0
    failed: dict[str, StatemgrError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, fate: Fate, info: BlobInfo) -> None:
        """Count one listed blob."""
        self.piles[fate].add(info)
        if fate is Fate.ORPHAN and len(self.examples) < _EXAMPLES:
            self.examples.append(info.blob_id)
