"""Random use of a store equals a dictionary's: buffered writes, ranges, scans under way, commits and reopening."""

from __future__ import annotations

import shutil
import tempfile
from itertools import islice
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from statemgr.engine.store import Items
from statemgr.flows.open_store import FrozenStore
from tests.open_stores import CommittedStore

KEYS = st.binary(max_size=2) | st.sampled_from([b"a", b"ab", b"b", b"\xff", b"\xff\xff"])
VALUES = st.binary(max_size=20)
BOUNDS = st.none() | KEYS
Content = dict[bytes, bytes]


def within(content: Content, start: bytes | None, end: bytes | None) -> list[tuple[bytes, bytes]]:
    """The items of a dictionary in a range, in order."""
    return [
        item
        for item in sorted(content.items())
        if (start is None or item[0] >= start) and (end is None or item[0] < end)
    ]


class StoreUse(RuleBasedStateMachine):
    """A store of each kind, with and without a changelog, with a small write buffer, a large one, and none."""

    scans = Bundle("scans")

    @initialize(kind=st.sampled_from(["rocksdb", "memory"]), track=st.booleans(), batch=st.sampled_from([1, 4, 1000]))
    def start(self, kind: str, track: bool, batch: int) -> None:
        """Begin with an empty store."""
        self.base = Path(tempfile.mkdtemp())
        self.track = track
        self.job = CommittedStore(self.base, track=track, settings={"type": kind, "write.batch.size": batch})
        self.content: Content = {}
        self.committed: Content = {}
        self.open_scans: list[Items] = []

    @rule(key=KEYS, value=VALUES)
    def put(self, key: bytes, value: bytes) -> None:
        """Set one key."""
        self.job.store.put(key, value)
        self.content[key] = value

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        """Remove one key, which may be absent."""
        self.job.store.delete(key)
        self.content.pop(key, None)

    @rule(items=st.lists(st.tuples(KEYS, VALUES), max_size=10))
    def put_many(self, items: list[tuple[bytes, bytes]]) -> None:
        """Set many keys, the newest of a key counts."""
        self.job.store.put_many(items)
        self.content.update(items)

    @rule(keys=st.lists(KEYS, max_size=10))
    def delete_many(self, keys: list[bytes]) -> None:
        """Remove many keys."""
        self.job.store.delete_many(keys)
        for key in keys:
            self.content.pop(key, None)

    @rule(start=BOUNDS, end=BOUNDS)
    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Remove a range of keys."""
        self.job.store.delete_range(start, end)
        for key, _ in within(self.content, start, end):
            del self.content[key]

    @rule(keys=st.lists(KEYS, max_size=10))
    def get(self, keys: list[bytes]) -> None:
        """Keys one by one, and all at once."""
        expected = [self.content.get(key) for key in keys]
        assert self.job.store.get_many(keys) == expected
        assert [self.job.store.get(key) for key in keys] == expected

    @rule(start=BOUNDS, end=BOUNDS)
    def read_range(self, start: bytes | None, end: bytes | None) -> None:
        """A range, in order."""
        assert list(self.job.store.range(start, end)) == within(self.content, start, end)

    @rule(prefix=KEYS)
    def read_prefix(self, prefix: bytes) -> None:
        """A prefix, in order."""
        expected = [item for item in sorted(self.content.items()) if item[0].startswith(prefix)]
        with self.job.store.prefix(prefix) as items:
            assert list(items) == expected

    @rule(target=scans, start=BOUNDS, steps=st.integers(0, 3))
    def begin_scan(self, start: bytes | None, steps: int) -> tuple[Items, list[tuple[bytes, bytes]]]:
        """Leave a scan half-way: the rest of it is of this moment."""
        items, expected = self.job.store.range(start), within(self.content, start, None)
        assert list(islice(items, steps)) == expected[:steps]
        self.open_scans.append(items)
        return items, expected[steps:]

    @rule(scan=scans, close=st.booleans())
    def go_on(self, scan: tuple[Items, list[tuple[bytes, bytes]]], close: bool) -> None:
        """Read the rest of a scan, unless it was read, closed, or its store is gone."""
        items, expected = scan
        if items not in self.open_scans:
            return
        self.open_scans.remove(items)
        if not close:
            assert list(items) == expected
        items.close()

    @rule()
    def commit(self) -> None:
        """A commit that is published: the changelog has exactly what the store has."""
        self.job.publish(self.job.freeze())
        self.committed = dict(self.content)
        if self.track:
            assert self.job.changelog == self.content
        assert not self.job.opened.changed

    @rule(key=KEYS, value=VALUES)
    def commit_while_writing(self, key: bytes, value: bytes) -> None:
        """Invariant 4: what is written while a commit is on its way is in the next one, not in this."""
        frozen: FrozenStore = self.job.freeze()
        self.committed = dict(self.content)
        self.put(key, value)
        self.job.publish(frozen)
        if self.track:
            assert self.job.changelog == self.committed
        assert self.job.opened.changed

    @rule()
    def failed_commit(self) -> None:
        """Invariant 4: a commit that fails loses nothing; its changes are in the next one."""
        self.job.give_up(self.job.freeze())

    @rule()
    def reopen(self) -> None:
        """The owner is gone: what was published is there, and nothing else."""
        self.job.reopen()
        self.open_scans.clear()
        self.content = dict(self.committed)

    @invariant()
    def same_content(self) -> None:
        """Every key that there is, or was, without writing out what is gathered."""
        if hasattr(self, "job"):
            keys = [*self.content, *self.committed, b"never there"]
            assert self.job.store.get_many(keys) == [self.content.get(key) for key in keys]

    def teardown(self) -> None:
        """At the end the store is scanned whole and removed."""
        if hasattr(self, "job"):
            assert dict(self.job.store.range()) == self.content
            self.job.close()
            shutil.rmtree(self.base)


TestStoreUse = StoreUse.TestCase
TestStoreUse.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)
