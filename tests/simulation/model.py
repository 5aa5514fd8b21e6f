"""What is right in a history: a small model of one job.

The input is a sequence of changes that the seed gives, and a checkpoint has read it up to an offset. So the state of a
checkpoint is what the changes before its offset make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import count
from zlib import crc32

from statemgr.blobs import BlobExists
from statemgr.engine.attempts import Attempt
from statemgr.engine.task import Task
from statemgr.errors import (
    CorruptError,
    LayoutMismatch,
    MissingError,
    RetryableError,
    StatemgrError,
    TopicMisconfigured,
)
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.keys.partitioners import murmur2
from tests.simulation.scheduler import Scheduler

TASK, TOPIC, SOURCE = "Partition 0", "orders", "orders-0"
STORES = ("totals", "latest")
BACKENDS = ("blob-store", "kafka-changelog")
#: The backend of another package, which docs/extending.md prints.
PLUG_IN = "examples.plug_ins.shared_directory:SharedDirectory"
DAY_S = 86_400.0
#: Keys of the first store begin with it that timers write, with the position in the input at that moment.
_TIMER = b"timer"
Entries = dict[bytes, bytes]
State = dict[str, Entries]
#: More changes than a partition of the input has.
_CHANGES = 10_000
#: The most seconds by which the clocks of two machines differ.
_CLOCKS_S = 81.0
#: What errors say about records of somebody else in a changelog.
_FOREIGN = ("somebody else has written", "records that this job did not write")
#: Errors that an operation in trouble may end with, besides those that say that it may be tried again.
_EXPECTED = {"FencedError", "OutcomeUnknownError", "RetryableError", "UnavailableError"}


def input_topic(tasks: int) -> str:
    """The input of the layout that a rescale has made, with a partition for each task."""
    return f"{TOPIC}-of-{tasks}"


def is_in(key: bytes, number: int, partitions: int) -> bool:
    """Whether a key belongs to a partition, or to the task of its number."""
    return murmur2([key])[0] % partitions == number


def _first_change(source: str) -> int:
    """The number of the first change of a partition of the input. No two of them have the same changes."""
    return 0 if source == SOURCE else _CHANGES * (1 + crc32(source.encode()) % 1000)


class Wrong(AssertionError):
    """The history broke a property."""


class Model:
    """The input, and what owners were told.

    Attributes:
        acks: how many commits were acknowledged.
        losses: how often the newest checkpoints were lost.
        tried: position → how many commits of it are published, or may be.
        going_back: where rollbacks go that have not ended, or whose outcome nobody knows.
        kept: the IDs of checkpoints that somebody was told are kept.
        was_rescaled: whether the job may have had another number of tasks.
        source: the partition of the input that the task reads.
        owns: says whether a key belongs to the task.
        ticks: the key that timers of the task write.
        is_there: says whether the checkpoint topic has a record of a checkpoint.
        was_damaged: says whether somebody has read wrong bytes, or blobs were lost.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._width = (0, 7, 2900)[scheduler.decide("width of values", 3)]
        #: seconds for which the second store keeps an entry; None if it keeps all of them
        self.ttl_s = (None, None, None, 100.0)[scheduler.decide("ttl", 4)]
        #: offset of the input → when its change was made first and last
        self._made: dict[int, tuple[float, float]] = {}
        #: where its part of the input begins, and the state there
        self._begins, self._first = 0, dict[str, Entries]((store, {}) for store in STORES)
        #: each position that somebody was told is current, the newest one last
        self._acked = [0]
        self.acks = self.losses = self._went_back = 0
        self.tried = Counter({0: 1})
        self.going_back: list[int] = []
        self.kept: set[str] = set()
        #: the sequence number of the last rollback
        self._went_back_at = 0
        self.was_rescaled = False
        self.source, self.ticks = SOURCE, _TIMER
        #: the highest position that timers of the tasks before a rescale may have written
        self._ticked = 0
        self.was_damaged: Callable[[], bool] = lambda: False
        self.owns: Callable[[bytes], bool] = lambda key: True
        self.is_there: Callable[[str], bool] = lambda checkpoint_id: True

    def begin_at(self, position: int, first: State | None = None) -> None:
        """Let the job begin at a position with a state; None for what the changes before it make."""
        self._first = self.state_at(position) if first is None else first
        self._begins, self._acked, self.acks, self.tried = position, [position], 1, Counter({position: 1})

    def part(
        self, number: int, tasks: int, before: Sequence[Model], offsets: Mapping[str, int], topic: str = TOPIC
    ) -> Model:
        """The model of one of the tasks that a rescale has made of those ``before``, at their offsets of the input. It
        has a part of the keys of each, and reads a partition of a topic: where a task before has read it until then, or
        from its beginning."""
        made = copy(self)
        made.source = f"{topic}-{number}"
        made.owns = lambda key: is_in(key, number, tasks)
        made.ticks = next(key for key in map(b"timer-%d".__mod__, count()) if made.owns(key))
        made._ticked = max(max(part.at(offsets), part._ticked) for part in before)
        first: State = {store: {} for store in STORES}
        for part in before:
            for store, entries in part.state_at(part.at(offsets)).items():
                first[store] |= {key: value for key, value in entries.items() if made.owns(key)}
        made.begin_at(offsets.get(made.source, 0), first)
        made.going_back, made.kept, made._went_back_at = [], set(), 0
        return made

    @property
    def acked(self) -> int:
        """The position in the input that somebody was told is published."""
        return self._acked[-1]

    def at(self, offsets: Mapping[str, int]) -> int:
        """The position at offsets of the input. The first checkpoint of a rescale has none of the new topic."""
        return offsets.get(self.source, self._begins)

    def position(self, checkpoint: Checkpoint) -> int:
        """The position of a checkpoint in the input."""
        return self.at(checkpoint.input_offsets)

    def _acknowledge(self, position: int) -> None:
        if position > self.acked:
            self._acked.append(position)

    def change(self, number: int) -> tuple[str, bytes, bytes | None]:
        """The change at an offset of the input."""
        number += _first_change(self.source)
        drawn = self._scheduler.decide(f"change {number}", 1000)
        key = b"key-%d" % (drawn % 7)
        value = None if drawn % 5 == 0 else self.padded(number, drawn % 40)
        return STORES[drawn % 2], key, value

    def row(self, source: str, offset: int, partitions: int) -> bytes | None:
        """The key of the row at an offset of a partition of the input, if its change has a key of the partition."""
        drawn = self._scheduler.decide(f"change {_first_change(source) + offset}", 1000)
        key = b"key-%d" % (drawn % 7)
        return key if is_in(key, int(source.rpartition("-")[2]), partitions) else None

    def padded(self, number: int, width: int = 0) -> bytes:
        """A value with a number, as wide as all values of the history, or ``width`` bytes where they differ."""
        return (b"%d" % number).ljust(self._width or width, b".")

    @contextmanager
    def making(self, number: int) -> Iterator[None]:
        """A block that makes the change of an offset."""
        number += _first_change(self.source)
        first = self._made.get(number, (self._scheduler.now, 0.0))[0]
        yield
        self._made[number] = first, self._scheduler.now

    def state_at(self, position: int) -> State:
        """What the changes before an offset make."""
        state = {store: dict(entries) for store, entries in self._first.items()}
        for number in range(self._begins, position):
            store, key, value = self.change(number)
            if value is None or not self.owns(key):
                state[store].pop(key, None)
            else:
                state[store][key] = value
        return state

    def compare(self, checkpoint: Checkpoint | None, opened: Task | Attempt, acked: int, losses: int = 0) -> int:
        """Compare what an opening found, before which ``acked`` was acknowledged and so many ``losses`` had happened.
        Returns: its position."""
        position = self.position(checkpoint) if checkpoint is not None else 0
        if checkpoint and 0 < losses == self.losses and not self.is_there(str(checkpoint.checkpoint_id)):
            raise Wrong(f"opened at {position}, at a checkpoint that the topic has lost")
        if position < min(acked, self.acked, *self.going_back):  # a rollback may have gone back since
            raise Wrong(f"opened at {position}, but {acked} was acknowledged before")
        if self.tried[position] < 1:
            raise Wrong(f"opened at {position}, which nobody has committed")
        self.compare_state(position, {store: dict(opened.store(store).range()) for store in STORES})
        return position

    def compare_state(self, position: int, found: State, *, as_of_now: bool = True) -> None:
        """Compare the state at a position. ``as_of_now``: without what has expired by now, not by the commit."""
        expected = self.state_at(position)
        for key in [key for key in found[STORES[0]] if key.startswith(_TIMER)]:
            if (ticked := int(found[STORES[0]].pop(key))) > max(position, self._ticked):
                raise Wrong(f"the state at {position} has what a timer has changed at {ticked}")
        if self.ttl_s is not None:
            self._leave_out_expired(found[STORES[1]], expected[STORES[1]], as_of_now=as_of_now)
        if found != expected:
            raise Wrong(f"other state at {position}: {_difference(found, expected)}")

    def _leave_out_expired(self, found: Entries, expected: Entries, *, as_of_now: bool) -> None:
        assert self.ttl_s is not None
        for key, value in list(expected.items()):
            first, last = (made + self.ttl_s for made in self._made[int(value.rstrip(b"."))])
            if key not in found and self._scheduler.now > first - _CLOCKS_S:
                del expected[key]
            elif key in found and as_of_now and self._scheduler.now > last + _CLOCKS_S:
                raise Wrong(f"{key!r} is read {self._scheduler.now - last:.0f} s after it has expired")

    def compare_other(self, checkpoint: Checkpoint | None, opened: Task | Attempt) -> None:
        """Compare what an opening of another task found: the position at its checkpoint."""
        found = {key: value.rstrip(b".") for key, value in opened.store(STORES[0]).range()}
        if found != ({b"at": b"%d" % checkpoint.input_offsets[SOURCE]} if checkpoint is not None else {}):
            raise Wrong(f"another task opened with other state: {found}")

    def check_state_ids(self, before: Checkpoint | None, after: Checkpoint, changed: set[str]) -> None:
        """A store has a new state ID if, and only if, it has changed."""
        if before is None or not changed <= set(STORES):
            return
        for store in STORES[: 1 if self.ttl_s else 2]:  # what expires changes a store, too
            is_new = before.stores.get(store) != after.stores[store]
            if is_new != (store in changed):
                raise Wrong(f"{store} has {'a new' if is_new else 'the same'} state ID after changes of {changed}")

    @contextmanager
    def committing(self, position: int) -> Iterator[None]:
        """A block that commits a position."""
        self.tried[position] += 1
        self._scheduler.trace(f"commit {position}")
        went_back = self._went_back
        try:
            yield
        except RetryableError:
            self.tried[position] -= 1  # surely not published
            raise
        if self._went_back == went_back:  # otherwise a rollback may have followed before the caller was told
            self._acknowledge(position)
        self.acks += 1
        self._scheduler.note(f"committed {position}")

    def has_published(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was acknowledged, perhaps some time ago."""
        if checkpoint.sequence > self._went_back_at:
            self._acknowledge(self.position(checkpoint))

    def went_back(self, checkpoint: Checkpoint) -> None:
        """A rollback was acknowledged, which published this checkpoint."""
        self._acked.append(min(self.acked, self.position(checkpoint)))
        self._went_back_at = checkpoint.sequence
        self._went_back += 1

    def may_lose(self, transactions: int) -> bool:
        """Whether a checkpoint is left for sure when the checkpoint topic loses its newest transactions."""
        return len(self._acked) > transactions + 1

    def lost(self, transactions: int) -> None:
        """The checkpoint topic has lost its newest transactions, which may be commits, or of others."""
        kept = len(self._acked) - transactions - 1
        self._acked[kept:] = [min(self._acked[kept:])]
        self.acks = max(self.acks - transactions, 0)
        self._went_back += 1
        self.losses += 1

    def begin_again(self) -> None:
        """The checkpoint topic is gone, and with it all that was published."""
        self._acked, self.acks, self.tried, self._went_back_at = [0], 0, Counter({0: 1}), 0
        self.going_back.clear()
        self.kept.clear()
        self._went_back += 1

    def expect(self, error: StatemgrError) -> None:
        """Raises: Wrong for an error that no situation explains."""
        is_of_layout = isinstance(error, LayoutMismatch) or error.where.get("key") == "job.tasks"
        if is_of_layout and self.was_rescaled:
            return
        # a changelog of a rescale that another one has overtaken
        is_left = isinstance(error, TopicMisconfigured) and "nothing was ever written to it" in (error.hint or "")
        if is_left and self.was_rescaled:
            return
        # a repeated PUT finds its own blob, and reads wrong bytes
        if isinstance(error, CorruptError | MissingError | TopicMisconfigured | BlobExists) and self.was_damaged():
            return
        # the records of a commit that the checkpoint topic has lost are foreign to an owner that was suspended
        if self.losses and any(foreign in error.message for foreign in _FOREIGN):
            return
        if error.exit_status not in (3, 5, 6) and type(error).__name__ not in _EXPECTED:
            raise Wrong(f"unexpected {type(error).__name__}: {error}") from error


def _difference(found: State, expected: State) -> str:
    for store in STORES:
        for key in sorted(found[store].keys() | expected[store].keys()):
            have, want = found[store].get(key), expected[store].get(key)
            if have != want:
                return f"{store}[{key!r}] is {have!r}, and should be {want!r}"
    return "none"
