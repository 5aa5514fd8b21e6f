"""What the consumer loop needs of the state manager, which runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Unpack

from statemgr.engine.input_lag import InputLag, Reached
from statemgr.engine.task import Task
from statemgr.model.jobs.permissions import PermissionFlags
from statemgr.telemetry.metrics import Metrics


class Opener(Protocol):
    """Opens tasks. :class:`statemgr.StateManager` is one, and documents the methods."""

    metrics: Metrics

    def fence_tasks(
        self, tasks: Sequence[str], *, still_owned: Callable[[str], bool], allow_empty_start: bool = False
    ) -> None:
        """Take over the transactional IDs of tasks."""

    def open_task(self, task: str, *, still_owned: Callable[[], bool], **permissions: Unpack[PermissionFlags]) -> Task:
        """Take a task over."""

    def watch_lag(self, reached: Callable[[], Iterable[Reached]]) -> InputLag:
        """Serve the lag of the input in the metrics."""

    def unwatch_lag(self, lag: InputLag) -> None:
        """Serve it no more."""
