"""logs: the two formats, who sets handlers, the rate limit of client libraries, and the events of a loop."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from spark_integration.reports import BatchReport, TaskReport
from spark_integration.story import BatchLog
from statemgr import JobConfig, Task, configure_logging
from statemgr.blobs.retrying import RetryingBlobStore
from statemgr.config import RetryPolicy
from statemgr.consumer.loop_log import LoopStory
from statemgr.errors import CorruptBlob, UnavailableError
from statemgr.kafka.clients import DEADLINE_S, ClientLog
from statemgr.kafka.metadata import TopicMetadata
from statemgr.logs import Event, RateLimit, counted, flush_suppressed, ranges, size, tell
from statemgr.logs.formats import JsonFormat, TextFormat
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase
from statemgr.ports import StoreIdentity
from statemgr.telemetry.metrics import Metrics
from statemgr.telemetry.task_metrics import CommitLog
from statemgr.testing import JobTester
from tests.blob_faults import FaultyBlobStore, ManualClock

ORDERS = JobConfig.from_mapping({"job.name": "orders", "log.format": "json", "log.level": "warning"})
FAIL = "FAIL [rdkafka#producer-1] [thrd:b/bootstrap]: b:9092/bootstrap: Connect failed: Connection refused (after %dms)"


class Kept(logging.Handler):
    """A handler that keeps every record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """All records of the test. The fixture first flushes the counts of other tests."""
    caplog.set_level(logging.INFO, logger="statemgr")
    flush_suppressed(now=True)
    kept = Kept()
    logging.root.addHandler(kept)
    yield kept.records
    logging.root.removeHandler(kept)
    flush_suppressed(now=True)


def record(message: str, *args: object, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    """Return a record as a logger makes it."""
    made = logging.LogRecord("statemgr.x", level, __file__, 1, message, args, None)
    vars(made).update(fields)
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    """Return the parsed JSON line of a record."""
    line = JsonFormat("orders").format(made)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_json_line_has_the_fields_of_its_event(said: list[logging.LogRecord]) -> None:
    """The line has time, level, logger, event, message, job, task and store, and the fields of the event."""
    tell(
        logging.getLogger("statemgr.x"), Event.RESTORED, "%s: restored", "Partition 3",
        job="payments", task="Partition 3", store="totals", bytes=7, seconds=0.5, backend=None,
    )  # fmt: skip
    line = as_json(said[0])
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info", "logger": "statemgr.x", "event": "restored", "message": "Partition 3: restored",
        "job": "payments", "task": "Partition 3", "store": "totals", "bytes": 7, "seconds": 0.5,
    }  # fmt: skip


def test_where_is_found_in_the_arguments() -> None:
    """A line without fields still names the task and the store in its arguments."""
    for argument, task, store in (
        ("Partition 3", "Partition 3", None),
        ("task Partition 3", "Partition 3", None),
        ("Partition 3/totals", "Partition 3", "totals"),
        (StoreIdentity("payments", "1", "Partition 3", "totals"), "Partition 3", "totals"),
        (CorruptBlob("x", task="Partition 3", store="totals"), "Partition 3", "totals"),
        ("Partition 3 and more", None, None),
    ):
        line = as_json(record("%s: what happened", argument))
        assert (line["task"], line["store"]) == (task, store), argument
    assert as_json(record("nothing"))["job"] == "orders"
    assert as_json(record("nothing", level=logging.INFO))["event"] is None
    assert as_json(record("could not be deleted"))["event"] == "failed"


def test_every_record_is_one_line_of_json() -> None:
    """Line separators, lone surrogates, NaN, keys that are not text, and cycles fit on one line in any encoding."""
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    fields = {"offsets": {("orders", 0): 5}, "ratio": float("nan"), "cycle": cycle}

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for name, value in fields.items():
        line = JsonFormat("orders").format(record("é\n\u2028\x85 \udcff", seconds=1.5, **{name: value}))
        assert len(line.encode("ascii").splitlines()) == len(line.splitlines()) == 1
        found = json.loads(line, parse_constant=refuse)
        assert found["message"] == "é\n\u2028\x85 \udcff"
        assert found[name] == repr(value)
        assert (found["seconds"], found["task"]) == (1.5, None)


def test_a_traceback_stays_in_its_line() -> None:
    """In JSON the traceback is a member; in text it follows the line."""
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        made = record("failed: %s", error)
        made.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: two" in as_json(made)["traceback"]
    first, *rest = TextFormat().format(made).splitlines()
    assert first.endswith("WARNING statemgr.x: failed: two lines")
    assert rest[0].startswith("Traceback")


def test_handlers_are_set_only_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An application that has configured logging keeps its handlers. Otherwise statemgr's configuration applies."""
    ours = [logging.getLogger(name) for name in ("statemgr", "spark_integration")]
    levels = [one.level for one in ours]
    assert not configure_logging(ORDERS), "pytest has handlers"
    assert [one.level for one in ours] == levels
    monkeypatch.setattr(logging.root, "handlers", [])
    try:
        assert configure_logging(ORDERS)
        assert not configure_logging(ORDERS), "the second time, it is configured"
        logging.getLogger("statemgr.x").info("not this")
        logging.getLogger("statemgr.x").warning("this")
        logging.getLogger("application").warning("and this")
    finally:
        for one, level in zip(ours, levels, strict=True):
            one.setLevel(level)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("statemgr.x", "this"),
        ("application", "and this"),
    ]


def test_an_outage_writes_few_lines(said: list[logging.LogRecord]) -> None:
    """One outage wrote 1,560 lines per process. Now each kind has three lines per minute, and then a count."""
    now = [0.0]
    limit = RateLimit("librdkafka", lambda one: one.getMessage().partition(" ")[0], clock=lambda: now[0])
    log = logging.getLogger("statemgr.limited")
    log.addFilter(limit)
    for number in range(1_560):
        log.warning(FAIL if number % 2 else "ERROR all brokers are down after %d", number)
    log.debug("what was asked for with kafka.debug is not counted")
    assert len(said) == 6
    assert {one.event for one in said} == {"client"}  # type: ignore[attr-defined]
    now[0] = 60.0
    tell(log, Event.COMMITTED, "any event writes the count of the minute before it")
    assert [one.getMessage() for one in said[6:]] == [
        "1554 more lines of librdkafka suppressed in 60 s: 777 ERROR, 777 FAIL",
        "any event writes the count of the minute before it",
    ]
    assert said[6].suppressed == 1554  # type: ignore[attr-defined]
    log.warning(FAIL, 1)
    assert len(said) == 9, "the next minute begins"
    limit.flush(now=True)
    assert len(said) == 9, "nothing was held back in it"


def test_lines_of_the_kafka_client_are_limited(said: list[logging.LogRecord]) -> None:
    """All clients of a process share the limit, and a flush writes the count."""
    clients = [ClientLog(str), ClientLog(str)]
    for number in range(50):
        for client in clients:
            client.log(logging.ERROR, FAIL, number)
            client.log(logging.WARNING, "%s [%s] %s", "SESSTMOUT", "rdkafka#consumer-2", "session timed out")
    assert len(said) == 6
    flush_suppressed(now=True)
    assert "194 more lines of librdkafka" in said[-1].getMessage()


def test_a_broker_that_is_not_ready_is_no_warning(said: list[logging.LogRecord]) -> None:
    """librdkafka warns while a new broker loads its transaction coordinator. The log reports this as a wait."""
    ClientLog(str).log(logging.WARNING, "%s [%s] %s", "GETPID", "p", "Failed to acquire transactional PID: loading")
    assert (said[0].levelno, said[0].event) == (logging.INFO, "waiting")  # type: ignore[attr-defined]
    assert "not ready for transactions yet" in said[0].getMessage()


def test_lines_of_the_s3_client_are_limited(said: list[logging.LogRecord]) -> None:
    """botocore and urllib3 use their own loggers, which get the limit with the first client."""
    client = pytest.importorskip("statemgr.blobs.s3.client")
    log = logging.getLogger("urllib3.connectionpool")
    client.hide([])
    for number in range(100):
        log.warning("Connection pool is full, discarding connection: %s", number)
    assert len(said) == 3
    flush_suppressed(now=True)
    assert "97 more lines of the blob store's client" in said[-1].getMessage()


def test_commits_are_summed_up(said: list[logging.LogRecord]) -> None:
    """The first commit has a line. Then one line per 30 seconds gives the sums, and the close writes the rest."""
    clock = ManualClock()
    commits = CommitLog("orders", "Partition 0", clock, lambda: None)
    published = _Checkpoint("1700000000000-000001", 4)
    for second in range(65):
        clock.sleep(1.0)
        commits.changes, commits.uploaded = 2, 1024
        commits.took("publish", 0.25)
        commits.committed(published)
        if second == 64:
            commits.changes = 99  # this commit is never published
    commits.close()
    lines = [as_json(one) for one in said]
    assert [line["commits"] for line in lines] == [1, 30, 30, 4]
    assert [line["changes"] for line in lines] == [2, 60, 60, 8]
    assert lines[1]["phases"] == {"publish": 7.5}
    assert lines[1]["message"] == (
        "Partition 0: committed 1700000000000-000001 (30 commits in 30 s: 60 changes, 30.0 KiB uploaded; "
        "publish 7.500 s)"
    )
    commits.close()
    assert len(said) == 4


def test_batches_on_spark_are_summed_up(said: list[logging.LogRecord], caplog: pytest.LogCaptureFixture) -> None:
    """The first batch has a line, and then there is one per 30 seconds. Repeated output has a line of its own."""
    caplog.set_level(logging.INFO, logger="spark_integration")
    clock = ManualClock()
    batches = BatchLog(clock)
    for number in range(65):
        clock.sleep(1.0)
        batches.published(_batch(number))
        if number == 40:
            batches.published(replace(_batch(number), replayed=True, tasks=()))
    batches.close()
    batches.close()
    lines = [as_json(one) for one in said]
    assert [line["batches"] for line in lines] == [1, 30, 1, 30, 4]
    assert [line["replayed"] for line in lines] == [False, False, True, False, False]
    assert [line["changes"] for line in lines] == [1, 30, 0, 30, 4]
    assert lines[0]["message"] == str(_batch(0))
    assert "1 row in (0 late), 1 out; 1 key read" in lines[0]["message"]
    assert lines[3]["message"] == (
        "orders: 30 batches published in 30 s, up to batch 60 as sequence 61 (30 rows in, 30 changes, "
        "30.0 KiB uploaded; stage 7.500 s, publish 0.000 s, output 0.000 s)"
    )


def _batch(number: int) -> BatchReport:
    task = TaskReport("Partition 0", 0, 1, 0, 1, 1, 1, 1, 10, 1024, 1, 0, 0.0, 0.0, 0.0, 0.0, ())
    return BatchReport("orders", number, number + 1, False, 0, None, 0.25, 0.0, 0.0, {}, (task,))


def test_a_long_commit_says_what_it_waits_for(said: list[logging.LogRecord]) -> None:
    """The log names the cause after ten seconds, and then every thirty."""
    phase: list[Phase | None] = [Phase.UPLOAD]
    commits = CommitLog("orders", "Partition 0", ManualClock(), lambda: phase[0])
    for age in range(0, 60):
        commits.waits(age)
    phase[0] = Phase.COMMIT_TRANSACTION
    commits.waits(0)
    commits.waits(12)
    found = [one.getMessage().partition("and waits for ")[2] for one in said]
    assert found == ["the blob store (phase commit.upload)"] * 2 + ["Kafka (phase publish.commit-transaction)"]


def test_retries_of_the_blob_store_are_summed_up(said: list[logging.LogRecord]) -> None:
    """During an outage of the blob store, the log has one line every ten seconds."""
    clock = ManualClock()
    inner = FaultyBlobStore(clock)
    policy = RetryPolicy(
        max_retries=50, max_duration_ms=120_000, backoff_ms=1000, backoff_max_ms=1000, factor=1.0, jitter=0.0
    )
    store = RetryingBlobStore(inner, policy, clock, lambda: 0.0)
    inner.put("a", b"x", ttl_days=None)
    inner.faults["remove_ttl"] = [UnavailableError("503 Slow Down")] * 25
    store.remove_ttl("a")
    lines = [as_json(one) for one in said]
    assert [(line["event"], line["attempts"], line["retries"]) for line in lines] == [
        ("retrying", 1, 1), ("retrying", 11, 10), ("retrying", 21, 10),
    ]  # fmt: skip
    assert "503 Slow Down" in lines[0]["message"]


def test_the_story_of_a_loop(said: list[logging.LogRecord]) -> None:
    """The log has one line for each event, in order, from the assignment of tasks to the reason for the stop."""

    def process(task: Task, message: Any) -> None:
        task.store("totals").put(message.key(), message.value())

    config = {
        "job.name": "orders", "job.tasks": 2, "task.inputs": ["orders"], "task.backup.factories": ["blob-store"],
        "stores.totals.key.serde": "bytes",
    }  # fmt: skip
    with JobTester(config, process) as tester:
        tester.send("orders", "a", "1", partition=0)
        tester.commit()
        tester.stop()
        tester.restore(backend="blob-store")
    lines = [as_json(one) for one in said]
    of_first = [line for line in lines if line["task"] in (None, "Partition 0")]
    events = [line["event"] for line in of_first]
    story = ["assigned", "restored", "opened", "committed", "stopping", "stopped"]
    assert events[: len(story)] == story
    assert of_first[0]["message"] == "orders: assigned 2 of 2 tasks (0-1), and restores them"
    assert of_first[2]["message"].endswith("open without a checkpoint; continues at orders-0:0")
    assert of_first[3]["changes"] == 1
    assert of_first[4]["why"] == "a call of stop()"
    again = next(line for line in of_first[len(story) :] if line["event"] == "restored")
    assert again["backend"] in ("blob-store", "local")
    assert again["why"]
    assert {line["job"] for line in lines} == {"orders"}


def test_waits_for_kafka_are_told(said: list[logging.LogRecord]) -> None:
    """Two threads that wait for a broker through one client log once after two seconds, and then every ten."""
    clock = ManualClock()
    config = JobConfig.from_mapping({"job.name": "orders", "kafka.bootstrap.servers": "127.0.0.1:1"})
    with TopicMetadata(config, clock) as metadata:
        begun = clock.monotonic()
        deadlines = [begun + DEADLINE_S, begun + DEADLINE_S + 0.05]
        for _ in range(125):
            for deadline in deadlines:
                metadata._pause(deadline, UnavailableError("asking: no answer"))
    lines = [line for line in map(as_json, said) if line["event"] == "waiting"]
    assert [line["message"] for line in lines] == [
        f"waiting for Kafka, for at most {left} s more: asking: no answer" for left in (28, 18, 8)
    ]


def test_a_signal_is_why_it_stops(said: list[logging.LogRecord]) -> None:
    """The signal handler only records the signal, because it may interrupt a log line."""
    services: Any = SimpleNamespace(clock=ManualClock(), config=ORDERS)
    story = LoopStory(services, [], Metrics("orders", "orders/1", None, ManualClock()))
    story.asked_to_stop(signal.SIGTERM, None)
    assert not said
    story.stopping()
    line = as_json(said[0])
    assert (line["event"], line["why"]) == ("stopping", "SIGTERM")
    assert "stopping because of SIGTERM" in line["message"]


def test_a_member_without_tasks_says_so(said: list[logging.LogRecord]) -> None:
    """A member that waits for the group logs after ten seconds and then less and less often. It may wait for ever."""
    clock = ManualClock()
    services: Any = SimpleNamespace(clock=clock, config=ORDERS)
    tasks: list[Any] = []
    story = LoopStory(services, tasks, Metrics("orders", "orders/1", None, clock))
    for _ in range(3600):
        clock.sleep(1.0)
        story.waiting()
    seconds = [as_json(one)["seconds"] for one in said]
    assert seconds == [10, 40, 80, 160, 320, 640, 1280, 2560]
    opening = SimpleNamespace(index=3, task=None, inputs=[1], sources=["orders-3"], unreachable=lambda: None)
    tasks.append(opening)
    story.assigned([TopicPartition("orders", 3)])
    for _ in range(50):
        clock.sleep(1.0)
        story.waiting()
    assert "1 task not restored after 40 s; Partition 3 waits for a free thread" in said[-1].getMessage()
    opening.unreachable = lambda: UnavailableError("the blob store does not answer")
    for _ in range(30):
        clock.sleep(1.0)
        story.waiting()
    assert "Partition 3 waits for another try: the blob store does not answer" in said[-1].getMessage()
    opening.inputs.clear()
    for _ in range(30):
        clock.sleep(1.0)
        story.waiting()
    assert "Partition 3 waits for its partitions of the other topics" in said[-1].getMessage()


def test_an_error_of_the_application_is_told(said: list[logging.LogRecord]) -> None:
    """The log gives the error that ended the loop before it reports that the loop has stopped."""

    def process(task: Task, message: Any) -> None:
        raise ZeroDivisionError("told to")

    config = {"job.name": "orders", "job.tasks": 1, "task.inputs": ["orders"], "stores.totals.key.serde": "bytes"}
    with pytest.raises(ZeroDivisionError), JobTester(config, process) as tester:
        tester.send("orders", "a", "1")
    lines = [as_json(one) for one in said]
    assert [line["event"] for line in lines][-2:] == ["failed", "stopped"]
    assert lines[-1]["error"] == "ZeroDivisionError"
    assert lines[-1]["failures"] == {"ZeroDivisionError": 1}
    assert lines[-1]["message"].endswith(" s; failures: 1 ZeroDivisionError")
    assert "ZeroDivisionError('told to')" in lines[-2]["message"]


def test_numbers_for_people() -> None:
    """Bytes have a unit, counts have a singular, and task numbers are ranges."""
    assert [counted(number, "task") for number in (0, 1, 2)] == ["0 tasks", "1 task", "2 tasks"]
    assert counted(2, "batch", "batches") == "2 batches"
    assert [size(count) for count in (0, 1023, 1536, 5 * 1024**3)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [ranges(given) for given in ([], [3], [7, 1, 2, 0], [1, 3])] == ["none", "3", "0-2, 7", "1, 3"]


def _Checkpoint(checkpoint_id: str, sequence: int) -> Checkpoint:  # noqa: N802 - stands for the class
    """Return an object with the two attributes that the log reads."""
    made: Any = type("Published", (), {"checkpoint_id": checkpoint_id, "sequence": sequence})()
    found: Checkpoint = made
    return found
