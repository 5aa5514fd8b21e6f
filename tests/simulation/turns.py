"""Which thread of a simulated history has the turn, and what time it is. The seed decides both.

A thread of a history is a greenlet, so a turn costs a microsecond also where other programs use the processors. The
one that runs gives its turn away where it waits, where it does I/O, and at some uncontended locks. Time passes only
when all threads wait.
"""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Any

from greenlet import greenlet
from xxhash import xxh3_128

#: A path that an error names. Each run has a temporary directory with another name.
_PATH = re.compile(r"(?<==)/[^\s\],]*")
#: Turns that a history may take; more of them are a loop that never waits.
MOST_TURNS = 400_000
#: The part of free locks and operations on files at which another thread gets a turn.
PREEMPT = 1 / 12
#: The shortest wait, in seconds.
TICK_S = 1e-6


class Stuck(AssertionError):
    """Every thread waits for another one, or one never waits."""


class Unwound(BaseException):
    """Ends the thread of a process that was killed, when the history is over."""


class Process:
    """A simulated process: its threads, and the files that it has locked."""

    def __init__(self, name: str, machine: str) -> None:
        self.name = name
        self.machine = machine
        self.alive = True
        self.ended_at = 0.0
        self.paused_until = 0.0
        #: for how many seconds it was suspended in all
        self.paused_s = 0.0
        self.locked_files: set[int] = set()
        self.calls: dict[str, int] = {}
        #: whether it has given its partitions back to its group, or knows that it has lost them
        self.gave_back = False
        #: how much more often it dies than others; None until it is decided
        self.danger: float | None = None


class Turn:
    """A thread that runs when it is given a turn."""

    __slots__ = ("ended", "holds_shared", "name", "number", "process", "ready", "runs", "thread", "values", "wake_at")

    def __init__(self, number: int, name: str, process: Process) -> None:
        self.number = number
        self.name = name
        self.process = process
        self.runs: greenlet | None = None
        #: what ``threading.local`` has for it
        self.values: dict[object, dict[str, Any]] = {}
        self.ready = True
        self.ended = False
        #: How many locks of the world it holds: nobody else gets the turn inside a server.
        self.holds_shared = 0
        self.wake_at: float | None = None
        #: its :class:`tests.simulation.threads.Thread`, if it has one
        self.thread: Any = None


class Turns:
    """Gives turns to the threads of one history, and makes its decisions.

    Args:
        seed: decides everything that happens.
        start_s: the wall time at the beginning, in seconds since the epoch.
        quiet: events that do not happen, for a shorter story.

    Attributes:
        now: seconds since the beginning.
        events: what happened although it need not have, in order: see :meth:`chance`.
        story: what was noted so far: seconds, the thread, and a text.
    """

    active: Turns | None = None

    def __init__(
        self, seed: int | str, start_s: float = 1_704_067_200.0, *, quiet: frozenset[str] = frozenset()
    ) -> None:
        self.seed = str(seed)
        self._decision = blake2b(f"{seed}/".encode(), digest_size=8)
        self._quiet = quiet
        self.events: list[str] = []
        self.start_s = start_s
        self.now = 0.0
        self.story: list[tuple[float, str, str]] = []
        self.world = Process("world", "")
        self._random = random.Random(f"turns {seed}")
        #: A source for each use: what a module draws when it is first imported must not change names.
        self._bytes = {kind: random.Random(f"{kind} {seed}") for kind in ("urandom", "uuid4", "token")}
        self._threads: list[Turn] = []
        self._numbers = count()
        self._timers: list[tuple[float, int, Turn]] = []
        self._timer_numbers = count()
        self._ready: list[Turn] = []
        self.turns = 0
        #: called before an operation on files, with its name
        self.before_file: Callable[[str], None] = lambda name: None
        self._digest = xxh3_128()
        #: what called :meth:`_take_turns`
        self._caller: greenlet | None = None
        self._error: BaseException | None = None
        self._unwinding = False
        self.current: Turn | None = None

    def decide(self, what: str, of: int) -> int:
        """A number from 0 to ``of`` - 1, by the seed and by what is decided. Other decisions do not change it."""
        digest = self._decision.copy()
        digest.update(what.encode())
        return int.from_bytes(digest.digest(), "big") % of

    def chance(self, what: str, probability: float) -> bool:
        """Whether something happens that happens with this probability."""
        if probability <= 0 or self.decide(what, 1_000_000) >= probability * 1_000_000 or what in self._quiet:
            return False
        self.events.append(what)
        return True

    def note(self, text: str) -> None:
        """Add a line to the story."""
        who = self.current.name if self.current is not None else "-"
        self.story.append((self.now, who, text))
        self._digest.update(f"{self.now:.6f} {who} {_PATH.sub('', text)}\n".encode())

    def token(self) -> str:
        """32 random hexadecimal digits."""
        return self._bytes["token"].randbytes(16).hex()

    def trace(self, text: str) -> None:
        """Make ``text`` a part of the fingerprint, but not of the story."""
        self._digest.update(f"{self.turns} {text}\n".encode())

    def fingerprint(self) -> str:
        """What all notes and turns of the history so far have in common with no other history."""
        return f"{self._digest.hexdigest()}-{self.turns}"

    # --- turns ---------------------------------------------------------------------------------------------------

    def spawn(self, work: Callable[[], None], name: str, process: Process) -> Turn:
        turn = Turn(next(self._numbers), name, process)
        self._threads.append(turn)
        self._ready.append(turn)

        def run() -> None:
            try:
                work()
            except Unwound:
                pass
            except BaseException as error:
                self.fail(error)
            turn.ended = True
            if not self._unwinding:
                is_over = turn.name == "world" or self._error is not None
                self.current = None if is_over else self._next()

        turn.runs = greenlet(run, parent=self._caller)
        return turn

    def _take_turns(self) -> None:
        """Let threads run, until the history is over. A thread that ends comes back here, and so does the last turn."""
        while self.current is not None:
            assert self.current.runs is not None
            self.current.runs.switch()

    def point(self) -> None:
        """Let another thread have the turn, if the seed says so."""
        turn = self.current
        assert turn is not None
        if not turn.holds_shared:
            self._ready.append(turn)
            self._give_turn()

    def may_point(self) -> None:
        """Let another thread have the turn, rarely."""
        if self._random.random() < PREEMPT:
            self.point()

    def block(self, wake_at: float | None = None) -> bool:
        """Wait until :meth:`wake`, or until a time. Returns: whether it was woken."""
        turn = self.current
        assert turn is not None
        turn.ready = False
        if wake_at is not None:
            turn.wake_at = wake_at
            heapq.heappush(self._timers, (wake_at, next(self._timer_numbers), turn))
        self._give_turn()
        woken = turn.wake_at is None or turn.wake_at < 0
        turn.wake_at = None
        return woken or wake_at is None

    def wake(self, turn: Turn) -> None:
        """End the wait of a thread."""
        if not turn.ready and not turn.ended:
            turn.ready = True
            if turn.wake_at is not None:
                turn.wake_at = -1.0
            self._ready.append(turn)

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        self.block(self.now + max(seconds, TICK_S))

    def _give_turn(self) -> None:
        """Hand the turn to the next thread, and wait for the next one of the caller."""
        turn = self.current
        assert turn is not None
        if self._unwinding:
            raise Unwound
        following = self._next()
        if following is turn:
            return
        self.current = following
        then = self._caller if following is None else following.runs
        assert then is not None
        then.switch()
        if self._unwinding:
            raise Unwound

    def _next(self) -> Turn | None:
        """The thread whose turn it is; None if the history is over."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            self.fail(Stuck(f"{MOST_TURNS} turns: a thread never waits"))
            return None
        while True:
            ready, now = self._ready, self.now
            able = [t for t in ready if t.process.alive and t.process.paused_until <= now]
            if len(able) < len(ready):
                self._ready = [t for t in ready if t.process.alive]
            if able:
                chosen = able[int(self._random.random() * len(able))] if len(able) > 1 else able[0]
                self._ready.remove(chosen)
                chosen.ready = True
                return chosen
            paused = [t.process.paused_until for t in self._ready]
            while self._timers and (self._timers[0][2].ready or not self._timers[0][2].process.alive):
                heapq.heappop(self._timers)
            if self._timers and (not paused or self._timers[0][0] <= min(paused)):
                at, _, turn = heapq.heappop(self._timers)
                if turn.wake_at != at:
                    continue  # an older wait of this thread
                self.now = max(self.now, at)
                turn.ready = True
                self._ready.append(turn)
            elif paused:
                self.now = max(self.now, min(paused))
            else:
                waiting = ", ".join(t.name for t in self._threads if not t.ended and t.process.alive)
                self.fail(Stuck(f"every thread waits for another one: {waiting}"))
                return None

    def fail(self, error: BaseException) -> None:
        """End the history with this error, if it has none yet."""
        if self._error is None:
            self._error = error

    def _unwind(self) -> None:
        """End all threads, whose errors no longer matter."""
        self._unwinding = True
        failed = self._error
        for turn in self._threads:
            assert turn.runs is not None
            if turn.runs:  # it has begun, and has not ended
                self.current = turn
                turn.runs.throw(Unwound)
        self._error = failed
