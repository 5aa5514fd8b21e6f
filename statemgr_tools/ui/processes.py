"""The reports of a job's processes: their metrics and their health, from the addresses in ``--metrics``."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urljoin

from prometheus_client.parser import text_string_to_metric_families

from statemgr.health.problems import Fault, Problem
from statemgr.health.slow_reads import Patient
from statemgr.ports import Clock

_PATIENCE_S = 2.0
_MOST_BYTES = 8 * 1024 * 1024
_MOST_HEALTH = 300
#: Seconds for which an answer is reused, and for which a counted failure is listed.
_FRESH_S, _REMEMBERED_S = 1.0, 600.0
#: Class of an error → its fault. Errors of servers are missing, because the page checks directly whether a server is
#: gone.
_FAILURES = {
    "AccessDenied": Fault.MISSING_RIGHTS,
    "CorruptBlob": Fault.CORRUPT_BLOB,
    "CorruptRecord": Fault.CORRUPT_RECORD,
    "DiskFull": Fault.DISK_FULL,
    "MissingBlob": Fault.CORRUPT_BLOB,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One number from the metrics of a running process."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class _Said:
    """A process's answer: its numbers, why they cannot be read, and why it is not healthy."""

    address: str
    samples: Sequence[Sample] = ()
    problem: str | None = None
    unhealthy: str | None = None


class Processes:
    """The processes of one job. Safe to use from many threads."""

    def __init__(self, addresses: Sequence[str], job: str, clock: Clock) -> None:
        self._addresses = addresses
        self._job = job
        self._clock = clock
        self._said = Patient(self._ask, clock, _FRESH_S)
        self._lock = threading.Lock()
        #: Process and kind of failure → its count, and when it was last seen.
        self._failures: dict[tuple[str, str], tuple[float, float | None]] = {}

    def samples(self) -> tuple[list[Sample], list[str]]:
        """Return the numbers of the job, and why an address could not be read."""
        said = self._newest()
        found = [sample for one in said for sample in one.samples]
        return found, [f"the metrics at {one.address} cannot be read: {one.problem}" for one in said if one.problem]

    def problems(self) -> Iterator[Problem]:
        """Return processes that do not answer or are unhealthy, and failures that they counted since the last call."""
        for one in self._newest():
            part = f"the process at {one.address}"
            if one.problem:
                detail = f"Its metrics cannot be read: {one.problem}. It has ended, hangs, or is out of reach."
                yield Problem(Fault.MEMBER_STUCK, part, detail)
            if one.unhealthy:
                yield Problem(Fault.MEMBER_STUCK, part, f"It is not healthy: {one.unhealthy}")
            for kind in self._new_failures(one):
                yield Problem(_FAILURES[kind], part, f"It has just counted another {kind}. Its log says where.")

    def _newest(self) -> Sequence[_Said]:
        return (self._said.ask(len(self._addresses) * 2 * _PATIENCE_S).value or ()) if self._addresses else ()

    def _new_failures(self, said: _Said) -> Iterator[str]:
        now_s = self._clock.monotonic()
        with self._lock:
            for sample in said.samples:
                kind = sample.labels.get("kind", "")
                if sample.name != "statemgr_failures_total" or kind not in _FAILURES:
                    continue
                known, at_s = self._failures.get((said.address, kind), (sample.value, None))
                at_s = now_s if sample.value > known else at_s
                self._failures[said.address, kind] = sample.value, at_s
                if at_s is not None and now_s - at_s < _REMEMBERED_S:
                    yield kind

    def _ask(self) -> list[_Said]:
        return [self._ask_one(address) for address in self._addresses]

    def _ask_one(self, address: str) -> _Said:
        try:
            with urllib.request.urlopen(address, timeout=_PATIENCE_S) as answer:
                text = answer.read(_MOST_BYTES).decode()
            samples = [
                Sample(one.name, one.labels, one.value)
                for family in text_string_to_metric_families(text)
                for one in family.samples
                if one.labels.get("job") == self._job and not one.name.endswith("_created")
            ]
        except (OSError, ValueError, HTTPException) as error:
            return _Said(address, problem=str(error))
        return _Said(address, samples, unhealthy=self._unhealthy(address))

    def _unhealthy(self, address: str) -> str | None:
        """Return the problem that the health page reports. None if there is none, or no such page."""
        try:
            with urllib.request.urlopen(urljoin(address, "/healthz"), timeout=_PATIENCE_S):
                return None
        except urllib.error.HTTPError as error:
            with error:
                return error.read(_MOST_HEALTH).decode(errors="replace") if error.code == 503 else None
        except (OSError, HTTPException):
            return None
