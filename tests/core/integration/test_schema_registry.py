"""Serdes of a Schema Registry, with a real one: Apicurio, through Confluent's API."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from statemgr import JobConfig, SchemaRegistry, StatemgrError, Task
from statemgr.errors import ConfigError, CorruptError, UnavailableError
from statemgr.health.checks import Report, Status, check_registry
from statemgr.terminal.find_java import find_java
from statemgr.testing import JobTester
from statemgr_tools.dev.jars import cache_directory
from statemgr_tools.dev.process import ServerProcess, free_port, spawn, wait_until_ready

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.xdist_group("registry")]

VERSION = "2.6.13.Final"  # the last one that runs with Java 17
ORDER = '{"type": "record", "name": "Order", "fields": [{"name": "amount", "type": "long"}]}'
NEWER = (
    '{"type": "record", "name": "Order", "fields": [{"name": "amount", "type": "long"}, '
    '{"name": "note", "type": "string", "default": "-"}]}'
)
INCOMPATIBLE = '{"type": "record", "name": "Order", "fields": [{"name": "amount", "type": "string"}]}'


def program() -> Path:
    """Return the registry's jar. The first call fetches it with Maven (142 MB)."""
    home = cache_directory() / f"apicurio-registry-{VERSION}"
    jar = home / f"apicurio-registry-app-{VERSION}-runner.jar"
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock"):
        if jar.is_file():
            return jar
        maven = shutil.which("mvn")
        if maven is None:
            pytest.skip("Maven, which fetches the registry, is not installed")
        with tempfile.TemporaryDirectory(dir=home.parent) as work:
            artifact = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
            plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
            command = [maven, "-q", "-B", plugin, f"-Dartifact={artifact}", f"-DoutputDirectory={work}"]
            done = subprocess.run(
                command, timeout=600, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            if done.returncode:
                pytest.skip(f"the registry could not be fetched: {done.stdout[-300:]}")
            [archive] = Path(work).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                files.extractall(Path(work) / "registry", filter="data")
            (Path(work) / "registry").rename(home)
    return jar


class Registry:
    """A registry that keeps its schemas in memory, so a restart forgets them."""

    def __init__(self, directory: Path) -> None:
        self._port = free_port()
        self._log = directory / "registry.log"
        self.url = f"http://127.0.0.1:{self._port}/apis/ccompat/v7"
        options = ["-Xmx512m", "-Dquarkus.http.host=127.0.0.1", f"-Dquarkus.http.port={self._port}"]
        command = [str(find_java().program), *options, "-jar", str(program())]
        self.process: ServerProcess = spawn(command, log=self._log, cwd=directory)
        try:
            wait_until_ready(self.process, self._answers, name="the registry", deadline_s=300)
        except BaseException:
            self.process.kill()
            raise

    def _answers(self) -> bool:
        with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{self.url}/subjects") as answer:
            return bool(answer.status == 200)
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """Start a registry for all tests."""
    registry = Registry(tmp_path_factory.mktemp("registry"))
    yield registry
    registry.process.stop()


def config(url: str) -> JobConfig:
    """Create a job that adds up orders."""
    return JobConfig.from_mapping(
        {
            "job.name": "totals",
            "task.inputs": ["orders"],
            "blob.store.uri": "s3://bucket/totals",
            "task.backup.factories": ["blob-store", "kafka-changelog"],
            "stores.last.key.serde": "string",
            "schema.registry.url": url,
        }
    )


def strict(registry: SchemaRegistry, subject: str) -> None:
    """Let a subject refuse schemas that cannot read what the older ones wrote."""
    registry._client.set_compatibility(subject, "BACKWARD")


def test_an_incompatible_schema_is_refused_before_anything_changes(server: Registry) -> None:
    """An incompatible schema is refused even if the call may register schemas. A compatible one continues the state
    from either backend."""
    job = config(server.url)
    registry = SchemaRegistry(job)
    order = registry.avro("orders-value", ORDER, register=True)
    strict(registry, "orders-value")
    for register in (False, True):
        with pytest.raises(ConfigError, match="is not compatible with those of the subject"):
            registry.avro("orders-value", INCOMPATIBLE, register=register)
    newer = registry.avro("orders-value", NEWER, register=True)
    serdes = {"value": order}

    def process(task: Task, message: Any) -> None:
        amount = {"amount": message.value()["amount"]}  # the older schema has no more fields
        task.store("last", value_serde=serdes["value"]).put(message.key(), amount)

    with JobTester(job, process, key_serde="string", value_serde=newer) as tester:
        tester.send("orders", "mug", order.serialize({"amount": 3}))
        tester.commit()
        for backend in ("blob-store", "kafka-changelog"):
            serdes["value"] = newer
            tester.crash()
            tester.restore(backend)
            store = tester._task(None).store("last", value_serde=newer)
            assert store.get("mug") == {"amount": 3, "note": "-"}


def test_json_and_protobuf(server: Registry) -> None:
    """JSON and Protobuf have their own serdes. (Apicurio cannot compare the binary form in which the client sends
    Protobuf schemas.)"""
    registry = SchemaRegistry({"url": server.url})
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": false}'
    counts = registry.json_schema("counts-value", schema, register=True)
    assert counts.deserialize(counts.serialize({"n": 1})) == {"n": 1}
    strict(registry, "counts-value")
    with pytest.raises(ConfigError, match="is not compatible"):
        registry.json_schema("counts-value", schema.replace("integer", "string"), register=True)
    kind = message_class()
    point = registry.protobuf("points-value", kind, register=True)
    found = point.deserialize(point.serialize(kind(x=3)))
    assert found.x == 3


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[Registry]:
    """Start a registry for one test."""
    registry = Registry(tmp_path)
    yield registry
    registry.process.kill()


def test_a_registry_that_dies(dying: Registry) -> None:
    """Without the registry, known schemas still work. A schema that was never met fails, and so does a new start."""
    job = config(dying.url)
    registry = SchemaRegistry({**job.schema_registry(), "max.retries": 0})
    order = registry.avro("orders-value", ORDER, register=True)
    unmet = (
        SchemaRegistry({"url": dying.url})
        .avro("orders-value", NEWER, register=True)
        .serialize({"amount": 5, "note": "x"})
    )
    met = order.serialize({"amount": 3})
    report = Report()
    check_registry(report, job)
    assert [finding.status for finding in report.findings] == [Status.OK]
    assert order.deserialize(met) == {"amount": 3}
    with pytest.raises(CorruptError, match="does not know the schema"):
        order.deserialize(b"\0" + (999_999).to_bytes(4, "big") + met[5:])
    dying.process.kill()
    assert order.deserialize(met) == {"amount": 3}
    seen: list[Any] = []
    with JobTester(job, lambda _, message: seen.append(message.value()), value_serde=order) as tester:
        tester.send("orders", "mug", order.serialize({"amount": 4}))
        with pytest.raises(UnavailableError, match="does not answer") as error:
            tester.send("orders", "mug", unmet)
    assert seen == [{"amount": 4}]
    assert (error.value.where["topic"], error.value.where["offset"]) == ("orders", 1)
    with pytest.raises(StatemgrError, match="does not answer"):
        SchemaRegistry({"url": dying.url, "max.retries": 0}).avro("orders-value")


def message_class() -> Any:
    """Return the class that ``protoc`` makes for ``message Point { int32 x = 1; }``."""
    file = descriptor_pb2.FileDescriptorProto(name="point.proto", package="points", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    field = kinds(name="x", number=1, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    file.message_type.append(descriptor_pb2.DescriptorProto(name="Point", field=[field]))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("points.Point"))
