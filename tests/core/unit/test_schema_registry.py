"""Serdes of a Schema Registry, with the client's registry in memory. tests/core/integration uses a real one."""

from __future__ import annotations

import builtins
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Rule, RuleKind, RuleMode, RuleSet, Schema, SchemaReference
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from statemgr import JobConfig, SchemaRegistry, Task
from statemgr.config.loading import MASK
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
from tests.limited import run_limited

ROOT = Path(__file__).parents[3]
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


def test_errors_do_not_show_the_password_of_a_url() -> None:
    """The errors name the registry without the user and the password in its URL."""
    registry = SchemaRegistry({"url": "http://ann:a-secret-word@127.0.0.1:1", "max.retries": 0})
    with pytest.raises(UnavailableError) as error:
        registry.subjects()
    assert error.value.where["registry"] == f"http://{MASK}@127.0.0.1:1"
    assert "secret" not in str(error.value)


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


#: Messages that cost far more than their size, or that are not what they say. Prints the error of each.
HOSTILE = """
import json
from confluent_kafka.schema_registry import Schema
from confluent_kafka.schema_registry.common.schema_registry_client import SchemaReference
from google.protobuf import struct_pb2
from statemgr import SchemaRegistry
from statemgr.errors import CorruptError, InvalidError
registry = SchemaRegistry({"url": "mock://hostile"})

def field(kind):
    return json.dumps({"type": "record", "name": "R", "fields": [{"name": "f", "type": kind}]})

node = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
empty = registry.avro("skipped-value", json.dumps({"type": "record", "name": "R", "fields": []}), register=True)
made = {
    "nulls": registry.avro("nulls-value", field({"type": "array", "items": "null"}), register=True),
    "deep": registry.avro("deep-value", json.dumps(node), register=True),
    "rest": registry.avro("rest-value", field("long"), register=True),
    "skipped": empty,
    "json": registry.json_schema("json-value", '{"type": ["array", "number"]}', register=True),
    "not a number": registry.json_schema("nan-value", '{"type": ["array", "number"]}', register=True),
    "protobuf": registry.protobuf("protobuf-value", struct_pb2.ListValue, register=True),
}
heads = {name: made[name].serialize(value)[:5] for name, value in {
    "nulls": {"f": []}, "deep": {"next": None}, "rest": {"f": 1}, "json": [], "not a number": 1,
    "protobuf": struct_pb2.ListValue(),
}.items()}
text = registry.avro("skipped-value", field("string"), register=True)
lists = b""
for _ in range(2_000):
    def sized(tag, body):
        size, length = len(body), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([tag]) + length + bytes([size]) + body
    lists = sized(0x0A, sized(0x32, lists))
endless = json.dumps({"type": "record", "name": "R", "fields": [{"name": "f", "type": "Loop"}]})
client = registry._client
client.register_schema("loop-value", Schema(endless, "AVRO", [SchemaReference("Loop", "loop-value", 1)]))
loop = client.get_latest_version("loop-value").schema_id
values = {
    "nulls": heads["nulls"] + bytes.fromhex("808c8d9e02") + bytes([0]),
    "deep": heads["deep"] + bytes([2]) * 100_000 + bytes([0]),
    "rest": heads["rest"] + b"ab",
    "skipped": text.serialize({"f": ""})[:5] + bytes.fromhex("808080808040") + b"a",
    "json": heads["json"] + b"[" * 100_000 + b"]" * 100_000,
    "not a number": heads["not a number"] + b"NaN",
    "protobuf": made["protobuf"].serialize(struct_pb2.ListValue()) + lists,
}
limit(256)
for name, data in values.items():
    try:
        print(name, "is", made[name].deserialize(data), flush=True)
    except CorruptError as error:
        print(name, flush=True)
for name, action in (
    ("loop", lambda: empty.deserialize(bytes([0]) + loop.to_bytes(4, "big") + bytes([0]))),
    ("its own subject", lambda: registry.avro("loop-value")),
):
    try:
        action()
    except Exception as error:
        print(name, type(error).__name__, "refers to itself" in str(error), flush=True)
deep = {"next": None}
for _ in range(100_000):
    deep = {"next": deep}
try:
    made["deep"].serialize(deep)
except InvalidError as error:
    print("written", flush=True)
import os
os._exit(0)
"""


def test_hostile_messages_are_corrupt_and_take_little_memory() -> None:
    """J0.5: a message of a few bytes neither takes gigabytes nor ends the process: it would come again for ever."""
    assert run_limited(HOSTILE).splitlines() == [
        "nulls", "deep", "rest", "skipped", "json", "not a number", "protobuf",
        "loop CorruptError True", "its own subject ConfigError True", "written",
    ]  # fmt: skip


def test_a_schema_may_refer_to_others(registry: SchemaRegistry) -> None:
    """J0.5: references in references, and a union of types that are all elsewhere."""
    one = {"type": "record", "name": "x.One", "fields": [{"name": "n", "type": "long"}]}
    two = {
        "type": "record",
        "name": "x.Two",
        "fields": [{"name": "one", "type": "x.One"}, {"name": "next", "type": ["null", "x.Two"]}],
    }
    client = registry._client
    client.register_schema("one", Schema(json.dumps(one), "AVRO"))
    refers = [SchemaReference("x.One", "one", 1)]
    client.register_schema("two", Schema(json.dumps(two), "AVRO", refers))
    both = Schema(json.dumps(["x.One", "x.Two"]), "AVRO", [*refers, SchemaReference("x.Two", "two", 1)])
    client.register_schema("both-value", both)
    serde = registry.avro("both-value")
    inner = {"one": {"n": 2}, "next": None}
    for value in ({"n": 1}, {"one": {"n": 1}, "next": inner}):
        assert serde.deserialize(serde.serialize(value)) == value


def test_plain_bytes_and_rules(registry: SchemaRegistry) -> None:
    """J0.5: bytes have no length, as the client writes them. A schema with rules is refused: nothing would run them."""
    plain = registry.avro("plain-value", '{"type":"bytes"}', register=True)
    assert plain.serialize(b"abc")[5:] == b"abc"
    assert plain.deserialize(plain.serialize(b"abc")) == b"abc"
    clients = AvroSerializer(registry._client, '"bytes"', conf=registry._settings("plain-value"))
    assert plain.serialize(b"abc") == clients(b"abc", SerializationContext("plain-value", MessageField.VALUE))
    with pytest.raises(InvalidError):
        plain.serialize(5)
    rule = Rule("r", None, RuleKind.TRANSFORM, RuleMode.WRITEREAD, "ENCRYPT", None, None, None, None, None, False)
    registry._client.register_schema("rules-value", Schema(ORDER, "AVRO", rule_set=RuleSet(None, [rule])))
    with pytest.raises(ConfigError, match="its schema has rules"):
        registry.avro("rules-value")


#: Asks a registry, with little memory, and prints the error.
ASK = """
from statemgr import SchemaRegistry
from statemgr.errors import UnavailableError
registry = SchemaRegistry({"url": sys.argv[1], "timeout": float(sys.argv[2])})
limit(256)
try:
    registry.avro("orders-value")
except UnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_registry_that_sends_byte_after_byte_has_a_deadline(part: str) -> None:
    """J0.5: the time-out is for a whole call, not for each read, and it cuts the connection."""
    was_cut = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        if part == "body":
            request.send_response(200)
            request.send_header("Content-Length", "1000000")
            request.end_headers()
        else:
            request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        try:
            while not was_cut.wait(0.05):
                request.wfile.write(b"a")
        except OSError:
            was_cut.set()

    with gateway(drip) as url:
        assert "has not answered within 0.5 s" in run_limited(ASK, url, "0.5")
        assert was_cut.wait(30)


@pytest.mark.parametrize("packed", [False, True])
def test_an_answer_without_an_end_is_cut(packed: bool) -> None:
    """J0.5: it could take all memory. An answer that is packed could, too, and is refused at once."""
    ended = threading.Event()

    def endless(request: BaseHTTPRequestHandler) -> None:
        assert request.headers["Accept-Encoding"] == "identity"
        request.send_response(200)
        if packed:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        try:
            while not ended.is_set():
                request.wfile.write(b" " * 65536)
        except OSError:
            ended.set()

    with gateway(endless) as url:
        found = run_limited(ASK, url, "30")
        assert ended.wait(30)
    assert ("packs its answer" if packed else "larger than 16 MiB") in found


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


def test_a_page_of_a_proxy_in_place_of_a_reference_condemns_no_message(registry: SchemaRegistry) -> None:
    """J0.5: the schema of the message is known, and one that it refers to is not."""
    answer = json.dumps({"schema": ORDER, "references": [{"name": "x", "subject": "x", "version": 1}]}).encode()

    def respond(request: BaseHTTPRequestHandler) -> None:
        body = answer if "/schemas/ids/" in request.path else b"<html></html>"
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    with gateway(respond) as url:
        behind = SchemaRegistry({"url": url, "max.retries": 0})
        made = behind._serde("orders-value", "avro", lambda value, context: b"", lambda data, context: data)
        with pytest.raises(UnavailableError):
            made.deserialize(b"\0\0\0\0\1\6")


def test_a_registry_that_never_answers_has_a_limit() -> None:
    """Requests have a time-out, because the client's own default is to wait for ever."""
    ended = threading.Event()
    with gateway(lambda _: bool(ended.wait(30)) and None) as url:
        assert SchemaRegistry({"url": url})._client._rest_client.timeout == 30
        with pytest.raises(UnavailableError):
            SchemaRegistry({"url": url, "max.retries": 0, "timeout": 0.2}).subjects()
        ended.set()


def test_the_second_address_is_asked_if_the_first_one_hangs() -> None:
    """A request to one of several addresses has its share of the time-out, so that the others get a chance."""
    ended = threading.Event()

    def respond(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "10")
        request.end_headers()
        request.wfile.write(b'["orders"]')

    with gateway(lambda _: bool(ended.wait(30)) and None) as hanging, gateway(respond) as url:
        registry = SchemaRegistry({"url": f"{hanging},{url}", "max.retries": 0, "timeout": 4})
        assert registry.subjects() == ["orders"]
        ended.set()


def test_protobuf_types_that_import_files(registry: SchemaRegistry) -> None:
    """The imported files have subjects of their names, and are registered with the type if it is."""
    pool = descriptor_pool.DescriptorPool()
    for name, imports, kind in (("unit", [], "int32"), ("money", ["unit"], "unit"), ("order", ["money"], "money")):
        file = descriptor_pb2.FileDescriptorProto(
            name=f"{name}.proto", package="shop", syntax="proto3", dependency=[f"{one}.proto" for one in imports]
        )
        field = file.message_type.add(name=name).field.add(name="part", number=1)
        field.type = field.TYPE_INT32 if kind == "int32" else field.TYPE_MESSAGE
        if kind != "int32":
            field.type_name = f".shop.{kind}"
        pool.Add(file)
    order: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.order"))
    with pytest.raises(ConfigError, match="does not have this schema"):
        registry.protobuf("imports-value", order)
    serde = registry.protobuf("imports-value", order, register=True)
    value = order(part={"part": {"part": 3}})
    assert serde.deserialize(serde.serialize(value)) == value
    assert {"unit.proto", "money.proto"} <= set(registry.subjects())
    assert registry.protobuf("imports-value", order).serialize(value) == serde.serialize(value)


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
    """The program in docs/schema-registry.md, with the configuration there, keeps its totals after a crash, and can put
    an invalid message aside."""
    (program,) = blocks("docs/schema-registry.md", "# Schema Registry")
    (settings,) = blocks("docs/schema-registry.md", "# Schema Registry", "toml")
    of_any_job = """
        "job.name" = "totals"
        "blob.store.uri" = "s3://bucket/totals"
        "task.backup.factories" = ["blob-store", "kafka-changelog"]
    """
    (tmp_path / "job.toml").write_text(of_any_job + settings.replace("http://localhost:8081", "mock://page"))
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
        tester.send("orders", "mug", {"amount": 3})
        tester.send("orders", "mug", b"no order")
        tester.commit()
        tester.crash()
        tester.restore("kafka-changelog")
        tester.send("orders", "mug", {"amount": 4})
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
