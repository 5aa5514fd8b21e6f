"""How many messages of the input a process has not processed yet, asked for at each scrape of the metrics.

The loop pays nothing for it: a scrape reads the positions that the loop keeps anyway. The end of a partition is what
the broker said when the task was restored, or the later answer to an admin client, which asks for all partitions in
one request, at most every :data:`ASK_EVERY_S` seconds and on a thread of its own. The answer is also right while a
partition is paused, or while ``process`` is stuck and nothing is fetched.

``docs/decisions/0022-lag-at-a-scrape.md`` has what else was measured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from statemgr.backends.services import Services
from statemgr.errors import StatemgrError
from statemgr.flows.worker import Worker
from statemgr.kafka.metadata import TopicMetadata

log = logging.getLogger(__name__)
#: Seconds between two questions for the ends of the input.
ASK_EVERY_S = 10.0
#: Seconds that a scrape waits for the answer. If it comes later, the next scrape has it.
_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a task has read a source partition.

    ``next``: offset of the next message to process. ``end``: the highest end that is known without asking, or 0.
    """

    task: str
    topic: str
    partition: int
    next: int
    end: int = 0


class InputLag:
    """A source of ``statemgr_input_lag``."""

    def __init__(self, services: Services, reached: Callable[[], Iterable[Reached]]) -> None:
        self._services = services
        self._reached = reached
        self._ends: dict[tuple[str, int], int] = {}
        self._due = float("-inf")
        self._metadata: TopicMetadata | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._asking: Worker[None] = Worker(services, "input-ends", f"job {services.config.job_name}", background=True)

    def series(self) -> list[tuple[tuple[str, ...], float]]:
        """Labels (task, topic, partition) and lag of each source partition. Waits a moment for a broker."""
        found = list(self._reached())
        self._ask({(one.topic, one.partition) for one in found})
        lags: list[tuple[tuple[str, ...], float]] = []
        for one in found:
            end = max(one.end, self._ends.get((one.topic, one.partition), 0))
            lags.append(((one.task, one.topic, str(one.partition)), float(max(end - one.next, 0))))
        return lags

    def close(self) -> None:
        """Close the client."""
        with self._closing:
            self._closed = True
            if self._metadata is not None:
                self._metadata.close()
        self._asking.close(wait=False)

    def _ask(self, places: set[tuple[str, int]]) -> None:
        now = self._services.clock.monotonic()
        if (
            places
            and now >= self._due
            and self._asking.attempt("asking for the ends of the input", self._asker(places))
        ):
            self._due = now + ASK_EVERY_S
            self._asking.wait(_PATIENCE_S)

    def _asker(self, places: set[tuple[str, int]]) -> Callable[[], None]:
        def ask() -> None:
            with self._closing:
                if self._closed:
                    return
                if self._metadata is None:
                    self._metadata = TopicMetadata(self._services.config, self._services.clock)
            try:
                self._ends |= self._metadata.ends(places)
            except StatemgrError as error:  # the commits and the consumer report it too
                log.debug("the ends of the input are unknown: %s", error)

        return ask
