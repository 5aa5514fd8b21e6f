"""A stream that looks up another job's state, as in docs/spark.md, on real servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from spark_integration import StateTable
from statemgr import JobConfig, StateManager
from statemgr.errors import ConfigError
from tests.cli.test_running_job import write_toml
from tests.docs.blocks import blocks
from tests.jobs import SEGMENTS, job_mapping
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer
from tests.spark.conftest import Pipeline


def rates_job(kafka: KafkaServer, directory: Path, *, stores: tuple[str, ...] = ("rates",)) -> JobConfig:
    """Return a job of two tasks that keeps currency → rate."""
    serdes = {"stores.rates.key.serde": "string", "stores.rates.value.serde": "integer"}
    mapping = job_mapping(kafka, directory, tasks=2, stores=list(stores), kind=SEGMENTS)
    return JobConfig.from_mapping({**mapping, **serdes})


@pytest.mark.long
def test_the_documented_enrichment(
    pipeline: Callable[..., Pipeline], kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values follow the other job's commits. A row without a key, or with an unknown one, has no value.

    The other job keeps committing, and nobody fences it.
    """
    job = pipeline(tasks=1, partitions=1)
    config = rates_job(kafka, tmp_path)
    write_toml(config, tmp_path / "rates.toml")
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("docs/spark.md", "### Enriching a stream")
    names: dict[str, Any] = {"__name__": "__main__", "JobConfig": JobConfig, "spark": job.spark}
    names["orders"] = job.rows("earliest").selectExpr("cast(key as string) currency", "cast(value as string) amount")
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    seen: list[dict[str, Any]] = []

    with StateManager(config) as manager:
        tasks = [manager.open_task(f"Partition {i}") for i in range(2)]

        def commit(number: int) -> None:
            for index, (task, currency) in enumerate(zip(tasks, ("EUR", "USD"), strict=True)):
                task.store("rates").put(currency, 100 * number + index)
                task.commit({f"rates-{index}": number})

        commit(1)
        exec(program, names)
        writer = names["enriched"].writeStream.foreachBatch(
            lambda df, _: seen.append({row.currency: row.rate for row in df.collect()})
        )
        running = writer.option("checkpointLocation", job.location.as_uri()).start()
        try:

            def reads(rates: dict[str | None, int | None]) -> bool:
                for currency in rates:
                    producer.produce(job.topic, key=currency, value="1")
                assert producer.flush(30) == 0
                running.processAllAvailable()
                return seen[-1] == rates

            assert reads({"EUR": 100, "USD": 101, "GBP": None, None: None})
            for number in (2, 3):
                commit(number)
                wait_until(lambda number=number: reads({"USD": 100 * number + 1, "EUR": 100 * number}))
        finally:
            running.stop()
        commit(4)


def test_a_table_on_the_driver(kafka: KafkaServer, tmp_path: Path) -> None:
    """A table returns decoded values or an Arrow column. If the job has several stores, the error lists them."""
    config = rates_job(kafka, tmp_path, stores=("rates", "other"))
    with StateManager(config) as manager:
        for index in range(2):
            task = manager.open_task(f"Partition {index}")
            task.store("rates").put("EUR" if index else "USD", index)
            task.commit({f"rates-{index}": 1})
    table = StateTable(config, "rates", refresh_seconds=0)

    wait_until(lambda: table.get("EUR") == 1)
    assert table.get_many(iter(["USD", None, "GBP"])) == [0, None, None]
    assert table.lookup(pa.array(["EUR", None])).equals(pa.array([1, None], pa.int64()))
    assert StateTable(config, "rates", tasks=[0]).get("EUR") is None
    with pytest.raises(ConfigError, match=r"several stores.*rates"):
        StateTable(config)
    with pytest.raises(ConfigError, match="no store 'sums'"):
        StateTable(config, "sums")
