"""After an adoption: has the old job gone on? Writes nothing.

Nobody can fence the old job, because nothing is written to its topics. If somebody starts it again, it processes the
same input as the new job. So the adoption records where the old job was, and the first opening of each task compares.
This is all that the core knows of ``statemgr adopt``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress

from statemgr.errors import AccessDenied, MissingError, PermissionNeeded
from statemgr.ids import task_index
from statemgr.kafka.metadata import TopicMetadata
from statemgr.model.checkpoint import FIRST, Checkpoint
from statemgr.model.jobs.adopted_job import AdoptedJob
from statemgr.model.jobs.permissions import Permissions
from statemgr.services import Services

log = logging.getLogger(__name__)
#: What an old job has done: the partition of an input whose offset has moved (None: a topic that only the old job
#: writes has grown), and the end of a sentence about it.
Step = tuple[int | None, str]
#: Seconds for which tasks share a look at the old job.
_FRESH_S = 60.0
#: What to do when the old job was stopped.
_AGAIN = (
    ", and adopt its newer state: delete the new job's topics, its directory below state.dir and its blobs, or set "
    "another job.name. Or"
)
_IN_PLACE = ". Delete nothing: the state has no other copy, because it was adopted in place. Then"


def gone_on(metadata: TopicMetadata, adopted: AdoptedJob) -> list[Step]:
    """What the old job has done since its adoption.

    The new job may be in the old one's consumer group. Then its own commits move the offsets, too. The offsets that it
    began with are none of this.

    Raises: UnavailableError, AccessDenied.
    """
    now: Mapping[str, int] = {}
    if adopted.group is not None:
        with suppress(MissingError):  # somebody deleted the old job
            now = metadata.committed(adopted.group)
    moved: list[Step] = [
        (_partition(source), f"the old job has gone on to offset {offset} of {source}")
        for source, offset in sorted(now.items())
        if offset not in _begins(adopted, source)
    ]
    places = {place: (place.rpartition("-")[0], _partition(place)) for place in sorted(adopted.ends)}
    ends = metadata.ends(places.values())
    there = metadata.describe(sorted({topic for topic, number in places.values() if (topic, number) not in ends}))
    for place, (topic, number) in places.items():
        end = ends.get((topic, number))
        if end is None and topic in there and number < len(there[topic].partitions):
            end = metadata.bounds(topic, number)[1]  # waits for a leader
        if end is not None and end > adopted.ends[place]:
            moved.append((None, f"the old job has written to {place}"))
    return moved


def certain(moved: Sequence[Step], tasks: Collection[int], of: int) -> str | None:
    """The first of :func:`gone_on` that the old job has certainly done, if ``tasks`` have not committed since.

    Args:
        of: the number of all tasks. Partition 3 of an input belongs to task 1 of 2.
    """
    return next((text for partition, text in moved if partition is None or partition % of in tasks), None)


def title(adopted: AdoptedJob) -> str:
    """The old job, for a message."""
    return f"job {adopted.job} ({adopted.origin})" if adopted.job is not None else f"changelogs ({adopted.origin})"


def _begins(adopted: AdoptedJob, source: str) -> tuple[int, int]:
    """The offset of the old job's group at the adoption, and that of the new job."""
    committed = adopted.committed.get(source, adopted.given.get(source, 0))
    return committed, adopted.given.get(source, committed)


def _partition(place: str) -> int:
    return int(place.rpartition("-")[2])


class OldJobWatch:
    """Looks whether the old job has gone on, when tasks are opened. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock = threading.Lock()
        #: What the last look has found, and when it was, on the clock of durations.
        self._moved: Sequence[Step] = ()
        self._looked_s = float("-inf")

    def check(self, adopted: AdoptedJob, task: str, checkpoint: Checkpoint | None, permissions: Permissions) -> None:
        """Look, unless the task has committed since its adoption, or may repeat input. Tasks that open within a minute
        share a look.

        A rollback to the adoption, or a repair of its backups, is no such commit.

        Raises: PermissionNeeded if the old job has gone on; UnavailableError.
        """
        if permissions.allow_repeated_input or checkpoint is None or checkpoint.output_sequence != FIRST:
            return
        with self._lock:
            if self._services.clock.monotonic() - self._looked_s > _FRESH_S:
                self._moved = self._look(adopted)
                self._looked_s = self._services.clock.monotonic()
            problem = certain(self._moved, {task_index(task)}, self._services.config.tasks)
        if problem is not None:
            raise PermissionNeeded(
                f"since this job was adopted from {title(adopted)}, {problem}: both would process the same input",
                hint=f"stop the old job{_IN_PLACE if adopted.in_place else _AGAIN} begin at the adopted offsets all "
                "the same: `statemgr permit --allow-repeated-input`, or open the job once with "
                "allow_repeated_input=True",
                job=self._services.config.job_name,
                task=task,
            )

    def _look(self, adopted: AdoptedJob) -> Sequence[Step]:
        with closing(TopicMetadata(self._services.config, self._services.clock)) as metadata:
            try:
                return gone_on(metadata, adopted)
            except AccessDenied as error:
                log.warning("whether %s has gone on since its adoption is unknown: %s", title(adopted), error)
                return ()
