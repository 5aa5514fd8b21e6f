"""A local store equals a dictionary for random histories of checkpoints, clones, crashes and reopening."""

from __future__ import annotations

import shutil
import tempfile
from itertools import count
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statemgr.ids import IdSource
from statemgr.local import open_store
from statemgr.local.directories import StoreDirectories
from statemgr.local.machine import SystemClock
from statemgr.ports import CommittedDirectory, LocalStore

KEYS = st.binary(max_size=3)
VALUES = st.one_of(st.none(), st.binary(max_size=20))
CHANGES = st.lists(st.tuples(KEYS, VALUES), max_size=12)
Content = dict[bytes, bytes]


class StoreHistory(RuleBasedStateMachine):
    """One task's store under writes, commits, crashes, clones of any kept state, and clean-ups."""

    @initialize(kind=st.sampled_from(["rocksdb", "memory"]))
    def start(self, kind: str) -> None:
        """Start with an empty store in an empty directory."""
        self.kind = kind
        self.base = Path(tempfile.mkdtemp())
        self.numbers = count()
        self.clock = SystemClock()
        self.ids = IdSource(self.clock.time_ns, lambda: f"{next(self.numbers):032x}"[::-1])
        self.directories = StoreDirectories(self.base / "root", self.clock, self.ids)
        self.states: dict[str, Content] = {}
        self.content: Content = {}
        self._open(None)

    def _open(self, committed: CommittedDirectory | None, read_first: bool = False, briefly: bool = False) -> None:
        self.live = self.directories.clone(committed)
        self.store: LocalStore = open_store(self.kind, self.live, {}, read_first=read_first, briefly=briefly)

    def _write(self, content: Content, changes: list[tuple[bytes, bytes | None]]) -> None:
        for key, value in changes:
            if value is None:
                content.pop(key, None)
            else:
                content[key] = value

    @rule(changes=CHANGES)
    def write(self, changes: list[tuple[bytes, bytes | None]]) -> None:
        """Apply changes to the store and the dictionary."""
        self.store.write(changes)
        self._write(self.content, changes)

    @rule()
    def flush(self) -> None:
        """Flush everything to files."""
        self.store.flush()

    @rule()
    def commit(self) -> None:
        """Make a checkpoint and adopt it under a new state ID."""
        self.store.flush()
        staging = self.directories.staging()
        self.store.checkpoint(staging)
        state_id = f"s{next(self.numbers)}"
        made = self.directories.finished(staging)
        adopted = self.directories.adopt(staging, state_id, made.files).files
        assert all(made.files[path] in ((size, None), (size, digest)) for path, (size, digest) in adopted.items())
        self.states[state_id] = dict(self.content)

    @rule(read_first=st.booleans(), briefly=st.booleans())
    def reopen(self, read_first: bool, briefly: bool) -> None:
        """Flush, close and open the same directory again. The content is still there."""
        self.store.flush()
        self.store.close()
        self.store = open_store(self.kind, self.live, {}, read_first=read_first, briefly=briefly)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def restart_from(self, data: st.DataObject) -> None:
        """Lose the live directory and clone any committed state."""
        self.store.close()
        self.directories.discard(self.live)
        state_id = data.draw(st.sampled_from(sorted(self.states)))
        found = self.directories.find(state_id)
        assert found is not None
        self.content = dict(self.states[state_id])
        self._open(found, data.draw(st.booleans()), data.draw(st.booleans()))

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def new_process(self, data: st.DataObject) -> None:
        """Replace the owner. The next one keeps one state and cleans up the rest."""
        self.store.close()
        self.directories.close()
        self.directories = StoreDirectories(self.base / "root", self.clock, self.ids)
        state_id = data.draw(st.sampled_from(sorted(self.states)))
        self.directories.keep_only([state_id])
        assert [found.state_id for found in self.directories.reusable()] == [state_id]
        assert not self.live.exists()
        self.states = {state_id: self.states[state_id]}
        self.content = dict(self.states[state_id])
        self._open(self.directories.find(state_id), data.draw(st.booleans()), data.draw(st.booleans()))

    @rule(start=st.none() | KEYS, end=st.none() | KEYS)
    def scan(self, start: bytes | None, end: bytes | None) -> None:
        """A range scan returns the dictionary's range, in order."""
        expected = [
            item
            for item in sorted(self.content.items())
            if (start is None or item[0] >= start) and (end is None or item[0] < end)
        ]
        assert list(self.store.scan(start, end)) == expected

    @invariant()
    def same_content(self) -> None:
        """Scans and gets return everything that the dictionary holds."""
        if not hasattr(self, "store"):
            return
        assert dict(self.store.scan(None, None)) == self.content
        keys = [*self.content, b"never there"]
        assert self.store.get_many(keys) == [self.content.get(key) for key in keys]

    def teardown(self) -> None:
        """Close and remove everything."""
        if hasattr(self, "store"):
            self.store.close()
            self.directories.close()
            shutil.rmtree(self.base)


TestStoreHistory = StoreHistory.TestCase
TestStoreHistory.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)
