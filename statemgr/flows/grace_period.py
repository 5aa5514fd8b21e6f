"""How long a blob that nothing references yet is left alone, and what a publish owes to that. Pure.

A collection deletes what no retained checkpoint references and what is older than a grace period. What a commit has
uploaded is referenced by nothing until it is published, so a publish must come while its blobs are young: one that
refers to blobs older than half the shortest grace period is refused. The other half is for clocks that differ and for
transactions whose outcome is settled late. So when a collection begins, every blob older than the grace period is
either published already (and marked), or never will be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from statemgr.config import JobConfig
from statemgr.errors import InvalidError, RetryableError
from statemgr.ids import IdSource, attempt_millis
from statemgr.model.commit import PreparedCommit

_DAY_MS = 24 * 3600 * 1000
#: The clocks of two machines may differ by this much without anybody being asked.
_CLOCKS_DIFFER_MS = 10 * 60 * 1000


def shortest_grace_ms(config: JobConfig) -> int:
    """The shortest grace period that a collection may be given, in milliseconds: what publishers rely on."""
    return max(_DAY_MS, 2 * config.commit_timeout_ms)


def chosen_grace_ms(config: JobConfig, wanted_ms: int | None) -> int:
    """The grace period of a collection. Raises: InvalidError for one shorter than publishers rely on."""
    shortest = shortest_grace_ms(config)
    if wanted_ms is not None and wanted_ms < shortest:
        raise InvalidError(
            f"a grace period of {wanted_ms // 1000} s is too short: a commit that is on its way would lose its blobs",
            hint=f"at least {shortest // 1000} s ({shortest / 3_600_000:g} h)",
            job=config.job_name,
        )
    return shortest if wanted_ms is None else wanted_ms


def check_young(
    config: JobConfig, ids: IdSource, commit: PreparedCommit, age_in_store: Callable[[Collection[str]], int]
) -> None:
    """Before a publish. The clocks of the machines that began the commit and that publishes it give its age; where they
    make it old, or younger than now, the blob store is asked, whose clock a collection goes by.

    Args:
        age_in_store: how long ago the oldest of some blobs was written, in milliseconds by the store's own clock.

    Raises: RetryableError when a collection might take what the commit has uploaded.
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
            f"the commit was begun {age_ms // 1000} s ago: its blobs may be collected as garbage any time",
            hint="its changes are in the next one; make batches smaller, or mend this machine's clock",
            job=config.job_name,
            task=commit.task,
        )
