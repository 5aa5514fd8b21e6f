"""What a session lets Python do: run a stateful query at all, and call classes of Spark's JVM. And its settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from statemgr.errors import InvalidError

_CONNECT = "pyspark.sql.connect"
#: Py4J's security manager. Some clusters use it to let Python call only a list of methods.
_SECURITY = "Py4JSecurityException"
#: The most rows that Spark puts into a record batch.
MAX_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
#: Spark's units of bytes, by their first letter.
_UNITS = {unit: 1024**power for power, unit in enumerate(("", "k", "m", "g", "t", "p"))} | {"b": 1}


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


def is_on(settings: Any, name: str) -> bool:
    """Whether a setting of a session (``spark.conf``) is true."""
    return str(settings.get(name)).lower() == "true"


@contextmanager
def changed(session: Any, name: str, value: str) -> Iterator[None]:
    """Change a setting of a session in the block, or set one that is not set."""
    before = session.conf.get(name, None)
    session.conf.set(name, value)
    try:
        yield
    finally:
        set_or_unset(session, name, before)


def set_or_unset(session: Any, name: str, value: object) -> None:
    """Change a setting of a session; None removes it."""
    if value is None:
        session.conf.unset(name)
    else:
        session.conf.set(name, str(value))


def limit(settings: Any, name: str) -> int:
    """Return a setting that limits a number or bytes (``64m``). Spark reads zero and negative numbers as no limit.

    Returns: ``sys.maxsize`` if there is no limit.
    """
    found = re.fullmatch(r"(-?\d+)\s*([bkmgtp]?)b?", str(settings.get(name)).strip().lower())
    if found is None:  # Spark refuses it where it uses it
        return sys.maxsize
    number = int(found[1]) * _UNITS[found[2]]
    return number if number > 0 else sys.maxsize
