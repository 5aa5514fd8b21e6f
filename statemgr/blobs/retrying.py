"""Retries around any blob store, with jittered exponential back-off and one deadline. Waits through the clock only.

Only ``UnavailableError`` is retried. Other errors (AccessDenied, MissingBlob) are raised at once. A GET that breaks off
is opened again where it stopped, because blobs never change. A GET that stays slower than a floor is opened again once
half of the deadline has passed, and fails at the deadline.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import tenacity

from statemgr.blobs.counting import BlobCounts, CountingBlobStore
from statemgr.blobs.verifying import VerifyingBlobStore
from statemgr.config import RetryPolicy
from statemgr.errors import StatemgrError, UnavailableError
from statemgr.logs import Event, tell
from statemgr.ports import (
    BlobAdministration,
    BlobInfo,
    BlobPage,
    BlobReader,
    BlobStore,
    Body,
    Clock,
    CopyingBlobStore,
    UnfinishedUpload,
)

T = TypeVar("T")
log = logging.getLogger(__name__)
#: Seconds between two lines about retries in the log.
_LOG_S = 10.0
#: Bytes a second. A body that stays slower counts as no answer.
_FLOOR = 8 * 1024


class RetryingBlobStore:
    """A blob store that retries by ``policy``, and counts it in ``counts``. Each call has its own deadline."""

    def __init__(
        self,
        inner: BlobStore,
        policy: RetryPolicy,
        clock: Clock,
        uniform: Callable[[], float] = random.random,
        counts: BlobCounts | None = None,
    ) -> None:
        self.inner = inner
        self._call = Retries(policy, clock, uniform, counts or BlobCounts())
        self._new_pace = partial(_Pace, clock, policy.max_duration_ms / 1000)

    @property
    def checks_uploads(self) -> bool:
        return self.inner.checks_uploads

    @property
    def administration(self) -> RetryingAdministration:
        return RetryingAdministration(self.inner.administration, self._call)

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        self._call("put", lambda: self.inner.put(blob_id, body, ttl_days=ttl_days))

    def copy_from(self, source: BlobStore, wanted: BlobInfo, blob_id: str, *, ttl_days: int) -> bool:
        """``source`` may have the same decorators."""
        inner, there = self.inner, undecorated(source)
        if not isinstance(inner, CopyingBlobStore):
            return False
        return self._call("copy", lambda: inner.copy_from(there, wanted, blob_id, ttl_days=ttl_days))

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        """If the body breaks off, a new GET continues it."""

        def opened(position: int) -> AbstractContextManager[BlobReader]:
            left = None if length is None else length - position
            return self.inner.get(blob_id, offset + position, left)

        with ExitStack() as stack:
            yield _ResumingReader(opened, self._call, stack, self._new_pace(), blob_id)

    def stat(self, blob_id: str) -> BlobInfo:
        return self._call("stat", lambda: self.inner.stat(blob_id))

    def remove_ttl(self, blob_id: str) -> None:
        self._call("remove-ttl", lambda: self.inner.remove_ttl(blob_id))

    def delete(self, blob_id: str) -> None:
        self._call("delete", lambda: self.inner.delete(blob_id))

    def delete_many(self, blob_ids: Sequence[str]) -> Mapping[str, StatemgrError]:
        """Retries the deletes that failed with UnavailableError, together."""
        failed: dict[str, StatemgrError] = {}
        left = list(blob_ids)

        def delete() -> None:
            nonlocal left
            result = self.inner.delete_many(left)
            left = [blob_id for blob_id, error in result.items() if isinstance(error, UnavailableError)]
            failed.update({blob_id: error for blob_id, error in result.items() if blob_id not in left})
            if left:
                raise result[left[0]]

        try:
            self._call("delete", delete)
        except UnavailableError as error:
            failed |= dict.fromkeys(left, error)
        return failed

    def close(self) -> None:
        self.inner.close()


def undecorated(store: BlobStore) -> BlobStore:
    """The store itself, which moves the bytes."""
    while isinstance(store, RetryingBlobStore | VerifyingBlobStore | CountingBlobStore):
        store = store.inner
    return store


class RetryingAdministration:
    """The administration of a store. Each call is retried, and a listing page by page."""

    def __init__(self, inner: BlobAdministration, call: Retries) -> None:
        self._inner = inner
        self._call = call

    @property
    def listing_tells_ttl(self) -> bool:
        return self._inner.listing_tells_ttl

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        return self._call("list", lambda: self._inner.list(prefix, token))

    def time_ms(self) -> int:
        return self._call("time", self._inner.time_ms)

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Reads all of them before it returns the first. There are few."""
        return self._call("list", lambda: iter([*self._inner.unfinished(prefix)]))

    def abandon(self, upload: UnfinishedUpload) -> None:
        self._call("abandon", lambda: self._inner.abandon(upload))

    def probe(self) -> Sequence[str]:
        return self._call("probe", self._inner.probe)

    def fix(self) -> Sequence[str]:
        return self._call("fix", self._inner.fix)


class Retries:
    """Repeats calls that raise UnavailableError until the policy's retries or its duration are used up."""

    def __init__(self, policy: RetryPolicy, clock: Clock, uniform: Callable[[], float], counts: BlobCounts) -> None:
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        #: Repetitions that no line in the log has counted, and when the next line may come.
        self._unlogged, self._next_line = 0, float("-inf")
        self._counts = counts

    def __call__(self, operation: str, action: Callable[[], T]) -> T:
        """Raises: the last error of the action; an UnavailableError has the number of attempts."""
        policy, clock = self._policy, self._clock
        deadline = clock.monotonic() + policy.max_duration_ms / 1000

        def ended(state: tenacity.RetryCallState) -> bool:
            out_of_retries = 0 <= policy.max_retries < state.attempt_number
            return out_of_retries or clock.monotonic() + state.upcoming_sleep >= deadline

        def repeated(state: tenacity.RetryCallState) -> None:
            self._counts.add("retries", operation)
            self._log(state)

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(UnavailableError),
            wait=self._pause,
            stop=ended,
            sleep=clock.sleep,
            before_sleep=repeated,
            reraise=True,
        )
        try:
            return attempts(action)
        except UnavailableError as error:
            number = attempts.statistics.get("attempt_number")
            raise error.with_where(attempts=number) from error.__cause__

    def _log(self, state: tenacity.RetryCallState) -> None:
        """Write at most one line in :data:`_LOG_S` seconds about all requests that are repeated."""
        self._unlogged += 1  # an approximate number is enough, so threads need no lock
        now = self._clock.monotonic()
        if now < self._next_line or state.outcome is None:
            return
        repeated, self._unlogged, self._next_line = self._unlogged, 0, now + _LOG_S
        error = state.outcome.exception()
        tell(
            log, Event.RETRYING,
            "the blob store does not answer, so requests are repeated, each %sfor at most %.0f s (%d since the last "
            "line; attempt %d of this one failed, and the next is in %.1f s): %s",
            f"{most} times and " if (most := self._policy.max_retries) >= 0 else "",
            self._policy.max_duration_ms / 1000, repeated, state.attempt_number, state.upcoming_sleep, error,
            level=logging.WARNING, attempts=state.attempt_number, retries=repeated,
        )  # fmt: skip

    def _pause(self, state: tenacity.RetryCallState) -> float:
        """Seconds before the next attempt."""
        policy = self._policy
        # computed step by step: a power could overflow
        milliseconds = float(policy.backoff_ms)
        for _ in range(state.attempt_number - 1):
            if milliseconds >= policy.backoff_max_ms:
                break
            milliseconds *= policy.factor
        milliseconds = min(milliseconds, policy.backoff_max_ms)
        return milliseconds * (1 - policy.jitter * self._uniform()) / 1000


class _Pace:
    """Notices a body that arrives slower than the floor. Only the time of reads counts, not the reader's own work."""

    def __init__(self, clock: Clock, deadline_s: float) -> None:
        self._clock = clock
        self._deadline = deadline_s
        self._seconds, self._size, self._was_renewed = 0.0, 0, False

    def read(self, reader: BlobReader, buffer: memoryview) -> int:
        begun = self._clock.monotonic()
        size = reader.readinto(buffer)
        self._seconds += self._clock.monotonic() - begun
        self._size += size
        if self._size >= _FLOOR * self._seconds and self._seconds >= 1:
            self._seconds, self._size, self._was_renewed = 0.0, 0, False
        return size

    @property
    def is_below_floor(self) -> bool:
        """Whether the body has been too slow up to the deadline."""
        return self._seconds >= max(self._deadline, 1) and self._size < _FLOOR * self._seconds

    def renews(self) -> bool:
        """Whether to try another connection, because the body was too slow for half of the deadline. True only once.

        The new connection has the other half, even if a single read took longer than the whole deadline.
        """
        half = max(self._deadline / 2, 1)
        if self._was_renewed or self._seconds < half or self._size >= _FLOOR * self._seconds:
            return False
        self._seconds, self._size, self._was_renewed = half, 0, True
        return True


class _ResumingReader:
    """Continues in a new stream when one breaks off."""

    def __init__(
        self,
        opened: Callable[[int], AbstractContextManager[BlobReader]],
        call: Retries,
        stack: ExitStack,
        pace: _Pace,
        blob_id: str,
    ) -> None:
        self._opened = opened
        self._call = call
        self._stack = stack
        self._pace = pace
        self._blob_id = blob_id
        self._position = 0
        self._reader = call("get", self._open)

    def readinto(self, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        try:
            size = self._pace.read(self._reader, buffer)
        except UnavailableError:
            size = self._call("get", lambda: self._read_again(buffer))
        self._position += size
        if size and self._pace.renews():
            self._stack.close()
            self._reader = self._call("get", self._open)
        elif size and self._pace.is_below_floor:
            raise UnavailableError(
                f"the blob arrives at less than {_FLOOR} bytes a second",
                blob=self._blob_id,
                hint="check the network, or raise blob.store.retry.policy.max.retry.duration.millis",
            )
        return size

    def copy_to(self, fd: int, offset: int, size: int) -> int | None:
        copied = self._reader.copy_to(fd, offset, size)
        self._position += copied or 0
        return copied

    def _read_again(self, buffer: memoryview) -> int:
        self._stack.close()
        self._reader = self._open()
        return self._pace.read(self._reader, buffer)

    def _open(self) -> BlobReader:
        return self._stack.enter_context(self._opened(self._position))
