"""A store equals a dictionary under random use: buffered writes, ranges, open scans, commits and reopening."""

from __future__ import annotations

import shutil
import tempfile
from itertools import islice
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from statemgr.stores.open_store import FrozenStore
from statemgr.stores.store import Items
from tests.open_stores import CommittedStore

KEYS = st.binary(max_size=2) | st.sampled_from([b"a", b"ab", b"b", b"\xff", b"\xff\xff"])
VALUES = st.binary(max_size=20)
BOUNDS = st.none() | KEYS
Content = dict[bytes, bytes]


def within(content: Content, start: bytes | None, end: bytes | None) -> list[tuple[bytes, bytes]]:
    """Return the items of a dictionary in a range, in order."""
    return [
        item
        for item in sorted(content.items())
        if (start is None or item[0] >= start) and (end is None or item[0] < end)
    ]


class StoreUse(RuleBasedStateMachine):
    """A store of each kind, with and without a changelog, with a small, a large or no write buffer."""

    scans = Bundle("scans")

    @initialize(kind=st.sampled_from(["rocksdb", "memory"]), track=st.booleans(), batch=st.sampled_from([1, 4, 1000]))
    def start(self, kind: str, track: bool, batch: int) -> None:
        """Start with an empty store."""
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
        """Delete one key, which may be absent."""
        self.job.store.delete(key)
        self.content.pop(key, None)

    @rule(items=st.lists(st.tuples(KEYS, VALUES), max_size=10))
    def put_many(self, items: list[tuple[bytes, bytes]]) -> None:
        """Set many keys. The last value of a key wins."""
        self.job.store.put_many(items)
        self.content.update(items)

    @rule(keys=st.lists(KEYS, max_size=10))
    def delete_many(self, keys: list[bytes]) -> None:
        """Delete many keys."""
        self.job.store.delete_many(keys)
        for key in keys:
            self.content.pop(key, None)

    @rule(start=BOUNDS, end=BOUNDS)
    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        """Delete a range of keys."""
        self.job.store.delete_range(start, end)
        for key, _ in within(self.content, start, end):
            del self.content[key]

    @rule(keys=st.lists(KEYS, max_size=10))
    def get(self, keys: list[bytes]) -> None:
        """Read keys one by one and all at once."""
        expected = [self.content.get(key) for key in keys]
        assert self.job.store.get_many(keys) == expected
        assert [self.job.store.get(key) for key in keys] == expected

    @rule(start=BOUNDS, end=BOUNDS)
    def read_range(self, start: bytes | None, end: bytes | None) -> None:
        """Read a range, in order."""
        assert list(self.job.store.range(start, end)) == within(self.content, start, end)

    @rule(prefix=KEYS)
    def read_prefix(self, prefix: bytes) -> None:
        """Read a prefix, in order."""
        expected = [item for item in sorted(self.content.items()) if item[0].startswith(prefix)]
        with self.job.store.prefix(prefix) as items:
            assert list(items) == expected

    @rule(target=scans, start=BOUNDS, steps=st.integers(0, 3))
    def begin_scan(self, start: bytes | None, steps: int) -> tuple[Items, list[tuple[bytes, bytes]]]:
        """Leave a scan half-way. The rest of it shows the store at the time of the call."""
        items, expected = self.job.store.range(start), within(self.content, start, None)
        assert list(islice(items, steps)) == expected[:steps]
        self.open_scans.append(items)
        return items, expected[steps:]

    @rule(scan=scans, close=st.booleans())
    def go_on(self, scan: tuple[Items, list[tuple[bytes, bytes]]], close: bool) -> None:
        """Read the rest of a scan, unless it is finished or closed, or its store is gone."""
        items, expected = scan
        if items not in self.open_scans:
            return
        self.open_scans.remove(items)
        if not close:
            assert list(items) == expected
        items.close()

    @rule()
    def commit(self) -> None:
        """Publish a commit. The changelog then holds exactly the store's content."""
        self.job.publish(self.job.freeze())
        self.committed = dict(self.content)
        if self.track:
            assert self.job.changelog == self.content
        assert not self.job.opened.changed

    @rule(key=KEYS, value=VALUES)
    def commit_while_writing(self, key: bytes, value: bytes) -> None:
        """Invariant 4: a write during a commit is part of the next commit, not of the current one."""
        frozen: FrozenStore = self.job.freeze()
        self.committed = dict(self.content)
        self.put(key, value)
        self.job.publish(frozen)
        if self.track:
            assert self.job.changelog == self.committed
        assert self.job.opened.changed

    @rule()
    def failed_commit(self) -> None:
        """Invariant 4: a failed commit loses nothing. Its changes are part of the next commit."""
        self.job.give_up(self.job.freeze())

    @rule()
    def reopen(self) -> None:
        """Replace the owner. Only published content is there."""
        self.job.reopen()
        self.open_scans.clear()
        self.content = dict(self.committed)

    @invariant()
    def same_content(self) -> None:
        """Gets return the right value for every present and deleted key, without a flush of the write buffer."""
        if hasattr(self, "job"):
            keys = [*self.content, *self.committed, b"never there"]
            assert self.job.store.get_many(keys) == [self.content.get(key) for key in keys]

    def teardown(self) -> None:
        """Scan the complete store one last time and remove it."""
        if hasattr(self, "job"):
            assert dict(self.job.store.range()) == self.content
            self.job.close()
            shutil.rmtree(self.base)


TestStoreUse = StoreUse.TestCase
TestStoreUse.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)
