"""How many messages of the input a process has not processed yet, and whether open transactions hold the rest up.

A scrape of the metrics reads the positions that the loop keeps anyway. The end of a partition is what the broker said
when the task was restored, or the later answer to an admin client, which asks for all partitions in two requests, at
most every :data:`ASK_EVERY_S` seconds and on a thread of its own. The answer is also right while a partition is paused,
or while ``process`` is stuck and nothing is fetched.

The end is the *last stable offset*: nobody receives what lies after it, because a transaction of other software is open
there. If it stays below the high watermark, and where it was, the input is held up.

``docs/decisions/0022-lag-at-a-scrape.md`` has what else was measured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from statemgr.errors import StatemgrError
from statemgr.flows.worker import Worker
from statemgr.kafka.metadata import TopicMetadata
from statemgr.services import Services

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
    """A source of ``statemgr_input_lag`` and ``statemgr_input_held_up_seconds``."""

    def __init__(self, services: Services, reached: Callable[[], Iterable[Reached]]) -> None:
        self._services = services
        self._reached = reached
        self._ends: dict[tuple[str, int], int] = {}
        #: Source partition → its last stable offset, and when an open transaction was first seen there (seconds).
        self._held: dict[tuple[str, int], tuple[int, float]] = {}
        #: When the brokers answered last (seconds): what they have held up since then is not known.
        self._answered = 0.0
        self._due = float("-inf")
        self._places: set[tuple[str, int]] = set()
        #: When the first question was asked that has no answer yet (seconds).
        self._unanswered: float | None = None
        self._metadata: TopicMetadata | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._asking: Worker[None] = Worker(services, "input-ends", f"job {services.config.job_name}", background=True)

    def series(self) -> list[tuple[tuple[str, ...], float]]:
        """Labels (task, topic, partition) and lag of each source partition. Waits a moment for a broker."""
        found = self._asked(_PATIENCE_S)
        lags: list[tuple[tuple[str, ...], float]] = []
        for one in found:
            end = max(one.end, self._ends.get((one.topic, one.partition), 0))
            lags.append(((one.task, one.topic, str(one.partition)), float(max(end - one.next, 0))))
        return lags

    def held_up(self) -> list[tuple[tuple[str, ...], float]]:
        """Labels (task, topic, partition) of each source partition, and for how many seconds an open transaction has
        held it up at least; 0 if none does. Waits as :meth:`series`."""
        found = self._asked(_PATIENCE_S)
        held = {place: self._answered - since for place, (_, since) in tuple(self._held.items())}
        return [((one.task, one.topic, str(one.partition)), held.get((one.topic, one.partition), 0.0)) for one in found]

    def blocked(self) -> list[tuple[Reached, float]]:
        """How far tasks have read the partitions in which they receive nothing more because of an open transaction, and
        for how many seconds at least. Does not wait: the next call has the answer to what this one asks."""
        held = dict(tuple(self._held.items()))
        found = [(one, held[at]) for one in self._asked(0) if (at := (one.topic, one.partition)) in held]
        return [(one, self._answered - since) for one, (stable, since) in found if one.next >= stable]

    def silent_s(self) -> float:
        """For how many seconds the brokers have not answered. Asks nothing."""
        unanswered = self._unanswered
        return 0.0 if unanswered is None else self._services.clock.elapsed() - unanswered

    def close(self) -> None:
        """Close the client."""
        with self._closing:
            self._closed = True
            if self._metadata is not None:
                self._metadata.close()
        self._asking.close(wait=False)

    def _asked(self, patience_s: float) -> list[Reached]:
        """The positions now, after asking for the ends if it is time."""
        found = list(self._reached())
        self._ask({(one.topic, one.partition) for one in found}, patience_s)
        return found

    def _ask(self, places: set[tuple[str, int]], patience_s: float) -> None:
        now = self._services.clock.monotonic()
        self._places = places = places or self._places  # a member that has lost its tasks asks on
        if (
            places
            and now >= self._due
            and self._asking.attempt("asking for the ends of the input", self._asker(places))
        ):
            self._due = now + ASK_EVERY_S
            if patience_s:
                self._asking.wait(patience_s)

    def _asker(self, places: set[tuple[str, int]]) -> Callable[[], None]:
        def ask() -> None:
            with self._closing:
                if self._closed:
                    return
                if self._metadata is None:
                    self._metadata = TopicMetadata(self._services.config, self._services.clock, quiet=True)
            self._unanswered = self._unanswered or self._services.clock.elapsed()
            try:
                # in this order: what arrives in between must not look like a part of an open transaction
                ends = self._metadata.ends(places)
                stable = self._metadata.ends(places, only_settled=True)
                self._note(stable, ends)
                if not stable:  # without brokers, partitions look as if they did not exist
                    self._metadata.describe(sorted({topic for topic, _ in places}))
                self._unanswered = None
            except StatemgrError as error:  # the commits and the consumer report it too
                log.debug("the ends of the input are unknown: %s", error)

        return ask

    def _note(self, stable: Mapping[tuple[str, int], int], ends: Mapping[tuple[str, int], int]) -> None:
        self._answered = now = self._services.clock.elapsed()
        for place, offset in stable.items():
            if offset >= ends.get(place, 0):
                self._held.pop(place, None)
            elif self._held.get(place, (-1, now))[0] != offset:
                self._held[place] = offset, now
        self._ends |= stable
