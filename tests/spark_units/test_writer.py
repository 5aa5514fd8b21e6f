"""What ``writeStream`` makes of the calls of Spark's ``DataStreamWriter``: the output, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from spark_integration.outputs import FormatOutput
from spark_integration.query import StatefulQuery
from spark_integration.writer import StatefulWriter
from statemgr import JobConfig

CONFIG = JobConfig.from_mapping(
    {"job.name": "orders", "kafka.bootstrap.servers": "one:9092,two:9092", "blob.store.uri": "memory://blobs"}
)


class Started(StatefulQuery):
    """Starts nothing."""

    def start(self, **permissions: Any) -> Any:
        return self._output, permissions


def writer() -> StatefulWriter:
    """Return a writer of a query that starts nothing."""
    return StatefulWriter(Started(CONFIG))


def output(writer: StatefulWriter) -> Any:
    """Return the output that a start gives to the query."""
    return writer.start()[0]  # type: ignore[index]


def write(*_: object) -> None:
    """Write nothing."""


@pytest.mark.parametrize("first", ["foreachBatch", "foreach"])
def test_the_last_sink_counts(first: str) -> None:
    """A format before a function does not hide it, nor the other way round."""
    call = getattr(writer().format("delta"), first)(write)
    assert output(call) is write or output(call).function is write
    assert isinstance(output(call.format("delta")), FormatOutput)
