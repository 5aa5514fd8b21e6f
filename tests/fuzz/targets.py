"""What is fuzzed: functions of bytes from outside. Each may end with a typed error, and with nothing else.

No target writes anything, runs a command, or asks a server other than the one that the target itself starts.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import click
from confluent_kafka import KafkaError, KafkaException

from statemgr import JobConfig
from statemgr.blobs import open_raw_blob_store
from statemgr.cli.main import cli
from statemgr.errors import InvalidError, StatemgrError
from statemgr.kafka.errors import translated
from statemgr.local.machine import SystemClock
from statemgr.model import codecs
from statemgr.model.jobs.adopted_job import decode_adopted_job
from statemgr.model.jobs.layouts import decode_retired_layout
from statemgr.model.jobs.offers import decode_offer
from statemgr.model.jobs.permissions import decode_permit
from statemgr.model.segment import encode_segment, read_segment
from statemgr.operations.adopt.origins.samza_snapshot import check_options, decode_snapshot
from statemgr.operations.copy.exported import decode_export, export
from statemgr.serdes import SERDES, avro_serde
from statemgr.terminal.items import parse, render
from statemgr_tools.ui.server import Application
from tests import model_samples as sample
from tests.operations.adopt.test_origins import index_of

_JOB: dict[str, object] = {"job.name": "orders", "kafka.bootstrap.servers": "a:1"}
_PLACE = codecs.Place("topic", 0, 7)
_KEY = sample.RECORD.key(sample.CHECKPOINT)
((_TASK_KEY, _TASK_VALUE),) = codecs.encode_record(sample.RECORD)
_EXPORT = b"".join(export(JobConfig.from_mapping(_JOB), {sample.RECORD.task: sample.RECORD}, 0))
_SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Row",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "tags", "type": {"type": "array", "items": ["null", "string"]}},
            {"name": "more", "type": {"type": "map", "values": "double"}},
        ],
    }
)


@dataclass(frozen=True)
class Target:
    """A function, and right inputs to begin with. ``each_s``: as long may one input take."""

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    each_s: float = 2.0

    def __call__(self, data: bytes) -> None:
        """Try an input. Raises: whatever is no typed error."""
        with contextlib.suppress(StatemgrError):
            self.run(data)


def _record(decode: Callable[[bytes, bytes | None, codecs.Place], object], data: bytes) -> object:
    """The first byte says how long the key is."""
    size = data[0] * 2 if data else 0
    return decode(data[1 : 1 + size], data[1 + size :] or None, _PLACE)


def _serde(data: bytes) -> None:
    """Whatever a serde reads it can write, and it reads the same again."""
    names = [*SERDES, "avro"]
    name = names[data[0] % len(names)] if data else "bytes"
    which = avro_serde([_SCHEMA]) if name == "avro" else SERDES[name]
    value = which.deserialize(data[1:])
    again = which.deserialize(which.serialize(value))
    assert repr(again) == repr(value), "another value"  # NaN is not equal to itself


def _items(data: bytes) -> None:
    names = ["bytes", "hex", *SERDES]
    name = names[data[0] % len(names)] if data else "bytes"
    render(data[1:], name)
    render(parse(data[1:].decode(errors="replace"), name), name)


def _configuration(data: bytes) -> None:
    try:
        given = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        return
    config = JobConfig.from_mapping(_JOB | given)
    assert JobConfig.from_mapping(config.to_mapping()).to_mapping() == config.to_mapping()


def _command_line(data: bytes) -> None:
    """Only parse: no command runs."""
    words = data.decode(errors="replace").split("\0")[:20]
    out = io.StringIO()
    refused = contextlib.suppress(click.ClickException, click.exceptions.Exit, click.Abort)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), refused:
        context = cli.make_context("statemgr", words)
        group: Any = cli
        rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        while isinstance(group, click.Group) and rest:
            name, command, rest = group.resolve_command(context, rest)
            if command is None:
                return
            context = command.make_context(name, list(rest), parent=context)
            group, rest = command, context.args


def _page(data: bytes) -> None:
    """Each line is a part of a request: method, path, query, Host, Origin, Sec-Fetch-Site, length, and the body."""

    def refuse(kind: str = "") -> None:
        raise InvalidError(f"no such check: {kind}")

    names = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_HOST", "HTTP_ORIGIN", "HTTP_SEC_FETCH_SITE")
    lines = data.split(b"\n", 7)
    environ: dict[str, Any] = {n: line.decode("latin-1") for n, line in zip(names, lines, strict=False) if line}
    environ = {"REQUEST_METHOD": "GET", "HTTP_HOST": "localhost"} | environ
    environ["CONTENT_LENGTH"] = lines[6].decode("latin-1") if len(lines) > 6 else ""
    environ["wsgi.input"] = io.BytesIO(lines[7] if len(lines) > 7 else b"")
    if environ.get("PATH_INFO", "/").startswith("/0/") and environ["REQUEST_METHOD"] != "POST":
        return  # pages ask brokers
    seen: list[str] = []
    view: Any = SimpleNamespace(begin=list, start=refuse, look=refuse, config=JobConfig.from_mapping(_JOB))
    body = b"".join(Application([view, view])(environ, lambda status, headers: seen.append(status)))
    assert seen
    assert int(seen[0][:3]) < 500, (seen, body)


@cache
def _server() -> tuple[int, list[bytes]]:
    """A server that answers every connection with the current answer, and closes it."""
    answers = [b""]
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                asked = b""
                while b"\r\n\r\n" not in asked and (more := connection.recv(65536)):
                    asked += more
                connection.sendall(answers[0])

    threading.Thread(target=serve, daemon=True).start()
    return listening.getsockname()[1], answers


@cache
def _store() -> Any:
    port, _ = _server()
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "blob.store.uri": "s3://bucket/prefix",
            "blob.store.s3.endpoint": f"http://127.0.0.1:{port}",
            "blob.store.s3.region": "us-east-1",
            "blob.store.s3.access.key": "a",
            "blob.store.s3.secret.key": "b",
            "blob.store.s3.path.style": True,
            "blob.store.request.timeout.ms": 2000,
        }
    )
    return open_raw_blob_store(config, SystemClock())


def _s3(data: bytes) -> None:
    """An answer of an S3 server to one of some requests."""
    _, answers = _server()
    answers[0] = data[1:]
    store, buffer = _store(), memoryview(bytearray(4096))
    kind = data[0] % 5 if data else 0
    if kind == 0:
        with store.get("orders/1/blob") as reader:
            while reader.readinto(buffer):
                pass
    elif kind == 1:
        store.stat("orders/1/blob")
    elif kind == 2:
        list(store.list("orders/").blobs)
    elif kind == 3:
        store.delete("orders/1/blob")
    else:
        store.remove_ttl("orders/1/blob")


def _kafka_error(data: bytes) -> None:
    code = int.from_bytes(data[:2], "big", signed=True)
    flags = data[2] if len(data) > 2 else 0
    error = KafkaError(
        code, data[3:].replace(b"\0", b" ").decode(errors="replace"), bool(flags & 1), bool(flags & 2), bool(flags & 4)
    )
    with translated("asking", topic="topic"):
        raise KafkaException(error)


def _http(body: bytes, status: str = "200 OK") -> bytes:
    head = f'HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nETag: "x"\r\nConnection: close\r\n\r\n'
    return head.encode() + body


_LIST = (
    b"<?xml version='1.0'?><ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated>"
    b"<Contents><Key>prefix/orders/1/a</Key><LastModified>2024-01-01T00:00:00Z</LastModified><Size>3</Size></Contents>"
    b"</ListBucketResult>"
)
_ERROR = b"<Error><Code>SlowDown</Code><Message>told to</Message></Error>"

_KEYS = [codecs.encode_key(_KEY), codecs.encode_key(sample.RECORD.key_v1())]
_TOML = b'[job]\ntasks = 3\n[stores.a]\nvalue.serde = "json"\n[task]\ncommit.ms = "10 s"\n'
_REQUESTS = [b"GET\n/\n\nlocalhost:8\n\n\n\n", b"POST\n/0/run\n\nlocalhost\n\nsame-origin\n9\nkind=gc&x"]

TARGETS: dict[str, Target] = {
    "key": Target(lambda b: codecs.decode_key(b, _PLACE), _KEYS),
    "task record": Target(lambda b: codecs.decode_task(_TASK_KEY, _KEY, b, _PLACE), [_TASK_VALUE]),
    "job record": Target(lambda b: codecs.decode_job(b"", replace(_KEY, task=""), b, _PLACE), [_TASK_VALUE]),
    "record version 1": Target(
        lambda b: codecs.decode_record_v1(sample.RECORD.key_v1(), b, _PLACE), [codecs.encode_record_v1(sample.RECORD)]
    ),
    "checkpoint": Target(codecs.decode_checkpoint, [codecs.encode_checkpoint(sample.CHECKPOINT)]),
    "index": Target(codecs.decode_index, [codecs.encode_index(sample.INDEX)]),
    "chain": Target(codecs.decode_chain, [codecs.encode_chain(sample.CHAIN)]),
    "prepared": Target(codecs.decode_prepared, [codecs.encode_prepared(sample.PREPARED)]),
    "segment": Target(
        lambda b: list(read_segment(io.BytesIO(b))),
        [encode_segment([(b"k%d" % n, b"v" * n if n % 3 else None) for n in range(50)])],
    ),
    "offer": Target(partial(_record, decode_offer), [b"\x10" + bytes(60)]),
    "export": Target(lambda b: decode_export(b, "orders", "1"), [_EXPORT, _EXPORT.replace(b"records", b"recordz")]),
    "permit": Target(partial(_record, decode_permit), [b"\x10" + bytes(60)]),
    "retired layout": Target(partial(_record, decode_retired_layout), [b"\x10" + bytes(60)]),
    "adopted job": Target(partial(_record, decode_adopted_job), [b"\x10" + bytes(60)]),
    "Samza's index": Target(lambda b: decode_snapshot(b, "blob", task=0, store="counts"), [index_of()]),
    "Samza's options": Target(lambda b: check_options(b.decode(errors="replace"), "s"), [b'[CFOptions "default"]\n']),
    "serdes": Target(_serde, [bytes([n]) + s for n in range(len(SERDES) + 1) for s in (b"12345678", b'{"a": [1]}')]),
    "keys on the command line": Target(_items, [b"\x00abc", b"\x01ff", b"\x04[1, 2]"]),
    "configuration": Target(_configuration, [_TOML]),
    "command line": Target(
        _command_line, [b"checkpoints\0--config\0job.toml", b"gc\0--write\0--grace\0001 d", b"rescale\0--tasks\0003"]
    ),
    "page": Target(_page, _REQUESTS),
    "answers of S3": Target(
        _s3,
        [b"\x00" + _http(b"abc"), b"\x01" + _http(b""), b"\x02" + _http(_LIST), b"\x03" + _http(b"", "204 No Content"),
         b"\x04" + _http(b"<Tagging><TagSet></TagSet></Tagging>"), b"\x02" + _http(_ERROR, "503 Slow Down")],
        each_s=20.0,
    ),
    "errors of Kafka": Target(_kafka_error, [b"\x00\x10\x01text", b"\xff\x50\x00text"]),
}  # fmt: skip
