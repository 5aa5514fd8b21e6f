"""Looks from time to time, on one thread of a process, at what its owners rely on: the settings of the job's topics,
the changelogs, and the blobs (:mod:`statemgr.flows.upkeep`). Commits send no request for this."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from statemgr.engine.coordinator import Coordinator
from statemgr.errors import ClosedError, StatemgrError
from statemgr.flows.opening.open_job import JobTopics
from statemgr.flows.upkeep import Turn, Upkeep
from statemgr.flows.worker import Worker
from statemgr.services import Services

log = logging.getLogger(__name__)
#: Seconds between two looks.
LOOK_S = 60.0


class UpkeepThread:
    """Looks after the owners of a process. ``owners``: those that are there now."""

    def __init__(self, services: Services, topics: JobTopics, owners: Callable[[], Iterable[Coordinator]]) -> None:
        self._topics = topics
        self._owners = owners
        self._clock = services.clock
        self._upkeep = Upkeep(services)
        self._worker: Worker[None] = Worker(services, "upkeep", f"job {services.config.job_name}", background=True)

    def start(self) -> None:
        """Look from now on. Idempotent."""
        self._worker.attempt("looking after the backups", self._run)

    def look(self) -> None:
        """Look once. A part that fails is logged, and looked at the next time."""
        self._try("the topics", self._topics.look)
        turns: list[Turn] = []
        self._try("the orders to check blobs", lambda: turns.append(self._upkeep.turn()))
        for turn in turns:
            looks = [(task, partial(owner.look, task, turn)) for owner in self._owners() for task in owner.clean_ups]
            if [task for task, look in looks if not self._try(task, look)]:
                self._upkeep.repeat(turn)

    def close(self) -> None:
        """Stop. Nobody waits for a look in progress."""
        self._worker.close(wait=False)

    def _run(self) -> None:
        looked_s = self._clock.elapsed()
        while self._worker.pause(LOOK_S):
            # after a stop has given up what is in progress, pauses are short
            if self._clock.elapsed() - looked_s >= LOOK_S:
                self.look()
                looked_s = self._clock.elapsed()

    def _try(self, what: str, part: Callable[[], None]) -> bool:
        """Returns: whether it was looked at."""
        self._worker.go_on()
        try:
            part()
            return True
        except ClosedError:
            raise
        except StatemgrError as error:
            log.warning("%s could not be looked at, which is tried again: %s", what, error)
        except Exception:  # the next look must come
            log.exception("%s could not be looked at, which is tried again", what)
        return False
