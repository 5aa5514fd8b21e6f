"""Serdes of a Schema Registry, with the client's registry in memory. tests/integration uses a real one."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig, SchemaRegistry, Task
from statemgr.errors import (
    ConfigError,
    CorruptError,
    CorruptRecord,
    InvalidError,
    PrerequisiteMissing,
    UnavailableError,
)
from statemgr.testing import JobTester
from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[2]
ORDER = '{"type": "record", "name": "Order", "fields": [{"name": "amount", "type": "long"}]}'
NEWER = (
    '{"type": "record", "name": "Order", "fields": [{"name": "amount", "type": "long"}, '
    '{"name": "note", "type": "string", "default": "-"}]}'
)
CONFIG = {
    "job.name": "totals",
    "task.inputs": ["orders"],
    "stores.totals.key.serde": "string",
    "schema.registry.url": "mock://orders",
    "schema.registry.basic.auth.user.info": "ann:a-secret-word",
}


@pytest.fixture
def registry() -> SchemaRegistry:
    """A registry in memory."""
    return SchemaRegistry({"url": "mock://orders"})


def test_values_of_older_versions_are_resolved(registry: SchemaRegistry) -> None:
    """A value starts with the ID of its writer's schema, and is resolved into the serde's own schema."""
    old = registry.avro("orders-value", ORDER, register=True)
    new = registry.avro("orders-value", NEWER, register=True)
    data = old.serialize({"amount": 3})
    assert data[:1] == b"\0"
    assert old.deserialize(data) == {"amount": 3}
    assert new.deserialize(data) == {"amount": 3, "note": "-"}
    assert old.deserialize(new.serialize({"amount": 4, "note": "x"})) == {"amount": 4}
    assert registry.avro("orders-value").deserialize(data) == {"amount": 3, "note": "-"}  # the newest version
    assert (old.label, registry.subjects()) == ("schema-registry-avro", ["orders-value"])


def test_a_schema_has_to_be_registered(registry: SchemaRegistry) -> None:
    """An unregistered schema is an error, unless the call may register it."""
    with pytest.raises(ConfigError, match="the subject does not have this schema") as error:
        registry.avro("orders-value", ORDER)
    assert error.value.where["subject"] == "orders-value"
    with pytest.raises(ConfigError, match="the registry has no such subject"):
        registry.avro("orders-value")
    registry.avro("orders-value", ORDER, register=True)
    registry.avro("orders-value", ORDER)
    with pytest.raises(ConfigError, match="schemas of the type AVRO, not JSON"):
        registry.json_schema("orders-value")


def test_json_is_checked_against_its_schema(registry: SchemaRegistry) -> None:
    """Values are checked when they are written and when they are read."""
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    serde = registry.json_schema("counts-value", schema, register=True)
    data = serde.serialize({"n": 1})
    assert serde.deserialize(data) == {"n": 1}
    with pytest.raises(InvalidError, match="does not fit the schema of its subject"):
        serde.serialize({"n": "one"})
    with pytest.raises(CorruptError, match="cannot be read"):
        serde.deserialize(data[:5] + b'{"m":1}')


@pytest.mark.parametrize("data", [b"", b"\0\0", b"plain text that is long", b"\0\0\0\0\7\6", b"\0\0\0\0\1"])
def test_bytes_of_somebody_else_are_corrupt(registry: SchemaRegistry, data: bytes) -> None:
    """Bytes that are no value, or whose schema the registry does not know, raise CorruptError."""
    serde = registry.avro("orders-value", ORDER, register=True)
    with pytest.raises(CorruptError, match=r"cannot be read with the schema of its ID|does not know the schema"):
        serde.deserialize(data)
    with pytest.raises(InvalidError, match="does not fit"):
        serde.serialize({"amount": "three"})


def test_a_registry_that_is_away_is_unavailable() -> None:
    """A registry that does not answer is unavailable, and a restart may help. A mistyped setting is a ConfigError."""
    with pytest.raises(UnavailableError, match="does not answer"):
        SchemaRegistry({"url": "http://127.0.0.1:1", "max.retries": 0}).avro("orders-value", ORDER)
    with pytest.raises(ConfigError, match=r"refuses its settings.*nix"):
        SchemaRegistry({"url": "http://127.0.0.1:1", "nix": 1})
    with pytest.raises(ConfigError, match=r"schema\.registry\.url is not set"):
        SchemaRegistry(JobConfig.from_mapping({"job.name": "totals"}))


@contextmanager
def gateway(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Run an HTTP server that is no registry, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 302, 400, 404, 407, 503])
def test_a_page_of_a_proxy_condemns_no_message(registry: SchemaRegistry, status: int) -> None:
    """The page is not the registry's answer. The message may be valid, and the registry may soon be back."""

    def page(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Type", "text/html")
        request.send_header("Content-Length", "13")
        request.end_headers()
        request.wfile.write(b"<html></html>")

    data = registry.avro("orders-value", ORDER, register=True).serialize({"amount": 3})
    with gateway(page) as url:
        behind = SchemaRegistry({"url": url, "max.retries": 0})
        made = behind._serde("orders-value", "avro", lambda value, context: b"", lambda data, context: data)
        with pytest.raises(UnavailableError):
            made.deserialize(data)
        with pytest.raises(UnavailableError):
            behind.avro("orders-value")
        with pytest.raises(UnavailableError):
            behind.avro("orders-value", ORDER, register=True)


def test_a_registry_that_never_answers_has_a_limit() -> None:
    """Requests have a time-out, because the client's own default is to wait for ever."""
    ended = threading.Event()
    with gateway(lambda _: bool(ended.wait(30)) and None) as url:
        assert SchemaRegistry({"url": url})._client._rest_client.timeout == 30
        with pytest.raises(UnavailableError):
            SchemaRegistry({"url": url, "max.retries": 0, "timeout": 0.2}).subjects()
        ended.set()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing package and the command that installs it."""
    original = builtins.__import__

    def without(name: str, *more: Any, **others: Any) -> Any:
        if name.startswith("confluent_kafka.schema_registry"):
            raise ModuleNotFoundError("No module named 'authlib'", name="authlib")
        return original(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PrerequisiteMissing, match=r"package authlib .*statemgr\[schema-registry\]"):
        SchemaRegistry({"url": "mock://x"})


def test_its_secrets_are_masked() -> None:
    """The user info holds a name and a password, so all of it is hidden."""
    config = JobConfig.from_mapping(CONFIG)
    assert "a-secret-word" not in repr(config) + str(config.masked())
    assert config.schema_registry()["basic.auth.user.info"] == "ann:a-secret-word"
    with pytest.raises(ConfigError, match=r"schema\.registry\.url must be .* without credentials"):
        JobConfig.from_mapping({**CONFIG, "schema.registry.url": "http://ann:a-secret-word@registry:8081"})


def test_the_program_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program in docs/schema-registry.md keeps its totals after a crash, and can put an invalid message aside."""
    (program,) = blocks("docs/schema-registry.md", "# Schema Registry")
    (tmp_path / "job.toml").write_text(
        """
        blob.store.uri = "s3://bucket/totals"
        schema.registry.url = "mock://page"
        stores.totals.key.serde = "string"
        [job]
        name = "totals"
        [task]
        inputs = ["orders"]
        backup.factories = ["blob-store", "kafka-changelog"]
        """
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SchemaRegistry, "__init__", _with_orders(SchemaRegistry.__init__))
    found: dict[str, Any] = {}
    exec(program, found)
    orders = found["orders"]
    put_aside: list[bytes | None] = []

    def process(task: Task, message: Any) -> None:
        try:
            found["process"](task, message)
        except CorruptRecord:
            put_aside.append(message.raw.value())

    with JobTester(found["config"], process, key_serde="string", value_serde=orders) as tester:
        tester.send("orders", "mug", orders.serialize({"amount": 3}))
        tester.send("orders", "mug", "no order")
        tester.commit()
        tester.crash()
        tester.restore("kafka-changelog")
        tester.send("orders", "mug", orders.serialize({"amount": 4}))
        tester.commit()
        written = [found["total"].deserialize(record.value or b"") for record in tester.output("totals")]
    assert written == [{"amount": 3, "orders": 1}, {"amount": 7, "orders": 2}]
    assert put_aside == [b"no order"]


def _with_orders(init: Any) -> Any:
    """Return an initialiser that also registers the producers' subject."""

    def made(self: SchemaRegistry, config: Any) -> None:
        init(self, config)
        self.avro("orders-value", ORDER, register=True)

    return made
