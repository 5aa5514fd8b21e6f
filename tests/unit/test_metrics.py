"""metrics: what is kept of a task, and that nothing is when it has gone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from statemgr.engine.metrics import Metrics
from tests.blob_faults import ManualClock


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Name and labels (without the job) → value; no times of creation."""
    return {
        "/".join((sample.name, *(value for name, value in sample.labels.items() if name != "job"))): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created") and sample.labels.keys() - {"job", "le"}
    }


def test_nothing_of_a_closed_task_is_left() -> None:
    """B11: what belongs to a task goes with it, also what is told late; what is counted over all of them stays."""
    metrics = Metrics("orders", "orders/1", None, ManualClock())
    task, other = metrics.of("Partition 0"), metrics.of("Partition 1")
    for told in (task, other):
        told.carried(1)
        told.uploaded(2)
        with told.phase("upload"):
            pass
        told.backlog("totals", 3, 400)
        told.materialized("totals", 5)
        told.materialized("index", None)
    task.close()
    task.materialized("index", 6)
    assert values(metrics.registry) == {
        "statemgr_commit_changes/Partition 1": 1,
        "statemgr_commit_uploaded_bytes/Partition 1": 2,
        "statemgr_commit_seconds/Partition 1/upload": 0,
        "statemgr_segments/Partition 1/totals": 3,
        "statemgr_segments_bytes/Partition 1/totals": 400,
        "statemgr_materialization_seconds/Partition 1/totals": 5,
        "statemgr_materializations_total/made": 3,
        "statemgr_materializations_total/failed": 2,
    }
    metrics.of("Partition 2").close()
    metrics.close()
