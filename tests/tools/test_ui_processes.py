"""What the web page learns from a process's metrics and health page."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from prometheus_client import Metric
from rich.console import Console

from statemgr.errors import InvalidError
from statemgr.health import processes as module
from statemgr.health.overview import JobOverview
from statemgr.health.problems import Fault
from statemgr.health.processes import FILL_METRICS, Fill, Processes, Sample
from statemgr.operations.top import command as top
from statemgr_tools.commands import ui
from statemgr_tools.ui import model, pages
from tests.blob_faults import ManualClock

SAMPLE = 'statemgr_failures_total{{job="{job}",kind="{kind}"}} {count}\n'


class Server(HTTPServer):
    """A process whose `answers` map a path to a status and a text."""

    answers: dict[str, tuple[int, str]]
    asked: list[str]

    @property
    def address(self) -> str:
        """The address of its metrics."""
        return f"http://127.0.0.1:{self.server_port}/metrics"


class Handler(BaseHTTPRequestHandler):
    """Answers as the test says."""

    server: Server

    def do_GET(self) -> None:
        """Send one of the answers, or 404."""
        path, _, query = self.path.partition("?")
        self.server.asked.append(query)
        status, text = self.server.answers.get(path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A healthy process."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.asked = []
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
    """Failures from before the first look are left out. A new failure is listed with its process for some minutes."""
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
    """Another job may share the process, and statemgr checks servers directly."""
    clock = ManualClock()
    processes = Processes([server.address], "orders", clock)
    for count in (1, 2):
        other = SAMPLE.format(job="other", kind="DiskFull", count=count)
        server.answers["/metrics"] = (200, other + SAMPLE.format(job="orders", kind="UnavailableError", count=count))
        assert list(processes.problems()) == []
        clock.now += 5
    assert [sample.value for sample in processes.samples()[0]] == [2.0]


def test_a_process_that_is_not_healthy_is_named_with_what_it_says(server: Server) -> None:
    """A health page with status 503 is a problem. A process without a health page is not."""
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
    """The problem has the process's address and the reason. Without addresses nothing is requested."""
    (found,) = Processes(["http://127.0.0.1:1/metrics"], "orders", ManualClock()).problems()
    assert found.fault is Fault.MEMBER_STUCK
    assert "http://127.0.0.1:1/metrics" in found.part
    assert "refused" in found.detail
    assert list(Processes([], "orders", ManualClock()).problems()) == []


def test_a_process_that_answers_slowly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the first look: `top --once` and `top --json` have no other one."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        processes = Processes([address], "orders", ManualClock())
        (found,) = processes.problems()
        assert (found.fault, found.part) == (Fault.MEMBER_STUCK, f"the process at {address}")
        assert "no answer for" in found.detail
        assert "no answer for" in processes.samples()[1][0]


def test_a_process_that_is_silent_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page asks for a few metrics, then for all. The second question would wait as long as the first."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        processes = Processes([f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"], "orders", ManualClock())
        processes.ask()
        (found,) = processes.problems()
        assert "timed out" in found.detail
        assert "timed out" in processes.samples()[1][0]
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_page_asks_each_process_once(server: Server) -> None:
    """Also if it waits for something else meanwhile: for the few metrics, for its health, and for all metrics."""
    clock = ManualClock()
    processes = Processes([server.address], "orders", clock)
    processes.ask()
    for read in (lambda: list(processes.problems()), processes.samples, processes.fills):
        read()
        clock.now += module.PATIENCE_S / 2
    assert len(server.asked) == 3


def test_numbers_that_are_read_slowly_are_shown_at_the_next_page(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading those of a driver with thousands of tasks takes longer than a page waits: it shows those before them."""
    clock = ManualClock()
    processes = Processes([server.address], "orders", clock)
    assert len(processes.samples()[0]) == 1
    read, go_on = module.text_string_to_metric_families, threading.Event()

    def slowly(text: str) -> Iterator[Metric]:
        assert go_on.wait(60)
        return read(text)

    monkeypatch.setattr(module, "text_string_to_metric_families", slowly)
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    clock.now += 60
    found, problems = processes.samples()
    (problem,) = processes.problems()
    go_on.set()
    assert (len(found), problems) == (1, [])
    assert "no answer for" in problem.detail, "while its faults are not known"


def test_a_health_page_that_fails_is_named(server: Server) -> None:
    """statemgr's own server answers 500 if it does not know."""
    server.answers["/healthz"] = (500, "not known")
    (found,) = Processes([server.address], "orders", ManualClock()).problems()
    assert found.detail == "It is not healthy: not known"


def test_faults_are_made_from_a_few_metrics(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Spark driver with thousands of tasks has megabytes of metrics. A page of them that is too large is no process
    that has ended."""
    processes = Processes([server.address], "orders", ManualClock())
    assert list(processes.problems()) == []
    assert "name[]=statemgr_failures_total" in server.asked[0]
    assert len(processes.samples()[0]) == 1
    assert server.asked[1:] == ["", ""], "health once, and everything"
    monkeypatch.setattr(module, "_MOST_BYTES", 10)
    (found,) = Processes([server.address], "orders", ManualClock()).problems()
    assert (found.fault, found.detail) == (Fault.OTHER, "Its metrics cannot be read: they have more than 10 B.")


def test_the_process_of_another_job_is_none_of_this_one(server: Server) -> None:
    """`statemgr ui` asks all addresses for each of its jobs. An address is wrong only if no other one has the job."""
    server.answers["/healthz"] = (503, "the loop has ended")
    (found,) = Processes([server.address], "payments", ManualClock()).problems()
    assert (found.fault, "those of orders, not of this job" in found.detail) == (Fault.OTHER, True)
    with Server(("127.0.0.1", 0), Handler) as other:
        other.asked, other.answers = [], {"/metrics": (200, 'statemgr_tasks{job="payments"} 4\n')}
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}).start()
        assert list(Processes([server.address, other.address], "payments", ManualClock()).problems()) == []
        other.shutdown()
    assert list(Processes([server.address], "payments", ManualClock(), {"orders"}).problems()) == []


def test_the_jobs_of_one_page_share_its_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the others are not wrong in `--metrics`."""
    given: list[object] = []

    def see(_config: object, _metrics: object, _most_bytes: object, others: object) -> None:
        given.append(others)
        raise InvalidError("seen")

    monkeypatch.setattr(model, "JobView", see)
    files = [tmp_path / f"{job}.toml" for job in ("orders", "payments")]
    for file in files:
        file.write_text(f'job.name = "{file.stem}"\n')
    result = CliRunner().invoke(ui.command, [f"--config={file}" for file in files])
    assert given == [{"orders", "payments"}], result.output


def test_a_table_says_what_it_leaves_out() -> None:
    """A table of metrics is bounded. One that shows all of them says nothing."""
    view = SimpleNamespace(metrics=("http://worker/metrics",))
    one = Sample("statemgr_state_bytes", {"task": "Partition 0"}, 1.0)
    shown = {count: str(pages._metrics("Metrics", [one] * count, 0, view)) for count in (500, 501)}  # type: ignore[arg-type]
    assert "1 more metrics are not shown" in shown[501]
    assert "not shown" not in shown[500]


def test_what_is_still_to_come_of_a_store(server: Server) -> None:
    """A store that works before all of it is here has its rate, its waiting reads and its end, on the page and in
    `top`; one that is whole is not listed."""

    def say(to_come: int, seconds: float, faults: int) -> None:
        labels = '{job="orders",task="Partition 0",store="totals"}'
        whole = '{job="orders",task="Partition 0",store="other"}'
        values = zip(FILL_METRICS, (to_come, seconds, faults), strict=True)
        lines = [f"{name}{labels} {value}\n{name}{whole} 0\n" for name, value in values]
        server.answers["/metrics"] = 200, "".join(lines)

    clock = ManualClock()
    processes = Processes([server.address], "orders", clock)
    say(100 << 20, 50.0, 30)
    assert processes.fills() == [Fill("Partition 0", "totals", 100 << 20, 2 << 20, 50.0, None)]
    clock.now += 10
    say(80 << 20, 40.0, 80)
    (fill,) = processes.fills()
    assert (fill.bytes, fill.rate, fill.seconds, fill.faults) == (80 << 20, 2 << 20, 40.0, 5.0)
    shown = str(pages._fills([fill]))
    nothing = JobOverview("orders/1", "topic", 1, False, 0, 0, {}, {}, (), 0, 0, ())
    console = Console(file=io.StringIO(), width=120)
    console.print(top._shown(top.Reading(nothing, [], [fill]), "lag"))
    assert isinstance(console.file, io.StringIO)
    for cell in ("totals", "80.0 MiB", "2.0 MiB/s", "5.0/s", "40 s"):
        assert cell in shown
        assert cell in console.file.getvalue()
    clock.now += 10
    say(0, 0.0, 80)
    assert processes.fills() == []
    assert pages._fills([]) is None
