"""Shapes of jobs of Apache Samza, and what comes of adopting each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.peers.samza import BLOBS, KAFKA
from tests.peers.shapes import told


@dataclass(frozen=True)
class SamzaShape:
    """A job that counts rows.

    Attributes:
        settings: of the job, ``__`` for ``.``.
        dies: whether it dies after it has written changes and before its checkpoint.
        refused: what the refusal names, and why; None if the job is adopted as it is.
        options: with these it is adopted. ``JOB`` is the job, and ``BLOBS`` the URI of its blob store.
    """

    partitions: int = 2
    backends: tuple[str, ...] = (KAFKA,)
    settings: Mapping[str, str] = field(default_factory=dict)
    dies: bool = False
    refused: tuple[str, str] | None = None
    options: Sequence[str] = ()

    @property
    def outcome(self) -> str:
        """Return what comes of it, as the page about migrations has it."""
        return told(self.refused, self.options)


SAMZA: dict[str, SamzaShape] = {
    "changelogs": SamzaShape(),
    "changelogs of twelve tasks": SamzaShape(12),
    "changelogs, died before its checkpoint": SamzaShape(dies=True),
    "checkpoints of version 1": SamzaShape(
        settings={"task__checkpoint__write__versions": "1"},
        refused=("JOB-counts", "does not name the stores"),
        options=["--changelog", "counts=JOB-counts"],
    ),
    "checkpoints of version 2": SamzaShape(settings={"task__checkpoint__write__versions": "2"}),
    "blob store": SamzaShape(
        backends=(BLOBS,), refused=("counts", "only in its blob store"), options=["--blobs", "BLOBS"]
    ),
    "changelogs and blob store": SamzaShape(backends=(KAFKA, BLOBS)),
    "store with a time to live": SamzaShape(
        settings={"stores__counts__rocksdb__ttl__ms": "86400000"},
        refused=("counts", "as that of a store with rocksdb.ttl.ms"),
        options=["--confirm", "counts=ttl"],
    ),
}
