"""Writes, lists and deletes one-shot permissions on the checkpoint topic. Fences no owner of the job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from statemgr.config import JobConfig
from statemgr.ids import IdSource
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.transactions.publisher import publish_alone
from statemgr.model.jobs.permissions import Permissions, Permit
from statemgr.ports import Clock


class PermitTopic:
    """The permissions of one job that no opening has used up yet."""

    def __init__(self, config: JobConfig, clock: Clock, ids: IdSource) -> None:
        self._config = config
        self._clock = clock
        self._ids = ids
        self._log = CheckpointTopic(config, clock)

    def give(self, tasks: Collection[str], permissions: Permissions) -> list[Permit]:
        """Give the next opening of each task these permissions. Raises: MissingState without a checkpoint topic."""
        self._log.read(())
        now_ms = self._clock.time_ns() // 1_000_000
        name, job_id = self._config.job_name, self._config.job_id
        made = [Permit(name, job_id, task, self._ids.token(), permissions, now_ms) for task in tasks]
        self._write((permit.key, permit.value) for permit in made)
        return made

    def waiting(self, tasks: Collection[str]) -> list[Permit]:
        """The permissions of these tasks, or of all if none is named, that no opening has used up."""
        self._log.read(())
        return [permit for permit in self._log.permits() if permit.task in tasks or not tasks]

    def revoke(self, permits: Sequence[Permit]) -> None:
        """Delete permissions from the topic."""
        self._write((permit.key, None) for permit in permits)

    def close(self) -> None:
        self._log.close()

    def _write(self, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        publish_alone(self._config, self._clock, "permit", self._config.checkpoint_topic, records)
