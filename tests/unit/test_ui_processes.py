"""What the web page learns from the metrics and the health page of a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from statemgr.cli.problems import Fault
from statemgr_tools.ui.processes import Processes
from tests.blob_faults import ManualClock

SAMPLE = 'statemgr_failures_total{{job="{job}",kind="{kind}"}} {count}\n'


class Server(HTTPServer):
    """A process: `answers` maps a path to a status and a text."""

    answers: dict[str, tuple[int, str]]

    @property
    def address(self) -> str:
        """Of its metrics."""
        return f"http://127.0.0.1:{self.server_port}/metrics"


class Handler(BaseHTTPRequestHandler):
    """Answers as the test says."""

    server: Server

    def do_GET(self) -> None:
        """One of the answers, or 404."""
        status, text = self.server.answers.get(self.path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A process that is well."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers = {
            "/metrics": (200, SAMPLE.format(job="orders", kind="DiskFull", count=3)),
            "/healthz": (200, ""),
        }
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_only_failures_that_are_counted_while_somebody_looks_are_listed(server: Server) -> None:
    """What happened before is in the metrics below; what is new is named with the process, for ten minutes."""
    clock = ManualClock()
    processes = Processes([server.address], "orders", clock)
    assert list(processes.problems()) == []
    server.answers["/metrics"] = (200, SAMPLE.format(job="orders", kind="DiskFull", count=4))
    clock.now += 5
    assert [(one.fault, one.part) for one in processes.problems()] == [
        (Fault.DISK_FULL, f"the process at {server.address}")
    ]
    clock.now += 300
    assert len(list(processes.problems())) == 1, "it is remembered"
    clock.now += 600
    assert list(processes.problems()) == []


def test_failures_of_other_jobs_and_of_servers_are_left_out(server: Server) -> None:
    """Another job may share the process, and whether a server is gone is asked for directly."""
    clock = ManualClock()
    processes = Processes([server.address], "orders", clock)
    for count in (1, 2):
        other = SAMPLE.format(job="other", kind="DiskFull", count=count)
        server.answers["/metrics"] = (200, other + SAMPLE.format(job="orders", kind="UnavailableError", count=count))
        assert list(processes.problems()) == []
        clock.now += 5
    assert [sample.value for sample in processes.samples()[0]] == [2.0]


def test_a_process_that_is_not_healthy_is_named_with_what_it_says(server: Server) -> None:
    """503 means that something hangs. A process without a health page is not judged."""
    clock = ManualClock()
    processes = Processes([server.address], "orders", clock)
    server.answers["/healthz"] = (503, "the loop has not polled for 61 s")
    (found,) = processes.problems()
    assert (found.fault, found.part) == (Fault.MEMBER_STUCK, f"the process at {server.address}")
    assert "the loop has not polled for 61 s" in found.detail
    del server.answers["/healthz"]
    clock.now += 5
    assert list(processes.problems()) == []


def test_a_process_that_does_not_answer_is_named() -> None:
    """By its address, with the reason; nothing is asked without addresses."""
    (found,) = Processes(["http://127.0.0.1:1/metrics"], "orders", ManualClock()).problems()
    assert found.fault is Fault.MEMBER_STUCK
    assert "http://127.0.0.1:1/metrics" in found.part
    assert "refused" in found.detail
    assert list(Processes([], "orders", ManualClock()).problems()) == []
