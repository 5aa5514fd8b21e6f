"""The change buffer: it drops nothing before it is acknowledged, and its memory has a budget."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from statemgr.errors import CorruptFile, DiskFull
from statemgr.local import change_buffer
from statemgr.local.change_buffer import ChangeBuffer, FrozenChanges

LARGE = 1 << 30


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    """The directory for spilled changes, which does not exist yet."""
    return tmp_path / "spill"


@pytest.fixture
def buffer(spill: Path) -> Iterator[ChangeBuffer]:
    """A buffer that never reaches its budget."""
    made = ChangeBuffer(spill, LARGE)
    yield made
    made.close()


def applied(frozen: FrozenChanges) -> dict[bytes, bytes | None]:
    """Return the newest change of each key."""
    return dict(frozen)


def test_newest_change_of_a_key(buffer: ChangeBuffer, spill: Path) -> None:
    """Between two freezes, a key has only its newest change."""
    buffer.put(b"a", b"1")
    buffer.extend([(b"b", b"22"), (b"a", None), (b"c", b""), (b"", b"empty key")])
    frozen = buffer.freeze()
    assert sorted(frozen) == [(b"", b"empty key"), (b"a", None), (b"b", b"22"), (b"c", b"")]
    assert frozen.count == 4
    assert frozen.size == sum(len(key) + len(value or b"") for key, value in frozen)
    assert not spill.exists()


def test_empty(buffer: ChangeBuffer) -> None:
    """Without changes, the change set is empty."""
    frozen = buffer.freeze()
    assert (list(frozen), frozen.count, frozen.size) == ([], 0, 0)
    buffer.acknowledge(frozen)


def test_frozen_is_fixed_and_repeatable(buffer: ChangeBuffer) -> None:
    """Later changes do not affect a frozen change set, which can be iterated any number of times."""
    buffer.put(b"a", b"1")
    frozen = buffer.freeze()
    buffer.put(b"a", b"2")
    buffer.put(b"b", b"2")
    assert list(frozen) == list(frozen) == [(b"a", b"1")]


def test_failed_commit_is_in_the_next_one(buffer: ChangeBuffer) -> None:
    """Invariant 4, fault 6: without an acknowledgement all changes stay, older ones first."""
    buffer.extend([(b"a", b"1"), (b"b", b"1")])
    buffer.freeze()
    buffer.extend([(b"a", b"2"), (b"c", None)])
    buffer.freeze()
    again = buffer.freeze()
    assert list(again) == [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", None)]
    assert applied(again) == {b"a": b"2", b"b": b"1", b"c": None}
    assert again.count == 4


def test_net_changes_are_the_newest_of_each_key(buffer: ChangeBuffer) -> None:
    """J1.2: a changelog gets no value that a later change has replaced, and those of a freeze do not change later."""
    buffer.extend([(b"a", b"1"), (b"b", b"1")])
    buffer.freeze()
    buffer.extend([(b"a", None), (b"c", b"2")])
    frozen = buffer.freeze()
    buffer.put(b"b", b"3")
    net = frozen.net()
    assert sorted(net, key=str) == sorted(net, key=str) == [(b"a", None), (b"b", b"1"), (b"c", b"2")]
    assert net.count == 3


@pytest.mark.parametrize("budget", [0, 50_000, LARGE], ids=["all in files", "some in files", "all in memory"])
def test_a_large_value_that_was_replaced_is_not_sent(spill: Path, budget: int) -> None:
    """J1.2: this holds for changes in files, too; a large value that a later freeze replaces belongs to this one."""
    buffer = ChangeBuffer(spill, budget)
    buffer.extend([(b"replaced", bytes(30_000)), (b"deleted", bytes(30_000)), (b"kept", bytes(30_000))])
    buffer.freeze()
    buffer.extend([(b"replaced", b"1"), (b"deleted", None), *((b"%d" % n, bytes(1000)) for n in range(10))])
    frozen = buffer.freeze()
    buffer.put(b"kept", bytes(40_000))
    changes = list(frozen.net())
    assert {key: value for key, value in changes if not key.isdigit()} == {
        b"replaced": b"1", b"deleted": None, b"kept": bytes(30_000),
    }  # fmt: skip
    assert len(changes) == len(dict(changes)) == 13
    assert applied(frozen) == dict(changes)
    later = dict(buffer.freeze().net())
    assert later == dict(changes) | {b"kept": bytes(40_000)}
    buffer.close()


def test_acknowledge_drops_just_what_was_frozen(buffer: ChangeBuffer) -> None:
    """Changes made during a commit are in the next one, even for keys that the commit has."""
    buffer.extend([(b"a", b"1"), (b"b", b"1")])
    first = buffer.freeze()
    buffer.extend([(b"a", b"2")])
    second = buffer.freeze()
    buffer.extend([(b"c", b"3")])
    buffer.acknowledge(first)
    buffer.acknowledge(first)
    assert list(buffer.freeze()) == [(b"a", b"2"), (b"c", b"3")]
    buffer.acknowledge(second)
    assert list(buffer.freeze()) == [(b"c", b"3")]


def test_beyond_the_budget_changes_are_in_files(spill: Path) -> None:
    """Invariant 13: memory stays within the budget. Spilled changes are read back, and deleted when acknowledged."""
    buffer = ChangeBuffer(spill, 100_000)
    expected: dict[bytes, bytes | None] = {}
    for batch in range(20):
        changes = [(b"%06d" % (i * 31 % 2000), os.urandom(200) if i % 7 else None) for i in range(batch, 1000)]
        buffer.extend(changes)
        expected.update(changes)
    frozen = buffer.freeze()
    files = list(spill.iterdir())
    assert files
    assert sum(generation.memory for generation in frozen._generations) <= 100_000
    assert applied(frozen) == expected
    assert applied(frozen) == expected
    assert frozen.count == sum(1 for _ in frozen)
    buffer.put(b"later", b"1")
    buffer.acknowledge(frozen)
    assert list(spill.iterdir()) == []
    assert list(buffer.freeze()) == [(b"later", b"1")]
    buffer.close()
    assert not spill.exists()


def test_a_file_that_cannot_be_removed_ends_no_commit(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes of a published commit are dropped even if their file stays until the end."""
    buffer = ChangeBuffer(spill, 0)
    buffer.put(b"a", b"1")

    def fail(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        buffer.acknowledge(buffer.freeze())
    assert list(buffer.freeze()) == []
    buffer.close()
    assert not spill.exists()


def test_keys_that_change_again_and_again_stay_in_memory(spill: Path) -> None:
    """Only the newest change of each key counts against the budget."""
    buffer = ChangeBuffer(spill, 100_000)
    for turn in range(300):
        buffer.extend([(b"%03d" % key, b"%08d" % turn) for key in range(100)])
    frozen = buffer.freeze()
    assert not spill.exists()
    assert applied(frozen) == {b"%03d" % key: b"%08d" % 299 for key in range(100)}
    assert (frozen.count, frozen.size) == (100, 1100)
    buffer.close()


def test_one_change_above_the_budget(spill: Path) -> None:
    """A single change larger than the budget is kept in a file."""
    buffer = ChangeBuffer(spill, 1000)
    value = os.urandom(100_000)
    buffer.put(b"a", value)
    frozen = buffer.freeze()
    assert [generation.memory for generation in frozen._generations] == [0]
    assert list(frozen) == [(b"a", value)]
    buffer.close()


def test_altered_spill_file_is_an_error(spill: Path) -> None:
    """Altered bytes in a spill file raise the error of a local file: they never reach a changelog, and the task is
    opened again."""
    buffer = ChangeBuffer(spill, 0)
    buffer.put(b"a", b"1" * 1000)
    frozen = buffer.freeze()
    (file,) = spill.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptFile):
        list(frozen)
    buffer.close()


def test_full_disk_loses_no_change(spill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 24: if nothing can be spilled, the buffer raises DiskFull and keeps the changes in memory."""
    buffer = ChangeBuffer(spill, 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(change_buffer, "write_segment", full)
        with pytest.raises(DiskFull):
            buffer.put(b"a", b"1")
        with pytest.raises(DiskFull):
            buffer.put(b"b", b"2")
    assert applied(buffer.freeze()) == {b"a": b"1", b"b": b"2"}
    buffer.put(b"c", b"3")
    assert applied(buffer.freeze()) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    assert list(spill.iterdir())
    buffer.close()


def test_writer_and_committer_at_once(spill: Path) -> None:
    """One thread writes while another commits, and some commits fail. Together, the commits hold every change."""
    buffer = ChangeBuffer(spill, 20_000)
    committed: dict[bytes, bytes | None] = {}
    done = threading.Event()

    def commit() -> None:
        turn = 0
        while True:
            last = done.is_set()
            frozen = buffer.freeze()
            turn += 1
            if turn % 3 or last:
                committed.update(frozen)
                buffer.acknowledge(frozen)
            if last:
                return

    committer = threading.Thread(target=commit)
    committer.start()
    expected: dict[bytes, bytes | None] = {}
    for i in range(20_000):
        key, value = b"%d" % (i % 500), (b"%d" % i if i % 11 else None)
        buffer.put(key, value)
        expected[key] = value
    done.set()
    committer.join(60)
    assert committed == expected
    buffer.close()


def test_what_was_not_frozen_is_much_only_when_it_is_bytes(spill: Path) -> None:
    """C7: replaced changes do not add up, spilled changes count, and a freeze starts the count again."""
    buffer = ChangeBuffer(spill, 30_000)
    for _ in range(50):
        buffer.put(b"hot", bytes(1_000))
        assert not buffer.has_unfrozen(10_000)
    answers = []
    for number in range(40):
        buffer.put(b"%d" % number, bytes(1_000))
        answers.append(buffer.has_unfrozen(20_000))
    assert answers.index(True) in range(10, 20)
    assert list(spill.iterdir())
    frozen = buffer.freeze()
    assert not buffer.has_unfrozen(1)
    assert frozen.count == 41
    buffer.put(b"later", bytes(1_000))
    assert buffer.has_unfrozen(1_000)
    buffer.close()
