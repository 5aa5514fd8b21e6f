"""Opens the state that a chain describes before all of it is here: what something reads is fetched then.

Steps of :func:`open_by_need`:

1. get the chain and the index of its snapshot; a small snapshot, and one of another type of store, is refused
2. fetch the small files, and make each large table file at its full size: it has the foot that is in the index, and a
   hole in place of everything else
3. open the store (:mod:`statemgr.local.rocksdb.partial`) and apply the segments after the snapshot

What reads miss, and the rest, come through :mod:`statemgr.backends.blobs.partial_tables`. Touches the staging
directory, which must not exist, and which is private to the store until all of it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.fetch_snapshot import fetch_snapshot
from statemgr.backends.blobs.local_notes import ChainPositions, DamageNote
from statemgr.backends.blobs.partial_tables import PartialTables
from statemgr.backends.blobs.tables import replay
from statemgr.local.rocksdb.partial import PartialStore
from statemgr.model.chain import SegmentChain, own_way, segments_between
from statemgr.model.checkpoint import BlobRef, Marker
from statemgr.phases import Phase
from statemgr.ports import Clock, RestoreRequest, StoreIdentity, no_progress
from statemgr.services import Services

#: Keys of one call that are read at once.
_READS_AT_ONCE = 16


def open_by_need(
    services: Services,
    catalogue: Catalogue,
    request: RestoreRequest,
    at_least: int,
    damaged: set[BlobRef],
    *,
    owned: bool,
) -> StateByNeed | None:
    """See :meth:`statemgr.ports.RestoreManager.open_by_need`.

    Args:
        damaged: indexes of snapshots that are not read by need, because a part of them is missing or damaged. They grow
            when one is found.
    """
    identity = request.identity
    config = services.config.stores[identity.store]
    identity.announce(Phase.GET_INDEX)
    chain = catalogue.chain(identity, request.marker)  # 1
    way = own_way(chain)
    index = catalogue.index(identity, way.snapshot.index)
    large = {file.name: file for file in index.root.files if file.tail is not None}
    size = sum(file.size for file in large.values())
    note = DamageNote(services, identity)
    if config.type != "rocksdb" or not large or size < at_least:
        return None
    if way.snapshot.index in damaged or (owned and note.names(way.snapshot.index)):
        return None

    def found_damage() -> None:
        damaged.add(way.snapshot.index)
        if owned:
            note.write(way.snapshot.index)

    others = replace(index.root, files=tuple(file for file in index.root.files if file.name not in large))
    small = fetch_snapshot(services.transfer(), replace(index, root=others), way.snapshot.index, request)  # 2
    tables = PartialTables(services.transfer(), request, large, found_damage, owned=owned)
    identity.announce(Phase.OPEN)
    store = PartialStore.open_partial(  # 3
        request.staging, config.rocksdb, tables.supply, lambda: services.executors.pool("by-need", _READS_AT_ONCE)
    )
    tables.is_open = True
    try:
        _, segments = replay(services, identity, store, way.segments, way.snapshot.end, request.progress)
    except BaseException:
        store.close()
        raise
    followed = _Followed(services, catalogue, identity, chain)
    return StateByNeed(services.clock, store, tables, small.bytes_fetched + segments, followed)


@dataclass
class _Followed:
    """The chain that a state has, to which more is published later.

    ``towards``: the chain of whose changes a part is applied, because the rest could not be fetched.
    """

    services: Services
    catalogue: Catalogue
    identity: StoreIdentity
    chain: SegmentChain
    towards: SegmentChain | None = None

    def note(self) -> None:
        """For a restore that begins at a local copy of the state."""
        ChainPositions(self.services, self.identity).note(self.chain)

    def apply(self, store: PartialStore, marker: Marker) -> int | None:
        """As :meth:`statemgr.ports.PartialState.follow`."""
        before, after = self.chain, self.catalogue.chain(self.identity, marker)
        segments = segments_between(before, after)
        if segments is None or (self.towards is not None and segments_between(self.towards, after) is None):
            return None
        self.towards = after
        fetched = replay(self.services, self.identity, store, segments, before.end, no_progress)[1] if segments else 0
        self.chain, self.towards = after, None
        return fetched


class StateByNeed:
    """Implements ``ports.PartialState``."""

    def __init__(
        self, clock: Clock, store: PartialStore, tables: PartialTables, others: int, followed: _Followed
    ) -> None:
        self.store = store
        self._clock = clock
        self._tables = tables
        self._others = others
        self._followed = followed
        self._branches = WeakSet[StateByNeed]()
        #: When the rest was begun to be fetched, and how much was verified then.
        self._began: tuple[float, int] | None = None

    @property
    def fetched(self) -> int:
        return self._others + self._tables.fetched

    @property
    def missing(self) -> int:
        # at least 1, until the last file is verified
        return 0 if self.store.is_whole else max(1, self._tables.size - self._tables.verified)

    @property
    def faults(self) -> int:
        return self._tables.faults

    @property
    def rate(self) -> float:
        if self._began is None:
            return 0.0
        began_s, before = self._began
        return (self._tables.verified - before) / max(self._clock.elapsed() - began_s, 1e-3)

    @property
    def is_damaged(self) -> bool:
        return self._tables.is_damaged

    @property
    def files(self) -> Mapping[str, tuple[int, bytes]]:
        return self._tables.files

    def follow(self, marker: Marker) -> int | None:
        return self._followed.apply(self.store, marker)

    def branch(self, directory: Path) -> StateByNeed:
        self._followed.note()
        store = self.store.branch(directory)
        branch = StateByNeed(self._clock, store, self._tables, self._others, self._followed)
        self._branches.add(branch)
        if self.store.is_whole:
            store.become_whole(briefly=True)
        return branch

    def check_space(self) -> None:
        self._tables.check_space()

    def fetch_rest(self, check: Callable[[], None]) -> None:
        self._began = self._clock.elapsed(), self._tables.verified
        self._tables.fetch_rest(check)
        self.store.become_whole()
        for branch in list(self._branches):
            branch.store.become_whole(briefly=True)
