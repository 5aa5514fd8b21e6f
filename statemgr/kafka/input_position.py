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

A message with an offset below the expected one is from before a seek, and is dropped, unless the topic was created
again with fewer records: then the topic's end is below what was processed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from statemgr.errors import MissingState, UnavailableError
from statemgr.kafka.clients import ANSWER_S, DEADLINE_S
from statemgr.ports import Clock

#: Seconds between two questions for the log start of a partition while messages arrive.
ASK_EVERY_S = 1.0
GONE = (
    "Kafka deleted records before they were processed (retention, or DeleteRecords); to continue without them, give "
    "the one-shot permission `allow_skipped_input`"
)
RECREATED = (
    "the topic was deleted and created again, or lost records: start the job under a new job.id, or give the one-shot "
    "permission `allow_skipped_input` to read the present topic from its beginning"
)


class InputPosition:
    """The position in one source partition. ``next``: the offset to process next; None until the task is restored.

    Args:
        never_jumps: the client always reports a missing offset as an error.
    """

    def __init__(self, consumer: Consumer, place: TopicPartition, clock: Clock, *, never_jumps: bool) -> None:
        self.place = TopicPartition(place.topic, place.partition)
        self.source = f"{place.topic}-{place.partition}"
        self.next: int | None = None
        #: The end of the partition when the task was restored.
        self.end = 0
        self._consumer = consumer
        self._clock = clock
        self._never_jumps = never_jumps
        self._asked = float("-inf")
        #: For the gaps that are not proved yet: the lowest expected offset, and the offset that arrived instead.
        self._unproved: tuple[int, int] | None = None

    def start(self, offset: int | None, *, skip: bool = False) -> int:
        """Where to begin: at the checkpoint's ``offset``, or at the topic's first offset if that is None.

        Args:
            skip: if the checkpoint's offset is gone, begin at the topic's first one.

        Raises: MissingState when the topic does not have the offset; UnavailableError.
        """
        low, high = self._bounds(DEADLINE_S)
        self.end = high
        if offset is None or (skip and not low <= offset <= high):
            return low
        if not low <= offset <= high:
            raise MissingState(
                f"the checkpoint continues at offset {offset}, but the topic has offsets {low} to {high}",
                hint=GONE if offset < low else RECREATED,
                **self._where(),
            )
        return offset

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

    def _bounds(self, timeout_s: float = ANSWER_S) -> tuple[int, int]:
        """Ask the brokers for the first offset and the end."""
        try:
            found = self._consumer.get_watermark_offsets(self.place, timeout=timeout_s, cached=False)
        except KafkaException as error:
            raise UnavailableError(
                f"the brokers did not report the offsets of the input: {error.args[0].str()}", **self._where()
            ) from error
        if found is None:
            raise UnavailableError("the brokers did not report the offsets of the input", **self._where())
        return found

    def _where(self) -> dict[str, Any]:
        return {"topic": self.place.topic, "partition": self.place.partition}
