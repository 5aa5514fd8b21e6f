"""Which job of other software a job was adopted from, in a record of its own on the checkpoint topic. Pure.

The publish of the adoption writes it, and nothing deletes it. It tells a second run of ``statemgr adopt`` that the
first one succeeded, and the first openings of the new job's tasks whether the old job has gone on since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from statemgr.errors import InvalidError
from statemgr.ids import check_offsets
from statemgr.model.codecs.generic import Codec
from statemgr.model.codecs.records import Place, opened, sealed
from statemgr.model.codecs.special_types import SHAPES


@dataclass(frozen=True, slots=True)
class AdoptedJob:
    """The old job, as it was at the adoption.

    Attributes:
        origin: what it ran on, as the command line calls it.
        job: its name; None if everything was given.
        group: its consumer group, if its offsets are those of one.
        checkpoint_topic: the topic of its checkpoints, if it was given.
        in_place: whether its changelogs became those of the new job.
        changelogs: store → topic of the old changelog.
        snapshots: stores whose snapshots were adopted.
        given: source partition → next offset that the user gave.
        committed: source partition → next offset that its group had committed.
        ends: partition of a topic that only the old job writes (``totals-changelog-0``) → its end.
    """

    origin: str
    job: str | None
    group: str | None
    checkpoint_topic: str | None
    in_place: bool
    changelogs: Mapping[str, str]
    snapshots: tuple[str, ...]
    given: Mapping[str, int]
    committed: Mapping[str, int]
    ends: Mapping[str, int]

    def encoded(self, job_name: str, job_id: str) -> tuple[bytes, bytes]:
        """Key and value of the record of the new job. Raises: InvalidError."""
        key = _KEY.encode({"job_name": job_name, "job_id": job_id})
        return key, sealed(key, _VALUE.encode(self))


_KEY = Codec("adopted_job_key.v1", dict, SHAPES)
_VALUE = Codec("adopted_job.v1", AdoptedJob, SHAPES)


def is_adopted_job(key: bytes) -> bool:
    """Whether a record of the checkpoint topic says which job a job was adopted from."""
    return key.startswith(_KEY.header)


def decode_adopted_job(key: bytes, value: bytes | None, place: Place) -> tuple[tuple[str, str], AdoptedJob | None]:
    """The new job's name and ID, and the old job; None if the record is a delete. Raises: CorruptRecord."""
    refuse = place.refuser("adopted job")
    at = _KEY.decode(key, refuse)
    of_job = at["job_name"], at["job_id"]
    if value is None:
        return of_job, None
    found = _VALUE.decode(opened(key, value, refuse), refuse)
    for offsets in (found.given, found.committed, found.ends):
        try:
            check_offsets(offsets)
        except InvalidError as error:
            raise refuse(error.message) from error
    return of_job, found
