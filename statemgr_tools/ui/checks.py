"""Checks that a click starts, because they request every blob or write data.

They run in the background, one of each kind at a time. What one has found leaves the page once it is no longer true:
the blobs that were damaged are checked again while somebody looks, and any other finding counts for some minutes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.config import JobConfig
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import InvalidError, StatemgrError
from statemgr.health.checks import Report
from statemgr.health.problems import Fault, Problem, of_error, of_report, of_verified, store_address
from statemgr.health.verify_blobs import Verified, verify_blobs
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import BlobRef, CheckpointRecord
from statemgr.operations.doctor.command import examine
from statemgr.operations.gc.gc import BlobStatus, GarbageReport, collect_garbage
from statemgr.ports import Progress
from statemgr.services import Services
from statemgr.terminal.output import moment, size

_AT_ONCE = 16
#: Seconds until damaged blobs are checked again, and until any other finding is too old to be shown.
RENEW_S, _OLD_S = 10.0, 600.0
#: The checks that the button on a job's page starts.
DEEPER = ("blobs", "verify", "doctor")


@dataclass(frozen=True, slots=True)
class BlobBytes:
    """All blobs with the job's prefix. ``live``: bytes that the current checkpoints need."""

    report: GarbageReport
    live: int


@dataclass
class Run:
    """A running or finished check of the complete blob store. Times are epoch milliseconds."""

    started_ms: int
    progress: str = "starting"
    ended_ms: int | None = None
    result: BlobBytes | Verified | Report | None = None
    error: StatemgrError | None = None


class Checks:
    """The checks of one job. ``runs``: the last run of each one, by its name. Safe to use from many threads."""

    def __init__(self, config: JobConfig, services: Services) -> None:
        self.runs: dict[str, Run] = {}
        self._config = config
        self._services = services
        self._starting = threading.Lock()

    def problems(self) -> Iterator[Problem]:
        """Return the problems that the last run of each check found, as far as they are new enough."""
        for kind, run in list(self.runs.items()):
            age_s = 0.0 if run.ended_ms is None else (self._now_ms() - run.ended_ms) / 1000
            if isinstance(run.result, Verified) and (run.result.damaged or run.result.expiring):
                if age_s >= RENEW_S:
                    self._start(kind, Run(self._now_ms(), result=run.result), partial(self._again, kind, run.result))
            elif age_s >= _OLD_S:
                continue
            yield from self._of_run(run)

    def _of_run(self, run: Run) -> Iterator[Problem]:
        found: Iterable[Problem] = ()
        match run.result:
            case BlobBytes(report=report):
                found = _of_garbage(report, self._config)
            case Verified() as verified:
                found = of_verified(verified)
            case Report() as report:
                found = of_report(report, self._config, socket.gethostname())
        if run.error is not None:
            found = [of_error(run.error, self._config), *found]
        for one in found:
            yield replace(one, detail=f"{one.detail} (Checked at {moment(run.ended_ms or run.started_ms)}.)")

    def start(self, kind: str) -> None:
        """Start a check in the background, unless it already runs. Raises: InvalidError if there is no such check.

        ``verify`` requests every needed blob, ``read`` also reads its bytes, ``blobs`` counts bytes by kind, and
        ``doctor`` tries everything that the job needs.
        """
        work: dict[str, Callable[[Progress], BlobBytes | Verified | Report]] = {
            "verify": partial(self._verify, 0.0),
            "read": partial(self._verify, 1.0),
            "blobs": self._blobs,
            "doctor": self._doctor,
        }
        if kind not in work:
            raise InvalidError("there is no such check", hint="choose one on the page")
        self._start(kind, Run(self._now_ms()), work[kind])

    def _start(self, kind: str, run: Run, work: Callable[[Progress], BlobBytes | Verified | Report]) -> None:
        with self._starting:
            known = self.runs.get(kind)
            if known is None or known.ended_ms is not None:
                self.runs[kind] = run
                threading.Thread(target=self._run, args=(run, work), daemon=True).start()

    def _run(self, run: Run, work: Callable[[Progress], BlobBytes | Verified | Report]) -> None:
        def progress(what: str, done: int, total: int) -> None:
            run.progress = f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}"

        try:
            run.result = work(progress)
        except StatemgrError as error:
            run.error = error
        except Exception as error:  # shown on the page, because nothing waits for the thread
            run.error = StatemgrError(f"{type(error).__name__}: {error}")
        run.ended_ms = self._now_ms()

    def _doctor(self, _: Progress) -> Report:
        examine(report := Report(), self._config)
        return report

    def _verify(self, share: float, progress: Progress) -> Verified:
        services = self._services
        with closing(CheckpointTopic(self._config, services.clock)) as log:
            return verify_blobs(services, log.read, (), share, progress)

    def _again(self, kind: str, known: Verified, progress: Progress) -> Verified:
        """Check again what was damaged."""
        services, share = self._services, 1.0 if kind == "read" else 0.0
        found = [*known.damaged, *known.expiring]
        tasks, blobs = {one.task for one in found}, {one.blob_id for one in found}
        with closing(CheckpointTopic(self._config, services.clock)) as log:
            now = verify_blobs(services, log.read, sorted(tasks), share, progress, only=blobs)
        return replace(known, damaged=now.damaged, expiring=now.expiring)

    def _blobs(self, progress: Progress) -> BlobBytes:
        services = self._services
        with closing(CheckpointTopic(self._config, services.clock)) as log:
            report = collect_garbage(services, log, progress)
            records = list(log.read().values())
        catalogue = Catalogue(services.transfer)

        def needed(record: CheckpointRecord) -> dict[BlobRef, int]:
            current = record.current
            found: dict[BlobRef, int] = {}
            for store, marker in current.state_checkpoint_markers.get(BLOB_STORE, {}).items():
                found.update(catalogue.needed(services.identity(record.task, store), marker))
            return found | {one.blob: one.blob.size for one in current.attachments if one.blob is not None}

        live: dict[BlobRef, int] = {}
        with services.executors.pool("live", _AT_ONCE) as pool:
            for one in pool.map(needed, records):
                live.update(one)
        return BlobBytes(report, sum(live.values()))

    def _now_ms(self) -> int:
        return self._services.clock.time_ns() // 1_000_000


def _of_garbage(report: GarbageReport, config: JobConfig) -> Iterator[Problem]:
    """The orphans and the lost blobs of a garbage collection that only looked."""
    orphans = report.counts[BlobStatus.ORPHAN]
    if orphans.blobs:
        examples = f", for example {report.examples[0]}" if report.examples else ""
        count = "1 old blob" if orphans.blobs == 1 else f"{orphans.blobs:,} old blobs"
        detail = f"No checkpoint needs {count} ({size(orphans.size)}){examples}."
        yield Problem(Fault.BLOBS_ORPHANED, store_address(config), detail)
    for blob_id in report.missing:
        yield Problem(Fault.CORRUPT_BLOB, blob_id, "A retained checkpoint needs the blob, and it does not exist.")
    for layout in report.layouts:
        if layout.lost:
            detail = f"`statemgr rescale --undo` to {layout.tasks} tasks needs the blob, and it does not exist."
            yield Problem(Fault.CORRUPT_BLOB, layout.lost, detail)
