"""The position in a source partition, and whether the next message follows what was processed.

The next message normally has the next offset. A higher offset can be right: compaction removes records, and
transactions leave control records and aborted records that no consumer receives. But a truncated input, or one whose
retention was shorter than the lag, has a gap that looks the same: a client with ``auto.offset.reset`` = ``earliest`` or
``latest`` jumps over it silently.

How to tell the two apart: a broker answers a fetch at offset e with everything from e on if its log start is not above
e. Otherwise it refuses the fetch, and only then does a client jump. The log start never decreases. So if the log start,
asked for *after* the message was received, is not above e, then it was not above e at the fetch, and nothing was
skipped. The client's cached watermarks prove nothing, because they may be older than the fetch.

What this costs: a compacted or transactional input has many gaps. While messages arrive, the log start is asked for at
most once in :data:`ASK_EVERY_S` seconds. The position remembers the lowest offset that was expected in any gap since,
and one question before the next commit proves all of them. So a row after a jump may be processed but is never
committed. A client that never jumps (``config.consumer``, which reports such a fetch as an error) needs no question.

Offsets without a message at the end of the log are passed, too (:meth:`InputPosition.passed`): otherwise a job that has
processed everything would seem to lag for ever.

A message with an offset below the expected one is from before a seek, and is dropped, unless the topic was created
again with fewer records: then the topic's end is below what was processed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from confluent_kafka import TopicPartition

from statemgr.errors import AccessDenied, MissingState, StatemgrError, UnavailableError
from statemgr.kafka.clients import DEADLINE_S
from statemgr.kafka.input_topics import GONE, RECREATED, InputTopics
from statemgr.ports import Clock

#: Seconds between two questions for the log start of a partition while messages arrive.
ASK_EVERY_S = 1.0


class InputPosition:
    """The position in one source partition.

    Args:
        never_jumps: the client always reports a missing offset as an error.

    Attributes:
        next: the offset to process next; None until the task is restored.
        end: the end of the partition when the task was restored.
    """

    def __init__(self, topics: InputTopics, place: TopicPartition, clock: Clock, *, never_jumps: bool) -> None:
        self.place = TopicPartition(place.topic, place.partition)
        self.key = (place.topic, place.partition)
        self.source = f"{place.topic}-{place.partition}"
        self.next: int | None = None
        self.end = 0
        self._topics = topics
        self._clock = clock
        self._never_jumps = never_jumps
        #: The first offset and the end that the brokers have reported for :meth:`start`, and since when they are asked.
        self._span: tuple[int, int] | None = None
        self._waiting_since: float | None = None
        self._asked = float("-inf")
        #: For the gaps that are not proved yet: the lowest expected offset, and the offset that arrived instead.
        self._unproved: tuple[int, int] | None = None

    @property
    def located(self) -> bool:
        """Whether the brokers have reported the offsets of the partition, so that :meth:`start` can be called."""
        return self._span is not None

    def locate(self, span: tuple[int, int] | None, failure: StatemgrError | None) -> None:
        """Take the answer of the brokers, or the reason why there is none.

        Raises: ``failure`` if waiting does not help, or if there has been no answer for :data:`DEADLINE_S` seconds.
        """
        now_s = self._clock.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now_s
        too_long = now_s - self._waiting_since > DEADLINE_S
        if span is None and failure is not None and (too_long or isinstance(failure, AccessDenied)):
            raise failure
        self._span = span

    def start(self, offset: int | None, *, skip: bool = False, at_end: bool = False) -> int:
        """Where to begin: at the checkpoint's ``offset``, or at the topic's first offset if that is None.

        Args:
            skip: if the checkpoint's offset is gone, begin at the topic's first one.
            at_end: begin at the topic's end, and not at its first offset, if ``offset`` is None.

        Raises: MissingState when the topic does not have the offset.
        """
        assert self._span is not None
        low, high = self._span
        self.end = high
        if offset is None:
            return high if at_end else low
        if low <= offset <= high:
            return offset
        if not skip:
            raise MissingState(
                f"the checkpoint continues at offset {offset}, but the topic has offsets {low} to {high}",
                hint=GONE if offset < low else RECREATED,
                **self._where(),
            )
        return low

    def follows(self, offset: int) -> bool:
        """Whether to process a message whose offset is not the next one. False: it was processed before.

        Raises: MissingState when input was skipped.
        """
        assert self.next is not None
        later = offset > self.next
        if later and not self._never_jumps:
            self._unproved = self._unproved or (self.next, offset)
        now_s = self._clock.monotonic()
        if (self._unproved or not later) and now_s - self._asked >= ASK_EVERY_S:
            self._asked = now_s
            with suppress(UnavailableError):  # it is asked again later, and before the next commit
                if later:
                    self.prove()
                else:
                    self._check_end()
        return later

    def passed(self, offset: int) -> bool:
        """The client has passed all before ``offset``, and each message of it was processed: the ends of transactions
        and aborted messages have offsets, too. Returns: whether the next offset is another one now.
        """
        if self.next is None or offset <= self.next:
            return False
        if not self._never_jumps:
            self._unproved = self._unproved or (self.next, offset)
        self.next = offset
        return True

    def prove(self) -> None:
        """Called before a commit. Raises: MissingState if a gap so far skipped input; UnavailableError."""
        if self._unproved is None:
            return
        expected, received = self._unproved
        low, _ = self._bounds()
        if low > expected:
            raise MissingState(
                f"the input should continue at offset {expected}, but the client jumped to {received}: "
                f"the topic now begins at {low}",
                hint=GONE,
                offset=expected,
                received=received,
                **self._where(),
            )
        self._unproved = None

    def _check_end(self) -> None:
        low, high = self._bounds()
        if high < (self.next or 0):
            raise MissingState(
                f"the input should continue at offset {self.next}, but the topic now has offsets {low} to {high}",
                hint=RECREATED,
                offset=self.next,
                **self._where(),
            )

    def _bounds(self) -> tuple[int, int]:
        """Ask the brokers for the first offset and the end. Raises: UnavailableError."""
        found, failure = self._topics.spans([self.key])
        if failure is not None:
            raise UnavailableError("the brokers did not report the offsets of the input", **self._where()) from failure
        return found[self.key]

    def _where(self) -> dict[str, Any]:
        return {"topic": self.place.topic, "partition": self.place.partition}
