"""The caretaker of one process: looks for damage in published backups, and has it repaired, on a thread of its own.

Steps, for whoever has something to look at (a task of a consumer loop, or the owner of a whole job):

1. look, and repair what is damaged
2. where that has to wait, since a commit is on its way or writes are not committed yet: look again soon
3. where it fails: try again after a pause that doubles, a limited number of times; then an error says so, and the next
   finding, commit or opening is another chance
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Protocol

from statemgr.errors import ClosedError, FencedError, StatemgrError
from statemgr.ports import Clock

log = logging.getLogger(__name__)
#: Seconds after a first failure, and at most between two tries.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
#: Tries in a row that may fail: some five minutes.
TRIES = 12
#: Seconds until a repair that has to wait is looked at again.
_SOON_S = 0.5


class Patient(Protocol):
    """Who is looked after."""

    name: str

    @property
    def closed(self) -> bool:
        """Whether there is nothing to look after any more."""

    def check_up(self) -> bool:
        """Look, and repair. Returns: whether nothing is left to do. Raises: StatemgrError; then it is tried again."""


@dataclass
class _Case:
    due_s: float | None
    failures: int = 0
    #: Woken while it was being looked at.
    again: bool = False


class Caretaker:
    """One thread, which is started when somebody has something to look at. Safe to use from many threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._cases: dict[Patient, _Case] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def wake(self, patient: Patient) -> None:
        """There is something to look at."""
        with self._changed:
            if self._closed or patient.closed:
                return
            case = self._cases.setdefault(patient, _Case(None))
            case.due_s, case.again = self._clock.monotonic(), True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="statemgr-care", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def dismiss(self, patient: Patient) -> None:
        """It is closed: nothing more is looked at. What is being looked at is not waited for."""
        with self._changed:
            self._cases.pop(patient, None)

    def close(self) -> None:
        """Look at nothing more; wait for what is being looked at."""
        with self._changed:
            self._closed = True
            self._cases.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (patient := self._next()) is not None:
            self._look_at(patient)

    def _next(self) -> Patient | None:
        """Wait until somebody is due. None: it is closed."""
        with self._changed:
            while not self._closed:
                waiting = [(case.due_s, patient) for patient, case in self._cases.items() if case.due_s is not None]
                if not waiting:
                    self._changed.wait()
                    continue
                due_s, patient = min(waiting, key=lambda item: item[0])
                left_s = due_s - self._clock.monotonic()
                if left_s <= 0:
                    self._cases[patient].again = False
                    return patient
                self._changed.wait(left_s)
        return None

    def _look_at(self, patient: Patient) -> None:
        pause_s: float | None
        try:
            pause_s = None if patient.check_up() else _SOON_S
            failed = False
        except (FencedError, ClosedError) as error:
            log.warning("%s: its backups are not looked after any more: %s", patient.name, error)
            pause_s, failed = None, False
        except Exception as error:
            pause_s, failed = self._after_failure(patient, error), True
        with self._changed:
            case = self._cases.get(patient)
            if case is None:
                return
            case.failures = case.failures + 1 if failed and pause_s is not None else 0
            if not case.again or pause_s is not None:
                case.due_s = None if pause_s is None else self._clock.monotonic() + pause_s

    def _after_failure(self, patient: Patient, error: Exception) -> float | None:
        """How long to wait before the next try; None: there is none."""
        case = self._cases.get(patient)
        failures = case.failures + 1 if case is not None else TRIES
        if failures >= TRIES:
            log.error(
                "%s: gives up after %d tries to check or repair its backups: %s. Fix what the error says; "
                "the next commit or opening tries again",
                patient.name, failures, error,
            )  # fmt: skip
            return None
        log.warning(
            "%s: its backups could not be checked or repaired, it is tried again: %s",
            patient.name, error, exc_info=not isinstance(error, StatemgrError),
        )  # fmt: skip
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures - 1)))
