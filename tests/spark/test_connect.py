"""Sessions with fewer abilities: Spark Connect, and clusters where Python may not call classes of the JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StructType

from spark_integration import StatefulQuery, location, outputs, stateful_input
from spark_integration.sessions import JvmRefused, jvm_of
from statemgr import StateManager
from statemgr.errors import InvalidError
from tests.jobs import with_changes
from tests.servers import KafkaServer
from tests.spark.conftest import PARTITIONER, ROOT, Pipeline, count, make_pipeline
from tests.spark.test_tables import rates_job

MakePipeline = Callable[..., Pipeline]


@pytest.mark.long
def test_connect_is_refused_before_anything_is_taken_over(kafka: KafkaServer, tmp_path: Path) -> None:
    """A stateful query rejects a Spark Connect client before it contacts the client's server or fences an owner."""
    pytest.importorskip("grpc")
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    remote = RemoteSession("sc://127.0.0.1:1")
    rows = remote.readStream.format("rate").load()
    job = make_pipeline(None, kafka, tmp_path, tasks=1)
    schema = StructType.fromJson({"type": "struct", "fields": []}).add("key", "string")
    query = StatefulQuery(job.config).key_by("value").process(count, schema).output(job.outputs.write)
    query = query.option("checkpointLocation", job.location.as_uri())

    with StateManager(job.config, PARTITIONER) as owner:
        owner.acquire()
        for source in (rows, lambda offsets: rows):
            with pytest.raises(InvalidError, match="Spark Connect") as refused:
                query.input(source).start()
            assert "spark-submit" in str(refused.value.hint)
        owner.confirm()  # the query has not fenced the owner
    remote.client.close()


@pytest.mark.long
def test_state_is_read_through_connect(kafka: KafkaServer, tmp_path: Path) -> None:
    """On a real Spark Connect server, the data sources and a StateTable work, and a stateful query is rejected."""
    pytest.importorskip("grpc")
    config = rates_job(kafka, tmp_path)
    with StateManager(config) as manager:
        for index, currency in enumerate(("EUR", "USD")):
            task = manager.open_task(f"Partition {index}")
            task.store("rates").put(currency, index)
            task.commit({f"rates-{index}": 1})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(with_changes(config, state__dir=str(tmp_path / "other")).to_mapping()))
    path_of_modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path_of_modules, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.spark.connect_job", str(path)],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[:3000]
    found = json.loads(run.stdout.splitlines()[-1])

    assert found["state"] == [["EUR", 0], ["USD", 1]]
    assert found["looked_up"] == [["EUR", 0], ["GBP", None]]
    assert "Spark Connect" in found["refused"]


@contextmanager
def refused(session: object) -> Iterator[Any]:
    """Replace ``jvm_of`` as on a cluster whose security manager refuses every call."""
    raise JvmRefused
    yield


@pytest.fixture
def without_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off the modules of spark_integration from the JVM."""
    for module in (location, outputs, stateful_input):
        monkeypatch.setattr(module, "jvm_of", refused)


@pytest.mark.long
@pytest.mark.usefixtures("without_jvm")
def test_a_query_without_the_jvm(pipeline: MakePipeline) -> None:
    """Without the JVM, state and output still equal the input. Spark jobs read the checkpoint location."""
    job = pipeline(tasks=2)
    job.produce(90)

    job.run(job.query(per_batch=60).option("checkpointLocation", str(job.location)))

    assert job.state("blob-store") == job.outputs.counts() == job.produced


@pytest.mark.long
@pytest.mark.usefixtures("without_jvm")
def test_what_needs_the_jvm_is_refused(pipeline: MakePipeline, tmp_path: Path) -> None:
    """A file sink is rejected at the start, and a stateful operator at the first batch, which publishes nothing."""
    job = pipeline(tasks=2, backup=["blob-store"])
    job.produce(20)
    writer = job.query().writeStream.format("parquet").option("checkpointLocation", job.location.as_uri())
    with pytest.raises(InvalidError, match="file sink") as caught:
        writer.start(str(tmp_path / "files"))
    assert "foreachBatch" in str(caught.value.hint)
    assert not (tmp_path / "files").exists()

    with pytest.raises(InvalidError, match="in its checkpoint location"):
        job.run(job.query().input(lambda offsets: job.rows(offsets).dropDuplicates(["key"])))
    assert job.contents() == {"Partition 0": {}, "Partition 1": {}}


def test_which_errors_mean_that_the_jvm_is_refused() -> None:
    """Only errors of Py4J's security manager mean that the JVM is refused."""
    from py4j.protocol import Py4JError

    class Session:
        _jvm = object()

    for text, kind in (
        ("Trace: py4j.security.Py4JSecurityException: Constructor public org.apache.hadoop.fs.Path(…) is not "
         "whitelisted.", JvmRefused),
        ("An error occurred while calling o1.x. Trace: py4j.Py4JException: Method x does not exist", Py4JError),
    ):  # fmt: skip
        with pytest.raises(kind), jvm_of(Session()):
            raise Py4JError(text)
    with pytest.raises(JvmRefused), jvm_of(object()):
        pass
