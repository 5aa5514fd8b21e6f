"""statemgr for PySpark Structured Streaming: state that survives, one atomic checkpoint per micro-batch.

Imports only statemgr's public surface.
"""

from __future__ import annotations

from spark_integration.context import BatchReport, RestoreReport, StateContext
from spark_integration.query import StatefulQuery
from spark_integration.running import RunningQuery
from spark_integration.sources import StartingOffsets

__all__ = ["BatchReport", "RestoreReport", "RunningQuery", "StartingOffsets", "StateContext", "StatefulQuery"]
