"""What a garbage collection that only looked has found, as problems of the job."""

from __future__ import annotations

from collections.abc import Iterator

from statemgr.config import JobConfig
from statemgr.health.problems import Fault, Problem, store_address
from statemgr.operations.gc.gc import BlobStatus, GarbageReport
from statemgr.terminal.output import size


def of_garbage(report: GarbageReport, config: JobConfig) -> Iterator[Problem]:
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
