"""Names derived from jobs and stores: two different jobs or stores never share one."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from statemgr import JobConfig
from statemgr.backends.blobs.names import segments_prefix, store_prefix
from statemgr.errors import ConfigError
from statemgr.kafka.transactions.publisher import job_transactional_id, task_transactional_id
from statemgr.ports import StoreIdentity
from statemgr.wiring import open_services

#: Few characters, so that names that differ only in where they are split occur.
_NAMES = st.from_regex(r"[a1_][a1._-]{0,6}", fullmatch=True)
_STORES = st.from_regex(r"[a1][a1_-]{0,6}", fullmatch=True)
_JOBS = st.tuples(_NAMES, _NAMES)
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def _config(job: tuple[str, str], *stores: str) -> JobConfig:
    return JobConfig.from_mapping(
        {
            "job.name": job[0],
            "job.id": job[1],
            "job.tasks": 2,
            "kafka.bootstrap.servers": "127.0.0.1:1",
            "state.dir": "s",
        }
        | {f"stores.{store}.type": "memory" for store in stores}
    )


def _of_job(config: JobConfig) -> list[str]:
    """Return everything that two jobs may not share: topics, transactional IDs, blob prefixes and local directories."""
    tasks = [f"Partition {index}" for index in range(config.tasks)]
    return [
        config.checkpoint_topic,
        *(store.changelog_topic for store in config.stores.values()),
        job_transactional_id(config),
        *(task_transactional_id(config, task) for task in tasks),
        *_of_stores(config),
    ]


def _of_stores(config: JobConfig) -> list[str]:
    """Return everything that two stores of one job may not share."""
    found = [store.changelog_topic for store in config.stores.values()]
    for task in (f"Partition {index}" for index in range(config.tasks)):
        for store in config.stores:
            identity = StoreIdentity(config.job_name, config.job_id, task, store)
            directory = open_services(config).task_directory(task) / store
            found += [f"blobs {store_prefix(identity)}", f"files {directory.as_posix()}/"]
        found.append(f"blobs {segments_prefix(identity)}")
    return found


@given(_JOBS, _JOBS, _STORES, _STORES)
@example(("clicks", "eu-1"), ("clicks-eu", "1"), "totals", "totals")
@example(("a.1", "2"), ("a", "1.2"), "totals", "totals")
@example(("a-", "1"), ("a", "-1".replace("-", "_")), "s", "s")
@example(("a", "1"), ("a", "1-s"), "s-s", "s")
def test_two_jobs_share_no_name(one: tuple[str, str], other: tuple[str, str], store: str, another: str) -> None:
    """Invariant 16, FAULT 48: two jobs share no name, and no directory or prefix of one is inside one of the other."""
    ours, theirs = _of_job(_config(one, store)), _of_job(_config(other, another))
    if one == other:
        return
    assert not set(ours) & set(theirs)
    for mine in ours:
        for their in theirs:
            if mine.endswith("/") and their.endswith("/"):
                assert not their.startswith(mine)


@given(_JOBS, st.lists(_STORES, min_size=2, max_size=3, unique=True))
def test_two_stores_share_no_name(job: tuple[str, str], stores: list[str]) -> None:
    """Invariant 16: the stores of one job share no name with each other, its topics or its own data."""
    config = _config(job, *stores)
    names = [config.checkpoint_topic, *_of_stores(config)]
    assert len(set(names)) == len(names)
    assert all(_TOPIC.fullmatch(topic) for topic in (names[0], *(s.changelog_topic for s in config.stores.values())))


@pytest.mark.parametrize("name", ["_segments", "_commit", "_mine", "PUBLISHED"])
def test_reserved_names_of_stores_are_refused(name: str) -> None:
    """FAULT 48: the configuration rejects a store name that would collide with statemgr's own data."""
    with pytest.raises(ConfigError, match="reserved") as caught:
        _config(("orders", "1"), name)
    assert caught.value.where["key"] == f"stores.{name}"
