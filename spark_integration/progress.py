"""A stateful query in Spark's own terms: ``stateOperators`` of its progress, and what ``explain`` prints.

Spark runs the query as a ``foreachBatch``, so its own progress and plan know the input alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

if TYPE_CHECKING:
    from spark_integration.driver import Plan
    from spark_integration.reports import BatchReport


def with_state(progress: StreamingQueryProgress, plan: Plan, reports: Sequence[BatchReport]) -> StreamingQueryProgress:
    """Return Spark's progress of a batch with the operator that statemgr runs. ``reports``: the recent ones."""
    document = json.loads(progress.json) | {"stateOperators": [state_operator(progress.batchId, plan, reports)]}
    return StreamingQueryProgress.fromJson(document)


def state_operator(batch_id: int, plan: Plan, reports: Sequence[BatchReport]) -> dict[str, Any]:
    """Return one of Spark's ``stateOperators`` for a batch. A batch without a report did nothing.

    Times are in milliseconds and sums over the tasks. Stores are on disk, so ``memoryUsedBytes`` is 0, and
    ``customMetrics`` has the bytes.
    """
    until = [report for report in reports if report.tasks and report.batch_id <= batch_id]
    newest = until[-1] if until else None
    own = next((report for report in reports if report.batch_id == batch_id), None)
    tasks = own.tasks if own is not None else ()
    return {
        "operatorName": plan.bound.operator,
        "numRowsTotal": newest.keys_estimated if newest else 0,
        "numRowsUpdated": own.keys_written if own else 0,
        "numRowsRemoved": 0,
        "allUpdatesTimeMs": round(1000 * sum(task.process_seconds for task in tasks)),
        "allRemovalsTimeMs": 0,
        "commitTimeMs": round(1000 * sum(task.prepare_seconds for task in tasks)),
        "memoryUsedBytes": 0,
        "numRowsDroppedByWatermark": own.late_rows if own else 0,
        "numShufflePartitions": plan.config.tasks,
        "numStateStoreInstances": plan.config.tasks * len(plan.config.stores),
        "customMetrics": {
            **plan.bound.counts,
            "keysRead": own.keys_read if own else 0,
            "stateBytes": newest.state_bytes if newest else 0,
            "commitBytes": own.commit_bytes if own else 0,
            "retries": own.retries if own else 0,
        },
    }


def explained(plan: Plan) -> str:
    """Return what the query does with the rows of its input."""
    output = getattr(plan.output, "__qualname__", type(plan.output).__name__)
    return (
        f"== Stateful Query ==\nWrite to {output}\n"
        f"+- {plan.bound.operator} {plan.bound.function}, with its state in job {plan.config.job_name}, "
        f"stores {', '.join(plan.config.stores)}\n"
        f"   +- {plan.config.tasks} tasks by {', '.join(plan.partitioning.columns)}\n"
        "      +- Input: the plan of the newest batch\n"
    )
