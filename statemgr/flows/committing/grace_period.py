"""The grace period: how long garbage collection leaves unreferenced blobs alone, and how old a publish may be. Pure.

Garbage collection deletes blobs that no retained checkpoint references and that are older than a grace period. Nothing
references the blobs of a commit until it is published. So a publish must come while its blobs are young: one that
refers to blobs older than half the shortest grace period is refused. The other half is for clocks that differ and for
transactions whose outcome is settled late. So when garbage collection begins, every blob older than the grace period is
either needed by a published checkpoint, or will never be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from statemgr.config import JobConfig
from statemgr.config.units import DAY_MS, HOUR_MS
from statemgr.errors import InvalidError, RetryableError
from statemgr.ids import IdSource, attempt_millis
from statemgr.model.commit import PreparedCommit

#: The clocks of two machines may differ by this much before the blob store's clock is asked.
_CLOCKS_DIFFER_MS = 10 * 60 * 1000


def shortest_grace_ms(config: JobConfig) -> int:
    """The shortest permitted grace period in milliseconds. Publishers rely on it."""
    return max(DAY_MS, 2 * config.commit_timeout_ms)


def chosen_grace_ms(config: JobConfig, wanted_ms: int | None) -> int:
    """The grace period to use. Raises: InvalidError if ``wanted_ms`` is shorter than publishers rely on."""
    shortest = shortest_grace_ms(config)
    if wanted_ms is not None and wanted_ms < shortest:
        raise InvalidError(
            f"a grace period of {wanted_ms // 1000} s is too short: a commit in progress would lose its blobs",
            hint=f"choose at least {shortest // 1000} s ({shortest / HOUR_MS:g} h)",
            job=config.job_name,
        )
    return shortest if wanted_ms is None else wanted_ms


def check_young(
    config: JobConfig, ids: IdSource, commit: PreparedCommit, age_in_store: Callable[[Collection[str]], int]
) -> None:
    """Refuse to publish a commit whose blobs are too old.

    The clocks of the machine that began the commit and of the one that publishes it give its age. If they say that it
    is old, or from the future, the blob store's clock decides, as it does for garbage collection.

    Args:
        age_in_store: how long ago the oldest of some blobs was written, in milliseconds by the store's own clock.

    Raises: RetryableError if garbage collection might delete the commit's blobs.
    """
    began_ms = attempt_millis(commit.attempt)
    if not commit.added_blobs or began_ms is None:
        return
    limit_ms = shortest_grace_ms(config) // 2
    age_ms = ids.time_ns() // 1_000_000 - began_ms
    if not -_CLOCKS_DIFFER_MS < age_ms <= limit_ms:
        age_ms = age_in_store(commit.added_blobs)
    if age_ms > limit_ms:
        raise RetryableError(
            f"the commit began {age_ms // 1000} s ago: its blobs may be deleted as garbage at any time",
            hint="make batches smaller, or correct this machine's clock; the next commit has the changes of this one",
            job=config.job_name,
            task=commit.task,
        )
