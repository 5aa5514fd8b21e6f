"""Commits that fail halfway: the broker hangs, dies or comes back; the blob store refuses requests or is
unreachable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.engine.task import Task
from statemgr.errors import (
    AccessDenied,
    FencedError,
    OutcomeUnknownError,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.phases import Phase, observed
from statemgr_tools.dev.kafka import KafkaBroker
from tests.commits import TASK, blob_files, commit, published, referenced, totals, write
from tests.core.integration.s3_proxy import Fault, S3Proxy
from tests.jobs import DUAL, INTERVALS, SEGMENTS, SNAPSHOTS, elsewhere, job_mapping
from tests.kafka_jobs import committed, state_of, wait_until
from tests.servers import KafkaServer, S3Server

#: The broker aborts transactions that have timed out only if a test wants it to.
NEVER_ABORTS = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "600000"}


def job(broker: KafkaBroker, directory: Path, **more: object) -> JobConfig:
    """A job with both backends and short deadlines, on a broker of the test's own."""
    server = KafkaServer(bootstrap_servers=broker.bootstrap_servers, kind="local")
    settings = {"task__commit__timeout__ms": 3_000, "task__checkpoint__retained": 1, **more}
    return JobConfig.from_mapping(job_mapping(server, directory, **{**settings}))  # type: ignore[arg-type]


def at(phase: Phase, action: Callable[[], None]) -> Callable[[Phase, str], None]:
    """An observer that acts once, at the first announcement of a phase."""
    done = False

    def observe(announced: Phase, subject: str) -> None:
        nonlocal done
        if announced is phase and not done:
            done = True
            action()

    return observe


def before_commit(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Act once, when the broker has all records of the next transaction and has not been asked to commit it."""
    commit_transaction = TransactionalPublisher._commit

    def act(self: TransactionalPublisher, *args: object) -> None:
        monkeypatch.undo()
        action()
        commit_transaction(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TransactionalPublisher, "_commit", act)


@pytest.mark.long
def test_a_lost_acknowledgement_of_a_publish_is_taken_over(
    own_kafka: Callable[..., KafkaBroker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 4, protocol 3: while the outcome is unknown, nothing is deleted or published twice. Then the topic shows
    that the commit was published."""
    broker = own_kafka(**NEVER_ABORTS)
    assert broker.process is not None
    config = job(broker, tmp_path)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1", b"b": b"1"})
        task.commit({"orders-0": 1})
        first = blob_files(tmp_path, expiring=False)
        write(task, {b"a": b"2", b"b": None})
        before_commit(monkeypatch, broker.process.suspend)
        seen = [_failure(task, 2) for _ in range(3)]
        assert any(isinstance(error, OutcomeUnknownError) for error in seen), seen
        assert all(isinstance(error, OutcomeUnknownError | RetryableError) for error in seen), seen
        assert first <= blob_files(tmp_path, expiring=False), "an unknown outcome deletes nothing"
        unsure = blob_files(tmp_path, expiring=True)
        assert unsure, "what may have been published still has its TTL"
        broker.process.resume()
        write(task, {b"c": b"3"})
        checkpoint = task.commit({"orders-0": 3})
        assert checkpoint.sequence == 3, "the second commit was published, and was not published twice"
    assert blob_files(tmp_path) == blob_files(tmp_path, expiring=False) == referenced(config)
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"a": b"2", b"c": b"3"}


@pytest.mark.long
def test_a_lost_commit_that_another_owner_settles(
    own_kafka: Callable[..., KafkaBroker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 4, 15 and 23: the broker dies at the commit and another machine takes over. The state is that of the old
    or the new commit, complete."""
    broker = own_kafka()
    config = job(broker, tmp_path, task__checkpoint__retained=2)
    states = {1: {b"a": b"1", b"b": b"1"}, 2: {b"a": b"2"}}
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        write(task, states[1])
        task.commit({"orders-0": 1})
        write(task, {b"a": b"2", b"b": None})
        before_commit(monkeypatch, broker.kill)
        assert isinstance(_failure(task, 2), OutcomeUnknownError | RetryableError)
        broker.start()
        with StateManager(elsewhere(config, tmp_path / "other", "blob-store")) as other:
            owner = other.open_task(TASK)
            assert owner.last_checkpoint is not None
            offset = owner.last_checkpoint.input_offsets["orders-0"]
            assert dict(owner.store("totals").range()) == states[offset]
            assert referenced(config) <= blob_files(tmp_path), "an unknown outcome deletes nothing"
            owner.commit({"orders-0": 3})
            failures = [_failure(task, 4) for _ in range(4)]
            assert isinstance(failures[-1], FencedError), failures
    for factory in DUAL:
        assert totals(config, factory)[TASK] == states[offset]
    changelog = config.stores["totals"].changelog_topic
    assert state_of(committed(config, changelog)) == states[offset]


def _failure(task: Task, offset: int) -> StatemgrError:
    with pytest.raises(StatemgrError) as caught:
        task.commit({"orders-0": offset})
    return caught.value


@pytest.mark.long
def test_a_bounced_broker_delays_a_commit_and_loses_nothing(
    own_kafka: Callable[..., KafkaBroker], tmp_path: Path
) -> None:
    """FAULTS 15 and 6: if the broker is killed and restarted during a commit, the commit succeeds late or its changes
    are in the next one."""
    broker = own_kafka()
    config = job(broker, tmp_path, task__commit__timeout__ms=30_000)

    def bounce() -> None:
        broker.kill()
        threading.Thread(target=broker.start).start()

    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        task.commit({"orders-0": 1})
        write(task, {b"b": b"2"})
        with observed(at(Phase.BEGIN, bounce)):
            for _ in range(5):
                try:
                    task.commit({"orders-0": 2})
                    break
                except RetryableError:
                    wait_until(broker.answers)
        write(task, {b"c": b"3"})
        task.commit({"orders-0": 3})
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"a": b"1", b"b": b"2", b"c": b"3"}


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[S3Proxy]:
    """A proxy in front of the S3 server that can refuse or cut off requests."""
    with S3Proxy(s3.endpoint) as running:
        yield running


def on_s3(kafka: KafkaServer, s3: S3Server, proxy: S3Proxy, directory: Path, **more: object) -> JobConfig:
    """A job with both backends whose blobs go through the proxy, with few and short retries."""
    mapping = job_mapping(kafka, directory, s3=s3, **{**more})  # type: ignore[arg-type]
    return JobConfig.from_mapping(
        mapping
        | {
            "blob.store.s3.endpoint": proxy.endpoint,
            "blob.store.s3.path.style": True,
            "blob.store.retry.policy.max.retries": 2,
            "blob.store.retry.policy.max.retry.duration.millis": 3_000,
            "blob.store.retry.policy.backoff.delay.millis": 10,
        }
    )


#: The faults of a blob store that fails, and the error that the commit then raises.
FAILURES = {
    "unreachable": ([Fault("PUT", times=10**6, reset=True)], UnavailableError),
    "busy": ([Fault("PUT", times=10**6, answer=(503, "SlowDown"))], UnavailableError),
    "denied": ([Fault("PUT", times=10**6, answer=(403, "AccessDenied"))], AccessDenied),
}
#: The same for blobs that only commits of one kind put.
FAILURES_OF = {
    SNAPSHOTS: {
        "busy-but-lands": (
            [Fault("PUT", path, 1, (500, "InternalError"), lands=True) for path in ("/index", "")],
            None,
        ),
        "only-the-index-fails": ([Fault("PUT", "/index", 10**6, (503, "SlowDown"))], UnavailableError),
    },
    SEGMENTS: {
        "busy-but-lands": ([Fault("PUT", "/_segments/", 1, (500, "InternalError"), lands=True)], None),
        "only-the-segments-fail": ([Fault("PUT", "/_segments/", 10**6, (503, "SlowDown"))], UnavailableError),
    },
}


@pytest.mark.parametrize("kind", INTERVALS)
def test_a_failed_commit_is_in_the_next_one_in_every_backend(
    kafka: KafkaServer, s3: S3Server, proxy: S3Proxy, tmp_path: Path, kind: str
) -> None:
    """FAULTS 6, 8, 9, 10 and 26, invariant 4, A36, A38: if blobs fail, nothing is published, and the next commit has
    all changes."""
    config, failures = on_s3(kafka, s3, proxy, tmp_path, kind=kind), FAILURES | FAILURES_OF[kind]
    changelog = config.stores["totals"].changelog_topic
    model: dict[bytes, bytes] = {}
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"key": b"0"})
        model[b"key"] = b"0"
        acknowledged = task.commit({"orders-0": 0})
        for number, (name, (faults, error)) in enumerate(failures.items(), 1):
            before = committed(config, changelog)
            items = {b"key": b"%d" % number, name.encode(): b"x" * 40_000}
            write(task, items)
            model.update(items)
            proxy.faults = [replace(fault) for fault in faults]
            if error is None:
                task.commit({"orders-0": number})
                assert not any(fault.times for fault in proxy.faults), "no PUT was answered with an error"
            else:
                with pytest.raises(error) as caught:
                    task.commit({"orders-0": number})
                assert "blob" in caught.value.where
                assert task.last_checkpoint == acknowledged, "the old checkpoint stands"
                assert committed(config, changelog) == before, "nothing of it is on the changelog"
            proxy.faults = []
            acknowledged = task.commit({"orders-0": 100 + number})
    assert acknowledged.input_offsets == {"orders-0": 100 + len(failures)}
    for factory in DUAL:
        assert totals(config, factory)[TASK] == model


def test_no_blind_retry_where_rights_are_missing(
    kafka: KafkaServer, s3: S3Server, proxy: S3Proxy, tmp_path: Path
) -> None:
    """FAULT 10: a commit that is denied tries to put each blob once, and the error has a hint."""
    config = on_s3(kafka, s3, proxy, tmp_path, backup=("blob-store",))
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        task.commit({"orders-0": 1})
        write(task, {b"b": b"2"})
        proxy.requests.clear()
        proxy.faults = [Fault("PUT", times=10**6, answer=(403, "AccessDenied"))]
        with pytest.raises(AccessDenied) as caught:
            task.commit({"orders-0": 2})
        puts = [path for method, path in proxy.requests if method == "PUT"]
        assert len(puts) == len(set(puts)) > 0
        assert caught.value.hint
        proxy.faults = []


def test_the_steps_of_an_asynchronous_commit_that_may_fail(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A36, A37, A38: if the upload or publish fails, the commit fails and the next commit raises its error. A failed
    clean-up does not fail the commit."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__checkpoint__retained=1))

    def fail() -> None:
        raise UnavailableError("told to")

    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"0": b"0"})
        task.commit({"orders-0": 0})
        steps = (Phase.UPLOAD, Phase.PUT_INDEX, Phase.BEGIN, Phase.SEND_CHECKPOINT, Phase.COMMIT_TRANSACTION)
        for number, phase in enumerate(steps, 1):
            write(task, {b"%d" % number: b"x", b"0": b"%d" % number})
            with observed(at(phase, fail)):
                future = task.commit_async({"orders-0": number})
                assert isinstance(future.exception(30), RetryableError)
            with pytest.raises(RetryableError, match="told to"):
                task.commit_async({"orders-0": number})
            assert task.last_checkpoint is not None
            assert task.last_checkpoint.input_offsets == {"orders-0": (number - 1) * 10}
            # after one commit has raised the error, the next one continues
            task.commit({"orders-0": number * 10})
        delete = FileBlobStore.delete_many
        for number, suffix in enumerate(("", "/index")):  # first every delete fails, then only the index's

            def refuse(self: FileBlobStore, blob_ids: Sequence[str], suffix: str = suffix) -> object:
                refused = {name: AccessDenied("told to", blob=name) for name in blob_ids if name.endswith(suffix)}
                return {**refused, **delete(self, [name for name in blob_ids if name not in refused])}

            monkeypatch.setattr(FileBlobStore, "delete_many", refuse)
            write(task, {b"0": b"clean-up %d" % number})
            checkpoint = task.commit({"orders-0": 1000 + number})
            assert checkpoint.input_offsets == {"orders-0": 1000 + number}
            assert referenced(config) < blob_files(tmp_path, expiring=False), "nothing was left behind"
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"0": b"clean-up 1", **{b"%d" % n: b"x" for n in range(1, 6)}}
    monkeypatch.setattr(FileBlobStore, "delete_many", delete)
    commit(config, {}, 2000)
    assert blob_files(tmp_path, expiring=False) == referenced(config), "what a clean-up left behind is deleted later"
    assert len(blob_files(tmp_path, expiring=True)) == 3, "what failed commits left behind expires"


def test_an_asynchronous_commit_carries_exactly_what_was_there(kafka: KafkaServer, tmp_path: Path) -> None:
    """A37: writes continue during a commit. Both backends publish later writes with the next commit."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    started = threading.Event()
    go_on = threading.Event()

    def wait(announced: Phase, subject: str) -> None:
        if announced is Phase.UPLOAD:
            started.set()
            assert go_on.wait(30)

    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1", b"b": b"1"})
        with observed(wait):
            future = task.commit_async({"orders-0": 1})
            assert started.wait(30)
            assert not future.done()
            write(task, {b"a": b"2", b"b": None, b"c": b"2"})
            go_on.set()
            future.result(30)
        for factory in DUAL:
            assert published(config, factory) == {TASK: {"totals": {b"a": b"1", b"b": b"1"}}}
        task.commit({"orders-0": 2})
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"a": b"2", b"c": b"2"}
