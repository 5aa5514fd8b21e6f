"""tracing: spans of commits, restores and snapshots, as OpenTelemetry's SDK receives them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from statemgr import Task
from statemgr.phases import Flow, Phase, announce, current_flow, flow
from statemgr.telemetry.tracing import Tracing, trace_job
from statemgr.testing import JobTester
from tests.docs.blocks import blocks

JOB = "orders/1"
ZERO = "Partition 0"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The in-memory exporter of the provider that this process uses during the test."""
    trace = pytest.importorskip("opentelemetry.trace")
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name, version=None: provider.get_tracer(name, version))
    return exporter


@pytest.fixture
def tracing(spans: Any) -> Iterator[Tracing]:
    """The tracing of the job ``orders``."""
    made = trace_job(JOB)
    assert made is not None
    yield made
    made.close()


def tree(spans: Any) -> dict[str, list[str]]:
    """Return the name of each root span → the names of its children, in the order of their start."""
    found = sorted(spans.get_finished_spans(), key=lambda one: one.start_time)
    names = {one.context.span_id: one.name for one in found}
    children: dict[str, list[str]] = {one.name: [] for one in found if one.parent is None}
    for one in found:
        if one.parent is not None:
            children[names[one.parent.span_id]].append(one.name)
    return children


def test_phases_are_children(spans: Any, tracing: Tracing) -> None:
    """A phase has a span until the next phase of the same store or task. Instant phases become events."""
    with flow("commit", ZERO, JOB) as commit:
        for phase, subject in (
            (Phase.FLUSH, f"{ZERO}/a"),
            (Phase.FLUSH, f"{ZERO}/b"),
            (Phase.UPLOAD, f"{ZERO}/a"),
            (Phase.PREPARED, ZERO),
            (Phase.BEGIN, ZERO),
            (Phase.ACKNOWLEDGED, ZERO),
        ):
            announce(phase, subject, JOB)
        announce(Phase.FLUSH, ZERO, "other/1")
        commit.attributes |= {"checkpoint": "1-2", "bytes": 3}
    assert tree(spans) == {"statemgr.commit": ["commit.flush", "commit.flush", "commit.upload", "publish.begin"]}
    *phases, root = spans.get_finished_spans()
    assert dict(root.attributes) == {
        "statemgr.job": "orders", "statemgr.task": ZERO, "statemgr.checkpoint": "1-2", "statemgr.bytes": 3,
    }  # fmt: skip
    assert [event.name for event in root.events] == ["commit.prepared", "publish.acknowledged"]
    assert {one.attributes.get("statemgr.store") for one in phases} == {"a", "b", None}
    assert all(one.end_time is not None for one in phases)


def test_an_error_is_on_the_span(spans: Any, tracing: Tracing) -> None:
    """The span has the error and its kind. It ends, and so do the phases in progress."""
    commit = Flow("commit", ZERO, JOB)
    with suppress(ZeroDivisionError), commit.here():
        announce(Phase.UPLOAD, f"{ZERO}/a", JOB)
        raise ZeroDivisionError("told to")
    commit.end()
    child, root = spans.get_finished_spans()
    assert child.name == "commit.upload"
    assert root.status.status_code.name == "ERROR"
    assert root.status.description == "ZeroDivisionError"
    assert [event.name for event in root.events] == ["exception"]


def test_flows_at_the_same_time_stay_apart(spans: Any, tracing: Tracing) -> None:
    """A background snapshot is not part of its task's commit. Phases on other threads find the commit by its task."""
    commit = Flow("commit", ZERO, JOB)
    with flow("snapshot", f"{ZERO}/a", JOB):
        announce(Phase.UPLOAD, f"{ZERO}/a", JOB)
    assert current_flow() is None
    announce(Phase.PUT_SEGMENTS, ZERO, JOB)
    announce(Phase.PUT_SEGMENTS, "Partition 1", JOB)
    commit.end()
    announce(Phase.FLUSH, ZERO, JOB)
    assert tree(spans) == {"statemgr.commit": ["commit.put-segments"], "statemgr.snapshot": ["commit.upload"]}


def test_a_publish_of_many_tasks_has_their_number(spans: Any, tracing: Tracing) -> None:
    """A driver publishes all tasks at once, and their names would be a long attribute."""
    with flow("publish", "orders", JOB):
        announce(Phase.BEGIN, ", ".join(f"Partition {index}" for index in range(1000)), JOB)
    phase, root = spans.get_finished_spans()
    assert dict(phase.attributes) == {"statemgr.tasks": 1000}
    assert dict(root.attributes) == {"statemgr.job": "orders"}


def test_without_opentelemetry_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry is an optional extra, so tracing does nothing without it."""
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    assert trace_job(JOB) is None
    with flow("commit", ZERO, JOB):
        announce(Phase.FLUSH, ZERO, JOB)


def test_spans_of_a_loop(spans: Any) -> None:
    """The real loop has a span for each restore and commit of the task, with checkpoint and bytes."""

    def process(task: Task, message: Any) -> None:
        task.store("totals").put(message.key(), message.value())

    config = {
        "job.name": "orders",
        "task.inputs": ["orders"],
        "task.backup.factories": ["blob-store"],
        "task.commit.snapshot.interval": "1 commit",
        "stores.totals.key.serde": "bytes",
    }
    with JobTester(config, process) as tester:
        tester.send("orders", "a", "1")
        tester.commit()
        checkpoint = tester.checkpoint()
        tester.crash(lose_disk=True)
        tester.restore(backend="blob-store")
    found = [one for one in spans.get_finished_spans() if one.parent is None]
    assert [one.name for one in found] == ["statemgr.restore", "statemgr.commit", "statemgr.restore"]
    assert checkpoint is not None
    for one in found[1:]:
        assert one.attributes["statemgr.checkpoint"] == str(checkpoint.checkpoint_id)
        assert one.attributes["statemgr.task"] == ZERO
    assert found[1].attributes["statemgr.bytes"] > 0
    assert found[2].attributes["statemgr.bytes"] > 0
    children = tree(spans)
    assert {"commit.flush", "commit.upload", "publish.commit-transaction"} <= set(children["statemgr.commit"])
    assert {"restore.fetch", "restore.swap", "restore.open"} <= set(children["statemgr.restore"])


def test_the_program_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider in docs/monitoring.md sends a job's spans to the collector that the environment names."""
    trace = pytest.importorskip("opentelemetry.trace")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    (program,) = blocks("docs/monitoring.md", "## Traces")
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *of_a_request: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        # the provider would otherwise stay for the complete process
        monkeypatch.setattr(
            trace, "set_tracer_provider", lambda made: monkeypatch.setattr(trace, "get_tracer", made.get_tracer)
        )
        names: dict[str, Any] = {}
        exec(program, names)
        config = {"job.name": "orders", "task.inputs": ["orders"], "blob.store.uri": "memory://orders"}
        with JobTester({**config, "stores.totals.type": "rocksdb"}, lambda task, message: None) as tester:
            tester.send("orders", "ann", "1")
            tester.commit()
        names["provider"].shutdown()
        server.shutdown()
    assert b"statemgr.commit" in b"".join(received)
