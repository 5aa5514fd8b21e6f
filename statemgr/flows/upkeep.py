"""Upkeep: while a job runs, its owners look from time to time at the backups of their current checkpoints, and at all
of a backup once damage is suspected (:func:`find_damage`). They read only, and report what they find to
:class:`statemgr.flows.published.Damage`, which starts a repair.

Steps of a look, for the tasks of one process:

1. ask for the bounds and the IDs of the changelogs, all in three requests
2. read the orders to check blobs that ``statemgr snapshots verify --repair`` has left in the blob store: one LIST
3. check the blobs whose turn it is, and those that an order names. A task has its turn once an hour, and each of its
   blobs once a day, so that its indexes are not read in each look. Small blobs and indexes are read whole, and so are
   those of an order; of the others, only the existence is checked. What cannot be checked is tried again in the next
   looks, for an hour
4. if something is damaged but the checkpoint is no longer the current one, look again: a clean-up may have deleted the
   blob
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from statemgr.backends.blobs.names import is_index_blob
from statemgr.errors import CorruptError, MissingBlob, MissingError, StatemgrError
from statemgr.logs import counted
from statemgr.model.checkpoint import BlobRef, ChangelogMarker, Checkpoint
from statemgr.model.hashing import content_hash
from statemgr.ports import list_blobs
from statemgr.services import Services

log = logging.getLogger(__name__)
_HOUR_S, _DAY_S = 3600.0, 24 * 3600.0
#: Blobs of up to so many bytes are read whole.
_SMALL = 1024 * 1024
#: Times that a task is looked at again because it has published meanwhile.
_TRIES = 5
#: Orders that one look reads, and the most bytes of an order.
_MOST_ORDERS, _ORDER_BYTES = 100, 1024 * 1024
#: (factory, store) → what is damaged
Found = Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Turn:
    """What is checked in one look: the tasks with their time of the hour between ``begin_s`` and ``end_s``, and of each
    the blobs with their time of the day in the hour before. ``ordered``: blobs that an order names."""

    begin_s: float
    end_s: float
    ordered: frozenset[str] = frozenset()

    def of(self, task: str) -> Callable[[str], bool] | None:
        """Whether a blob of the task has its turn. None if none has, so that nobody need list them."""
        place_s = _place(task) * _HOUR_S
        first = math.ceil((self.begin_s - place_s) / _HOUR_S)
        end = math.ceil((self.end_s - place_s) / _HOUR_S)
        if first < end:
            begin = ((first - 1) * _HOUR_S + place_s) / _DAY_S
            length = (end - first) * _HOUR_S / _DAY_S
            return lambda blob_id: blob_id in self.ordered or (_place(blob_id) - begin) % 1 < length
        return self.ordered.__contains__ if self.ordered else None

    def reads(self, ref: BlobRef, stored: int) -> bool:
        """Whether all bytes are read."""
        return ref.blob_id in self.ordered or stored <= _SMALL or is_index_blob(ref.blob_id)


def _place(name: str) -> float:
    """The place of a name in an hour or a day, from 0 to 1."""
    return int.from_bytes(content_hash(name.encode())[:6]) / 2**48


class Upkeep:
    """Remembers what was looked at last. For one thread at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._looked_s = services.clock.monotonic()
        self._orders: set[str] = set()
        #: task → its turn that failed
        self._failed: dict[str, Turn] = {}

    def turn(self) -> Turn:
        """The blobs whose turn it is now, with the new orders (step 2). Raises: UnavailableError, AccessDenied."""
        turn = Turn(self._looked_s, self._services.clock.monotonic(), self._ordered())
        self._looked_s = turn.end_s
        return turn

    def of_task(self, task: str, turn: Turn) -> Turn:
        """A turn, with the one before if that failed for this task. After an hour of failures, without."""
        failed = self._failed.pop(task, turn)
        if turn.begin_s - failed.begin_s > _HOUR_S:
            return turn
        return Turn(failed.begin_s, turn.end_s, failed.ordered | turn.ordered)

    def repeat(self, task: str, turn: Turn) -> None:
        """Let the task's next turn include one that failed, and its orders."""
        self._failed[task] = turn

    def _ordered(self) -> frozenset[str]:
        if self._services.config.blob_uri is None:
            return frozenset()
        store = self._services.blobs()
        there = {info.blob_id: info.size for info in list_blobs(store, order_prefix(self._services))}
        new = sorted(there.keys() - self._orders)
        if len(new) > _MOST_ORDERS:
            ignored = counted(len(new) - _MOST_ORDERS, "order")
            what = (
                "ignored %s to check blobs, all but the newest %d: run `statemgr snapshots verify --repair` again later"
            )
            log.warning(what, ignored, _MOST_ORDERS)
        named = [_read_order(self._services, order, there[order]) for order in new[-_MOST_ORDERS:]]
        self._orders = set(there)
        return frozenset(blob_id for blobs in named for blob_id in blobs)


def look(services: Services, task: str, current: Callable[[], Checkpoint | None], turn: Turn) -> Found | None:
    """Steps 1, 3 and 4 for one task. Returns: None if it published too fast to be sure about what is damaged.

    Raises: UnavailableError, AccessDenied: nothing that could be checked is damaged.
    """
    for _ in range(_TRIES):
        checkpoint = current()
        if checkpoint is None:
            return {}
        found = {**lost_targets(services, checkpoint), **_damaged_blobs(services, task, checkpoint, turn)}
        if not found or current() is checkpoint:
            return found
    return None


def find_damage(services: Services, task: str, checkpoint: Checkpoint) -> Found:
    """Check that everything exists that a restore from the checkpoint needs, in all backends of the job.

    Costs a GET for each index that this process has not read yet, a HEAD for each blob, and three requests for all
    changelogs.

    Returns: (factory, store) → what is missing or corrupt.
    Raises: RetryableError, AccessDenied: something could not be checked.
    """
    found = dict(lost_targets(services, checkpoint))
    needed: dict[str, list[tuple[str, str]]] = {}
    for name, store in services.config.stores.items():
        for factory in store.backup_factories:
            marker, manager = checkpoint.marker(factory, name), services.backup_manager(factory)
            if marker is None:
                continue
            try:
                for blob_id in manager.referenced_blobs(services.identity(task, name), marker) or ():
                    needed.setdefault(blob_id, []).append((factory, name))
            except (MissingError, CorruptError) as error:
                found[factory, name] = str(error)
    for blob_id, problem in (services.transfer().absent(needed) if needed else {}).items():
        if not isinstance(problem, MissingBlob):
            raise problem
        found |= dict.fromkeys(needed[blob_id], f"{blob_id} is missing")
    return found


def lost_targets(services: Services, checkpoint: Checkpoint) -> Found:
    """Step 1: (factory, store) → what a changelog has lost. Raises: UnavailableError, AccessDenied."""
    found: dict[tuple[str, str], str] = {}
    for name, store in services.config.stores.items():
        for factory in store.backup_factories:
            marker = checkpoint.marker(factory, name)
            if not isinstance(marker, ChangelogMarker):
                continue
            if (loss := services.backup_manager(factory).loss_of(marker)) is not None:
                found[factory, name] = f"the changelog {store.changelog_topic} has lost state: {loss}"
    return found


def _damaged_blobs(services: Services, task: str, checkpoint: Checkpoint, turn: Turn) -> Found:
    """Step 3."""
    found: dict[tuple[str, str], str] = {}
    has_turn = turn.of(task)
    if has_turn is None:
        return found
    users: dict[BlobRef, list[tuple[str, str]]] = {}
    stored: dict[BlobRef, int] = {}
    for name, store in services.config.stores.items():
        for factory in store.backup_factories:
            marker = checkpoint.marker(factory, name)
            if marker is None:
                continue
            try:
                for ref, size in services.backup_manager(factory).needed(services.identity(task, name), marker):
                    if has_turn(ref.blob_id):
                        users.setdefault(ref, []).append((factory, name))
                        stored[ref] = size
            except (MissingError, CorruptError) as error:
                found[factory, name] = str(error)
    if not users:
        return found
    transfer = services.transfer()
    whole = [ref for ref in users if turn.reads(ref, stored[ref])]
    failed: dict[BlobRef, StatemgrError] = {
        **transfer.for_each(whole, lambda ref: transfer.read_back(ref, stored[ref]))
    }
    absent = transfer.absent(ref.blob_id for ref in users if ref not in set(whole))
    failed |= {ref: absent[ref.blob_id] for ref in users if ref.blob_id in absent}
    for ref, problem in failed.items():
        if isinstance(problem, MissingError | CorruptError):
            found |= dict.fromkeys(users[ref], f"{ref.blob_id}: {problem.message}")
    if failed and not found:  # damage is reported, whatever else could not be checked
        raise next(iter(failed.values()))
    return found


# --- orders ------------------------------------------------------------------------------------------------------


def order_prefix(services: Services) -> str:
    """The prefix of the orders to check blobs. They have the TTL for which the bucket has a lifecycle rule."""
    return f"{services.config.job_key}/_repair/"


def order_check(services: Services, blob_ids: Collection[str]) -> None:
    """Let the owners check these blobs soon, and make damaged backups again. Raises: UnavailableError, AccessDenied."""
    for body in _orders(blob_ids):
        order = f"{order_prefix(services)}{services.ids.attempt_id()}"
        services.blobs().put(order, body, ttl_days=services.config.ttl_days)


def _orders(blob_ids: Iterable[str]) -> Iterator[bytes]:
    """Orders that together have these names, one a line."""
    lines: list[bytes] = []
    size = 0
    for line in (blob_id.encode() for blob_id in sorted(blob_ids)):
        if lines and size + len(line) > _ORDER_BYTES:
            yield b"\n".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    yield b"\n".join(lines)


def _read_order(services: Services, order: str, size: int) -> Sequence[str]:
    """The names in an order. One that cannot be read is logged, and names nothing."""
    if size > _ORDER_BYTES:
        log.warning("the order %s to check blobs was ignored: it has more than %d bytes", order, _ORDER_BYTES)
        return ()
    buffer, filled = bytearray(size), 0
    try:
        with services.blobs().get(order) as reader:
            while filled < size and (read := reader.readinto(memoryview(buffer)[filled:])):
                filled += read
        return bytes(buffer[:filled]).decode().split("\n")
    except (MissingError, UnicodeDecodeError) as error:
        log.warning("the order %s to check blobs was ignored: %s", order, error)
        return ()
