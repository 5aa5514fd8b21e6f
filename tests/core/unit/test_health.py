"""health: the pages on metrics.port, and the conditions that a loop and a manager report."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from statemgr import JobConfig, Task
from statemgr.consumer.loop_health import LoopHealth
from statemgr.engine import Condition
from statemgr.engine.opening import Assignment, OpenTasks
from statemgr.errors import UnavailableError
from statemgr.telemetry.metrics import Metrics
from statemgr.telemetry.threaded_http import MOST_CONNECTIONS, QuietHandler
from statemgr.testing import JobTester
from tests.blob_faults import ManualClock
from tests.docs.blocks import blocks
from tests.kafka_jobs import wait_until


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    """The metrics of a job on a free port."""
    made = Metrics("orders", "orders/1", 0, ManualClock())
    yield made
    made.close()


def get(port: int | None, path: str, method: str = "GET") -> tuple[int, str]:
    """Return the status and body of a page."""
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def page(port: int | None, path: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON body of a page."""
    status, body = get(port, path)
    return status, json.loads(body)


def test_the_pages_say_what_is_wrong(metrics: Metrics) -> None:
    """The pages answer 503 with the reason while the process is not ready, and while it has to be restarted."""
    port = metrics.port
    assert page(port, "/healthz") == (200, {"alive": True, "why": []})
    assert page(port, "/readyz") == (
        503, {"ready": False, "open": 0, "restoring": [], "why": ["no task is open"]},
    )  # fmt: skip
    now = [Condition(restoring=("Partition 3",), open=1)]
    metrics.health.watch(lambda: now[0])
    assert page(port, "/healthz")[0] == 200
    assert page(port, "/readyz") == (503, {"ready": False, "open": 1, "restoring": ["Partition 3"], "why": []})
    now[0] = Condition(restoring=("Partition 7",), open=3)
    (documented,) = blocks("docs/monitoring.md", "## Health and readiness", "json")
    assert page(port, "/readyz") == (503, json.loads(documented))
    now[0] = Condition(open=2)
    assert page(port, "/readyz") == (200, {"ready": True, "open": 2, "restoring": [], "why": []})
    now[0] = Condition(dead=("it hangs",), open=2)
    assert page(port, "/healthz") == (503, {"alive": False, "why": ["it hangs"]})
    assert page(port, "/readyz") == (503, {"ready": False, "open": 2, "restoring": [], "why": ["it hangs"]})


def test_other_pages(metrics: Metrics) -> None:
    """Metrics are at / and /metrics. An unknown page is an error, and so is a check that fails."""
    assert "statemgr_publish_seconds" in get(metrics.port, "/metrics")[1]
    assert get(metrics.port, "/")[0] == 200
    status, body = get(metrics.port, "/metrics?name[]=statemgr_commits_skipped_total")
    assert status == 200
    assert body.count('statemgr_commits_skipped_total{job="orders"}') == 1
    assert "publish" not in body
    status, answer = page(metrics.port, "/health")
    assert status == 404
    assert "/healthz" in answer["error"]
    assert get(metrics.port, "/healthz", "POST")[0] == 405
    assert get(metrics.port, "/healthz", "HEAD") == (200, "")
    metrics.health.watch(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert get(metrics.port, "/healthz")[0] == 500


def test_port_probes_leave_no_trace(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Connections that reset, that send nothing or nonsense, and more than the limit: standard error stays empty."""
    with ExitStack() as stack:
        for number in range(MOST_CONNECTIONS + 10):
            probe = stack.enter_context(socket.create_connection(("127.0.0.1", metrics.port or 0)))
            if number % 3 == 0:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 3 == 1:
                probe.sendall(b"\x16\x03\x01 nonsense")
        assert get(metrics.port, "/healthz")[0] == 200
    monkeypatch.setattr(QuietHandler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", metrics.port or 0)) as silent:
        assert silent.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_connections_without_a_request_keep_no_probe_out(metrics: Metrics) -> None:
    """Whoever reaches the port could have the process killed: its probes would find no room again and again."""
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", metrics.port or 0)))
            for _ in range(MOST_CONNECTIONS)
        ]
        for one in silent:
            one.sendall(b"GET")
        for _ in range(3):
            assert get(metrics.port, "/healthz")[0] == 200
        assert silent[0].recv(1) == b"", "the oldest one has made room"


def test_requests_at_a_time_are_limited(metrics: Metrics) -> None:
    """Another connection is closed at once, and the page answers again as soon as there is room."""
    answers, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> Condition:
        begun.release()
        assert answers.wait(30)
        return Condition(open=1)

    metrics.health.watch(wait)
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            asking = stack.enter_context(socket.create_connection(("127.0.0.1", metrics.port or 0)))
            asking.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert begun.acquire(timeout=30)
        assert get_is_refused(metrics.port)
        answers.set()
        wait_until(lambda: not get_is_refused(metrics.port))


@pytest.mark.parametrize(("host", "is_dual"), [("127.0.0.1", True), ("::1", True), ("127.0.0.1", False)])
def test_every_address_answers(monkeypatch: pytest.MonkeyPatch, host: str, is_dual: bool) -> None:
    """A pod may have an address of IPv6 alone, and a system may have only IPv4."""
    if is_dual and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: is_dual)
    metrics = Metrics("orders", "orders/1", 0, ManualClock())
    with closing(metrics), closing(http.client.HTTPConnection(host, metrics.port or 0, timeout=10)) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200


def get_is_refused(port: int | None) -> bool:
    """Return whether the connection was closed without an answer."""
    try:
        return get(port, "/healthz")[0] != 200
    except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
        return True


def test_jobs_of_one_process_share_a_port(metrics: Metrics) -> None:
    """Each job has its own series. One job that is not ready makes the process not ready."""
    metrics.health.watch(lambda: Condition(open=1))
    other = Metrics("payments", "payments/1", metrics.port, ManualClock())
    assert other.port == metrics.port
    body = get(other.port, "/metrics")[1]
    assert body.count("# TYPE statemgr_commits_skipped_total counter") == 1
    assert 'statemgr_commits_skipped_total{job="orders"}' in body
    assert 'statemgr_commits_skipped_total{job="payments"}' in body
    assert get(other.port, "/readyz")[0] == 503
    other.close()
    assert get(metrics.port, "/readyz")[0] == 200


def test_the_last_one_closes_the_port() -> None:
    """After the last job closes, nothing listens on the port, and the same process can use it again."""
    first = Metrics("orders", "orders/1", 0, ManualClock())
    port = first.port
    first.close()
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")
    again = Metrics("orders", "orders/1", port, ManualClock())
    assert get(again.port, "/healthz")[0] == 200
    again.close()


def test_a_taken_port_is_an_error_with_a_hint() -> None:
    """The error names the key, the port and what to do."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"metrics.port {port} cannot be used") as refused:
            Metrics("orders", "orders/1", port, ManualClock())
    assert refused.value.where["key"] == "metrics.port"
    assert "free port" in str(refused.value.hint)


def loop_health(*, by_brokers: bool = False) -> tuple[LoopHealth, ManualClock, list[Any], Metrics]:
    """Return a loop's health with a max.poll.interval.ms of one minute, its clock, its tasks and its metrics."""
    clock = ManualClock()
    config = JobConfig.from_mapping(
        {"job.name": "orders", "kafka.bootstrap.servers": "b:1", "kafka.consumer.max.poll.interval.ms": 60_000}
    )
    tasks: list[Any] = []
    services: Any = SimpleNamespace(clock=clock, config=config)
    return LoopHealth(services, tasks, by_brokers=by_brokers), clock, tasks, Metrics("orders", "orders/1", None, clock)


def test_a_loop_is_ready_when_its_tasks_are_open() -> None:
    """A loop is not ready before the group assigns its tasks, while one restores, or after it has lost them."""
    health, _, tasks, metrics = loop_health()
    with health.watched(metrics.health):
        assert metrics.health.condition().unready == ("the consumer group has not assigned tasks yet",)
        health.assigned()
        assert metrics.health.condition() == Condition(), "a member without tasks is ready"
        tasks += [SimpleNamespace(index=1, task=None, opening=Future()), SimpleNamespace(index=2, task="open")]
        assert metrics.health.condition() == Condition(restoring=("Partition 1",), open=1)
        tasks[0].task = "open"
        assert metrics.health.condition() == Condition(open=2)
        health.lost()
        assert not metrics.health.condition().is_ready


def test_a_member_to_which_the_brokers_assign_nothing_is_ready() -> None:
    """The client does not say that an assignment is empty (KIP-848), so some time has to pass, with brokers."""
    health, clock, _, metrics = loop_health(by_brokers=True)
    with health.watched(metrics.health):
        for told in (lambda: None, health.lost):
            told()
            clock.sleep(30)
            assert not metrics.health.condition().is_ready
            clock.sleep(1)
            health.polled_s = clock.elapsed()
            health.silent_s = lambda: 12.0
            assert not metrics.health.condition().is_ready
            health.silent_s = float
            assert metrics.health.condition().is_ready


def test_the_metric_counts_the_tasks_of_the_page() -> None:
    """Few tasks open at a time, and those that wait for their turn are not missing: the process has them."""
    health, _, tasks, metrics = loop_health()
    count = partial(metrics.registry.get_sample_value, "statemgr_tasks", {"job": "orders"})
    assert count() == 0
    with health.watched(metrics.health):
        tasks += [SimpleNamespace(index=index, task="open" if index < 2 else None) for index in range(40)]
        assert count() == 40
        del tasks[30:]
        assert count() == 30


def test_why_a_loop_has_no_tasks() -> None:
    """A member that had tasks is not said to wait for its first ones, and brokers that do not answer are the reason."""
    health, _, _, metrics = loop_health()
    with health.watched(metrics.health):
        health.assigned()
        health.lost()
        (lost,) = metrics.health.condition().unready
        assert "has lost its tasks" in lost
        health.revoked()
        (revoked,) = metrics.health.condition().unready
        assert "is dividing its tasks again" in revoked
        health.silent_s = lambda: 12.0
        assert metrics.health.condition().unready == ("the brokers have not answered for 12 s",)
    assert metrics.health.condition().unready == ("no task is open",)


def test_a_loop_that_hangs_or_has_failed_is_dead() -> None:
    """A loop that does not poll for longer than max.poll.interval.ms is dead. After an error it stays dead."""
    health, clock, _, metrics = loop_health()
    health.polled_s = clock.elapsed()
    with ExitStack() as loop:
        loop.enter_context(health.watched(metrics.health))
        clock.sleep(60)
        assert not metrics.health.condition().dead
        clock.sleep(1)
        assert "has not polled for 61 s" in metrics.health.condition().dead[0]
        health.polled_s = clock.elapsed()
        assert not metrics.health.condition().dead
    with suppress(ZeroDivisionError), health.watched(metrics.health):
        raise ZeroDivisionError
    assert metrics.health.condition().dead == ("the consumer loop has ended with ZeroDivisionError",)


def test_a_loop_of_ones_own() -> None:
    """Without a ConsumerLoop, the tasks that the application opens decide."""
    tasks = OpenTasks(ManualClock())
    assert tasks.condition().unready == ("no task is open",)
    opening = Assignment("Partition 0")
    tasks.claim(opening)
    assert tasks.condition() == Condition(restoring=("Partition 0",))
    opening.task = SimpleNamespace(closed=False)  # type: ignore[assignment]
    assert tasks.condition() == Condition(open=1)


def test_a_running_loop_is_ready() -> None:
    """The real loop is ready while it runs with all its tasks open."""

    def process(task: Task, message: Any) -> None:
        task.store("totals").put(message.key(), message.value())

    config = {"job.name": "orders", "job.tasks": 2, "task.inputs": ["orders"], "stores.totals.key.serde": "bytes"}
    with JobTester(config, process) as tester:
        tester.send("orders", "a", "1", partition=0)
        health = tester._members[0].manager.metrics.health
        assert health.condition() == Condition(open=2)
        tester.stop()
        assert not health.condition().is_ready
