"""Stores with a TTL in a consumer loop: expired entries are hidden, deleted everywhere, and never come back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Message

from statemgr import Task
from statemgr.errors import ConfigError, CorruptError, RetryableError
from statemgr.model.expiry import expiry_bytes
from statemgr.model.plan import check_ttl
from statemgr.ports import StoreIdentity
from statemgr.serdes import Serde
from statemgr.stores import expiry
from statemgr.testing import JobTester
from tests.model_samples import CHECKPOINT
from tests.open_stores import CommittedStore

MINUTE_MS = 60_000
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": ["kafka-changelog", "blob-store"],
    "stores.seen.key.serde": "string",
    "stores.seen.value.serde": "json",
    "stores.seen.ttl.ms": MINUTE_MS,
    "stores.plain.key.serde": "string",
    "stores.plain.value.serde": "json",
}
BACKENDS = ("kafka-changelog", "blob-store")


def remember(task: Task, message: Message) -> None:
    """Store a message's value under its key in both stores."""
    key, value = (message.key() or b"").decode(), (message.value() or b"").decode()
    task.store("seen").put(key, value)
    task.store("plain").put(key, value)


@pytest.fixture
def tester() -> Iterator[JobTester]:
    """One task with a store whose entries live for a minute."""
    with JobTester(CONFIG, remember) as tester:
        yield tester


def seen(tester: JobTester) -> dict[str, str]:
    """Return the content of the store with a TTL."""
    return dict(tester.store("seen").range())


def test_an_entry_lives_as_long_as_its_ttl(tester: JobTester) -> None:
    """An entry expires a TTL after its last write, for every kind of read. A read does not extend its life."""
    tester.send("orders", "a", "1")
    tester.advance(seconds=40)
    tester.send("orders", "b", "2")
    tester.send("orders", "b", "3")
    tester.advance(seconds=19.9)
    assert seen(tester) == {"a": "1", "b": "3"}
    tester.advance(seconds=0.1)
    store = tester.store("seen")
    assert (store.get("a"), store.get("b")) == (None, "3")
    assert store.get_many(["b", "a", "c"]) == ["3", None, None]
    with store.prefix(b"") as items:
        assert list(items) == [("b", "3")]
    tester.advance(seconds=60)
    assert seen(tester) == {}
    assert dict(tester.store("plain").range()) == {"a": "1", "b": "3"}


def test_a_write_and_a_delete_after_the_expiry(tester: JobTester) -> None:
    """An expired key can be written again, and lives for another TTL."""
    tester.send("orders", "a", "1")
    tester.advance(seconds=59)
    tester.send("orders", "a", "2")
    tester.advance(seconds=59)
    assert seen(tester) == {"a": "2"}
    tester.advance(seconds=61)
    tester.send("orders", "a", "3")
    assert seen(tester) == {"a": "3"}
    tester.store("seen").delete("a")
    assert seen(tester) == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_restore_brings_nothing_back(tester: JobTester, backend: str) -> None:
    """Deletes of expired entries reach both backends, and other entries keep their expiry time."""
    tester.send("orders", "old", "1")
    tester.advance(seconds=30)
    tester.send("orders", "new", "2")
    tester.commit()
    tester.advance(seconds=31)
    tester.commit()
    assert stored(tester) == 1
    tester.crash(lose_disk=True)
    tester.restore(backend)
    assert stored(tester) == 1
    assert seen(tester) == {"new": "2"}
    tester.advance(seconds=29)
    assert seen(tester) == {}


def stored(tester: JobTester) -> int:
    """Return the number of stored entries, including expired ones."""
    opened = tester._task(None)._stores["seen"]
    with closing(opened.content.scan(None, None)) as items:
        return sum(1 for _ in items)


def test_expired_entries_are_deleted_while_the_input_is_idle(tester: JobTester) -> None:
    """The task deletes expired entries by itself and commits this, so that the state does not stay large."""
    for number in range(20):
        tester.send("orders", str(number), "x")
    tester.commit()
    before = tester.checkpoint()
    tester.advance(seconds=70)
    assert stored(tester) == 0
    tester.commit()
    after = tester.checkpoint()
    assert before is not None
    assert after is not None
    assert after.stores["seen"] != before.stores["seen"]


def test_a_walk_looks_at_some_keys_at_a_time(tester: JobTester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large store is searched in steps, and each step continues where the last one stopped."""
    monkeypatch.setattr(expiry, "STEP_KEYS", 7)
    for number in range(30):
        tester.send("orders", f"{number:02}", "x")
    tester.advance(seconds=61)
    counts = [stored(tester)]
    while counts[-1] and len(counts) < 20:
        tester.advance(seconds=1)
        counts.append(stored(tester))
    assert counts[-1] == 0
    assert all(0 <= before - after <= 7 for before, after in pairwise(counts))
    assert tester.store("seen").get("29") is None


@pytest.mark.parametrize("seed", range(2))
def test_random_writes_agree_with_a_model(tester: JobTester, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any writes, pauses, commits and crashes, reads show exactly what was written within the TTL."""
    monkeypatch.setattr(expiry, "STEP_KEYS", 3)
    draw, model = random.Random(seed), dict[str, tuple[str, float]]()
    for step in range(40):
        match draw.choice(["send", "send", "send", "advance", "commit", "crash"]):
            case "send":
                key = draw.choice("abcdefgh")
                tester.send("orders", key, str(step))
                model[key] = (str(step), tester.now_ms + MINUTE_MS)
            case "advance":
                tester.advance(seconds=draw.choice([1, 13, 45]))
            case "commit":
                tester.commit()
            case "crash":
                tester.commit()
                tester.crash(lose_disk=draw.random() < 0.5)
                tester.restore(draw.choice(BACKENDS))
        assert seen(tester) == {key: value for key, (value, until) in model.items() if until > tester.now_ms}


@pytest.mark.parametrize(("label", "now"), [("json with TTL", False), ("json", True)])
def test_a_store_neither_gets_nor_loses_a_ttl(label: str, now: bool) -> None:
    """A store cannot gain or lose a TTL, because its values would be misread. Other stores are not affected."""
    checkpoint = replace(CHECKPOINT, serdes={"seen": ("string", label), "plain": ("string", "json")})
    check_ttl(checkpoint, {"seen": not now, "plain": False, "new": True}, job="orders", task="Partition 0")
    with pytest.raises(ConfigError, match=r"stores\.seen\.ttl\.ms"):
        check_ttl(checkpoint, {"seen": now, "plain": False}, job="orders", task="Partition 0")


def test_the_name_of_a_serde_that_says_that_values_expire() -> None:
    """A checkpoint says so with this ending, and a store without a TTL could not be opened again. A key serde and a
    store with a TTL may have such a name."""
    named = Serde(str.encode, bytes.decode, "text with TTL")

    def put(task: Task, message: Message) -> None:
        task.store("plain", named).put("k", b"v")
        task.store("seen", named, named).put("k", "v")
        with pytest.raises(ConfigError, match=r"store=plain.*another name"):
            task.store("plain", named, named)

    own = {key: value for key, value in CONFIG.items() if not key.endswith(".serde")} | {"stores.plain": {}}
    with JobTester(own, put) as tester:
        tester.send("orders", "a", "1")
        tester.stop()
        tester.restore()
        tester.send("orders", "a", "1")


def test_a_value_without_an_expiry_is_corrupt(tmp_path: Path) -> None:
    """A value without an expiry time raises an error that names the store, and stays in the store."""
    job = CommittedStore(tmp_path, track=True, settings={"ttl.ms": MINUTE_MS})
    try:
        job.opened.content.put(b"k", b"short")
        for read in (lambda: job.store.get(b"k"), lambda: list(job.store.range()), lambda: job.store.get_many([b"k"])):
            with pytest.raises(CorruptError, match=r"5 bytes.*store=totals"):
                read()
        assert isinstance(job.opened.entries, expiry.ExpiringEntries)
        with pytest.raises(CorruptError, match="store=totals"):
            job.opened.entries.delete_expired()
        assert job.opened.content.get(b"k") == b"short"
    finally:
        job.close()


class Interrupted(Iterator[tuple[bytes, bytes]]):
    """A store that is scanned once. The second step fails, and succeeds when it is repeated."""

    def __init__(self) -> None:
        self._steps: list[bytes | Exception] = [b"a", RetryableError("not now"), b"b"]

    def scan(self, start: bytes | None, end: bytes | None) -> Interrupted:
        return self

    def __next__(self) -> tuple[bytes, bytes]:
        if not self._steps:
            raise StopIteration
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step, expiry_bytes(MINUTE_MS) + b"1"

    def close(self) -> None:
        pass


def test_a_scan_goes_on_after_a_step_that_failed() -> None:
    """A step that failed can be repeated, and no entry is left out."""
    view = expiry.LiveView(StoreIdentity("orders", "1", "Partition 0", "seen"), cast("Any", Interrupted()), lambda: 0)
    items = view.scan(None, None)
    assert next(items) == (b"a", b"1")
    with pytest.raises(RetryableError):
        next(items)
    assert list(items) == [(b"b", b"1")]
