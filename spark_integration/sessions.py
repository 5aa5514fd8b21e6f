"""What a session lets Python do: run a stateful query at all, and call classes of Spark's JVM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from statemgr.errors import InvalidError

_CONNECT = "pyspark.sql.connect"
#: Py4J's security manager. Some clusters use it to let Python call only a list of methods.
_SECURITY = "Py4JSecurityException"


class JvmRefused(Exception):
    """The session does not let Python call this class of its JVM."""


def refuse_connect(rows: object) -> None:
    """Refuse a DataFrame of Spark Connect. Raises: InvalidError.

    Spark Connect's ``foreachBatch`` pickles the function and runs it in another process, next to the server. The owner
    of a job has Kafka's producer and threads, and has to stay in the process that called ``start``.
    """
    if any(kind.__module__.partition(_CONNECT)[1] for kind in type(rows).__mro__):
        raise InvalidError(
            "the input is a DataFrame of Spark Connect, and a stateful query has to run in Spark's driver",
            hint="run the program with spark-submit, or make the session with SparkSession.builder.master(…) and "
            "without SPARK_REMOTE; on Databricks, use a cluster with dedicated access, not with standard access",
        )


@contextmanager
def jvm_of(session: Any) -> Iterator[Any]:
    """Yield the session's JVM for calls in the block. Raises: JvmRefused, also from such a call."""
    from py4j.protocol import Py4JError

    jvm = getattr(session, "_jvm", None)
    if jvm is None:
        raise JvmRefused
    try:
        yield jvm
    except Py4JError as error:
        if _SECURITY in str(error):
            raise JvmRefused from error
        raise
