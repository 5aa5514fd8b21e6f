"""The reports of a job's processes: their metrics and their health, from the addresses in ``--metrics``. Reads only."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from urllib.parse import quote, urljoin

from prometheus_client.parser import text_string_to_metric_families

from statemgr.health.diagnosis import PATIENCE_S
from statemgr.health.problems import Fault, Problem
from statemgr.health.slow_reads import Answer, Patient
from statemgr.ids import task_index
from statemgr.logs import size
from statemgr.ports import Clock

#: What a process says of a store of which something is to come: bytes, seconds, and a count of reads.
FILL_METRICS = ("statemgr_restore_bytes_to_come", "statemgr_restore_seconds_to_come", "statemgr_restore_faults_total")
#: What faults and fills are made from. Everything would be megabytes for a Spark driver with thousands of tasks.
_FEW = (*FILL_METRICS, "statemgr_failures_total", "statemgr_tasks")
_PATIENCE_S = 2.0
#: Seconds for everything that a process reports: nobody waits that long, but the next page has it.
_EVERYTHING_S = 10.0
_MOST_BYTES = 8 * 1024 * 1024
_MOST_HEALTH = 300
#: Seconds for which an answer is reused: longer than a page waits, so that one answer serves all of it; and for which a
#: counted failure is listed.
_FRESH_S, _REMEMBERED_S = PATIENCE_S + 1.0, 600.0
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
    """A process's answer: its numbers, or why they cannot be read; why it is not healthy, and the jobs that it names.

    ``answered``: false if the process has ended, hangs, or is out of reach.
    """

    address: str
    samples: Sequence[Sample] = ()
    problem: str | None = None
    unhealthy: str | None = None
    jobs: frozenset[str] = frozenset()
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Fill:
    """What is still to come of a store that is open already.

    Attributes:
        bytes: still in the blob store.
        rate: bytes per second so far. 0 if none has arrived.
        seconds: until these bytes are here, at that rate. None without a rate.
        faults: reads per second that had to fetch what they read, between the last two answers of the process. None
            before the second answer.
    """

    task: str
    store: str
    bytes: int
    rate: float
    seconds: float | None
    faults: float | None

    def cells(self) -> tuple[str, ...]:
        """The row of a table with :data:`FILL_HEADERS`."""
        return (
            self.task,
            self.store,
            size(self.bytes),
            f"{size(int(self.rate))}/s" if self.rate else "",
            "?" if self.faults is None else f"{self.faults:.1f}/s",
            "?" if self.seconds is None else f"{self.seconds:,.0f} s",
        )


#: Headers of a table of fills.
FILL_HEADERS = ("task", "store", "to come", "rate", "waiting reads", "time to whole")


class Processes:
    """The processes of one job. Safe to use from many threads.

    Args:
        others: other jobs whose processes are also at these addresses.
    """

    def __init__(self, addresses: Sequence[str], job: str, clock: Clock, others: Collection[str] = ()) -> None:
        self._job = job
        self._others = frozenset(others)
        self._clock = clock
        self._said = [(one, Patient(partial(self._ask, one, _FEW), clock, _FRESH_S)) for one in addresses]
        self._everything = [
            (one, Patient(partial(self._ask_everything, one, said), clock, _FRESH_S)) for one, said in self._said
        ]
        self._lock = threading.Lock()
        #: Process and kind of failure → its count, and when it was last seen.
        self._failures: dict[tuple[str, str], tuple[float, float | None]] = {}
        #: Process, task and store → the count of reads that had to fetch something, when it was asked, and how many per
        #: second.
        self._faults: dict[tuple[str, str, str], tuple[float, float, float | None]] = {}

    def ask(self) -> None:
        """Begin to ask all of them, and do not wait."""
        for _, patient in (*self._said, *self._everything):
            patient.ask(0)

    def samples(self) -> tuple[list[Sample], list[str]]:
        """Return the numbers of the job, and why an address could not be read. While new ones take long, those before
        them."""
        said = self._newest(self._everything)
        found = [sample for one in said for sample in one.samples]
        return found, [f"the metrics at {one.address} cannot be read: {one.problem}" for one in said if one.problem]

    def fills(self) -> list[Fill]:
        """The stores of which something is still to come, by task and store."""
        found = [fill for one in self._newest(self._said) for fill in self._fills(one)]
        return sorted(found, key=lambda fill: (task_index(fill.task), fill.store))

    def _fills(self, said: _Said) -> Iterator[Fill]:
        stores: dict[tuple[str, str], dict[str, float]] = {}
        for sample in said.samples:
            if sample.name in FILL_METRICS:
                at = sample.labels.get("task", ""), sample.labels.get("store", "")
                stores.setdefault(at, {})[sample.name] = sample.value
        for (task, store), values in stores.items():
            to_come, seconds, faults = (values.get(name, 0.0) for name in FILL_METRICS)
            per_second = self._faults_per_second((said.address, task, store), faults)
            if to_come:
                rate = to_come / seconds if seconds else 0.0
                yield Fill(task, store, int(to_come), rate, seconds or None, per_second)

    def _faults_per_second(self, at: tuple[str, str, str], count: float) -> float | None:
        with self._lock:
            now_s = self._clock.monotonic()
            before, asked_s, rate = self._faults.get(at, (count, now_s, None))
            if now_s - asked_s >= _FRESH_S:
                rate = max(count - before, 0.0) / (now_s - asked_s)
            elif at in self._faults:
                return rate
            self._faults[at] = count, now_s, rate
            return rate

    def problems(self) -> Iterator[Problem]:
        """Return processes that do not answer or are unhealthy, and failures that they counted since the last call."""
        said = self._newest(self._said, or_before=False)
        for one in said:
            part = f"the process at {one.address}"
            if one.problem:
                gone = "" if one.answered else " It has ended, hangs, or is out of reach."
                detail = f"Its metrics cannot be read: {one.problem}.{gone}"
                yield Problem(Fault.MEMBER_STUCK if gone else Fault.OTHER, part, detail)
            is_strange = bool(one.jobs) and one.jobs.isdisjoint(self._others)
            if is_strange and all(other.answered and self._job not in other.jobs for other in said):
                jobs = ", ".join(sorted(one.jobs))
                yield Problem(
                    Fault.OTHER, part, f"Its metrics are those of {jobs}, not of this job: correct --metrics."
                )
            if one.unhealthy:
                yield Problem(Fault.MEMBER_STUCK, part, f"It is not healthy: {one.unhealthy}")
            for kind in self._new_failures(one):
                yield Problem(_FAILURES[kind], part, f"It has just counted another {kind}. Its log says where.")

    def _newest(self, asked: Sequence[tuple[str, Patient[_Said]]], *, or_before: bool = True) -> Sequence[_Said]:
        for _, patient in asked:
            patient.ask(0)  # they run at the same time
        return [_answered(address, patient.ask(PATIENCE_S), or_before=or_before) for address, patient in asked]

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

    def _ask_everything(self, address: str, few: Patient[_Said]) -> _Said:
        # after the few: a large driver would answer neither in time, and a silent one is not waited for twice
        said = _answered(address, few.ask(_EVERYTHING_S), or_before=False)
        return self._ask(address, ()) if said.answered else said

    def _ask(self, address: str, names: Sequence[str]) -> _Said:
        only = "&".join(f"name[]={quote(name)}" for name in names)
        asked = f"{address}{'&' if '?' in address else '?'}{only}" if only else address
        try:
            with urllib.request.urlopen(asked, timeout=_PATIENCE_S if names else _EVERYTHING_S) as answer:
                body = answer.read(_MOST_BYTES + 1)
        except (OSError, HTTPException) as error:
            return _Said(address, problem=str(error), answered=False)
        try:
            if len(body) > _MOST_BYTES:
                raise ValueError(f"they have more than {size(_MOST_BYTES)}")
            found = [one for family in text_string_to_metric_families(body.decode()) for one in family.samples]
        except ValueError as error:
            return _Said(address, problem=str(error), unhealthy=self._unhealthy(address) if names else None)
        jobs = frozenset(one.labels["job"] for one in found if "job" in one.labels)
        samples = [
            Sample(one.name, one.labels, one.value)
            for one in found
            if one.labels.get("job") == self._job and not one.name.endswith("_created")
        ]
        if not names or (jobs and self._job not in jobs):  # the page of that job says how its process is
            return _Said(address, samples, jobs=jobs)
        return _Said(address, samples, unhealthy=self._unhealthy(address), jobs=jobs)

    def _unhealthy(self, address: str) -> str | None:
        """Return the problem that the health page reports, or that it is silent. None if there is none, or no such
        page."""
        try:
            with urllib.request.urlopen(urljoin(address, "/healthz"), timeout=_PATIENCE_S):
                return None
        except urllib.error.HTTPError as error:
            with error:
                return error.read(_MOST_HEALTH).decode(errors="replace") if error.code in (500, 503) else None
        except (OSError, HTTPException) as error:
            return f"/healthz does not answer: {error}"


def _answered(address: str, answer: Answer[_Said], *, or_before: bool) -> _Said:
    """What a process has said, or that it says nothing. ``or_before``: while it says nothing, what it said before."""
    if answer.value is not None and (or_before or answer.waiting_s is None):
        return answer.value
    problem = str(answer.error) if answer.waiting_s is None else f"no answer for {answer.waiting_s:.0f} s"
    return _Said(address, problem=problem, answered=False)
