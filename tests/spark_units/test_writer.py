"""What ``writeStream`` makes of the calls of Spark's ``DataStreamWriter``: the output, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from spark_integration.outputs import ConsoleOutput, FileOutput, FormatOutput, KafkaOutput, TableOutput
from spark_integration.query import StatefulQuery
from spark_integration.writer import StatefulWriter
from statemgr import JobConfig
from statemgr.errors import InvalidError

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


@pytest.mark.parametrize("servers", ["two:9092, ONE:9092", "one:9092", "one:9092,two:9092,three:9092"])
def test_records_for_the_brokers_of_the_job_are_in_its_transaction(servers: str) -> None:
    """However the list of brokers is written. What only Spark's producer would follow is refused."""
    call = writer().format("kafka").option("Topic", "out").option("Kafka.Bootstrap.Servers", servers)
    assert output(call) == KafkaOutput("out")
    with pytest.raises(InvalidError, match=r"kafka\.compression\.type has no effect"):
        call.option("kafka.compression.type", "lz4").start()


@pytest.mark.parametrize("servers", ["one:9093", "two:9092,three:9092"])
def test_spark_sends_records_for_other_brokers(servers: str) -> None:
    """With all options."""
    call = writer().format("kafka").option("Kafka.Bootstrap.Servers", servers).option("kafka.compression.type", "lz4")
    assert output(call).options == {"kafka.bootstrap.servers": servers, "kafka.compression.type": "lz4"}


def test_names_of_options_have_no_case() -> None:
    """As in Spark."""
    assert output(writer().format("console").option("numrows", 5).option("TRUNCATE", False)) == ConsoleOutput(5, False)
    assert output(writer().format("parquet").option("Path", "/data")).path == "/data"


def test_start_takes_the_arguments_of_spark() -> None:
    """The same as the methods. Anything else is a permission, and is refused if there is none of its name."""
    found = writer().start("/data", "parquet", "append", ["a", "b"], "totals", allow_new_stores=True)
    assert found == (FileOutput("/data", "parquet", "orders/1", ("a", "b")), {"allow_new_stores": True})  # type: ignore[comparison-overlap]
    found = writer().partitionBy(["a", "b"]).toTable("totals", format="parquet", outputMode="update", partitionBy="a")
    assert found == (TableOutput("totals", "orders/1", "parquet", ("a",)), {})  # type: ignore[comparison-overlap]
    with pytest.raises(InvalidError, match=r"no option 'header'.*\.option"):
        StatefulWriter(StatefulQuery(CONFIG)).start("/data", format="csv", header=True)  # type: ignore[call-arg]
