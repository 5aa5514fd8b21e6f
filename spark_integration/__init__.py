"""statemgr for PySpark Structured Streaming: state that survives, and one atomic checkpoint per micro-batch.

Imports only statemgr's public surface. Names are loaded when they are first used, because workers need only a few.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_integration.arrow_store import ArrowStore
    from spark_integration.context import StateContext
    from spark_integration.first_snapshots import materialize
    from spark_integration.processors.api import stateful
    from spark_integration.query import StatefulQuery
    from spark_integration.reading.sources import register
    from spark_integration.reports import BatchReport, RestoreReport, StatefulQueryListener, TaskReport
    from spark_integration.rescaling import rescale
    from spark_integration.running import RunningQuery
    from spark_integration.sources import StartingOffsets
    from spark_integration.tables import StateTable
    from spark_integration.testing import SparkJobTester

__all__ = [
    "ArrowStore",
    "BatchReport",
    "RestoreReport",
    "RunningQuery",
    "SparkJobTester",
    "StartingOffsets",
    "StateContext",
    "StateTable",
    "StatefulQuery",
    "StatefulQueryListener",
    "TaskReport",
    "materialize",
    "register",
    "rescale",
    "stateful",
]

_HOME = {
    "ArrowStore": "spark_integration.arrow_store",
    "BatchReport": "spark_integration.reports",
    "RestoreReport": "spark_integration.reports",
    "RunningQuery": "spark_integration.running",
    "SparkJobTester": "spark_integration.testing",
    "StartingOffsets": "spark_integration.sources",
    "StateContext": "spark_integration.context",
    "StateTable": "spark_integration.tables",
    "StatefulQuery": "spark_integration.query",
    "StatefulQueryListener": "spark_integration.reports",
    "TaskReport": "spark_integration.reports",
    "materialize": "spark_integration.first_snapshots",
    "register": "spark_integration.reading.sources",
    "rescale": "spark_integration.rescaling",
    "stateful": "spark_integration.processors.api",
}
#: Packages that the extra `spark` installs.
_EXTRA = ("pyspark", "pyarrow", "pandas")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spark_integration' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        from statemgr.errors import PrerequisiteMissing

        raise PrerequisiteMissing(
            f"spark_integration needs {error.name}, which is not installed", hint="pip install 'statemgr[spark]'"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
