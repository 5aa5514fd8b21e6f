"""Limits: what cannot fit on the checkpoint topic is refused before anything is published."""

from __future__ import annotations

import pytest

from statemgr import JobConfig
from statemgr.errors import ConfigError, InvalidError
from statemgr.flows.committing.limits import check_config, check_inputs, largest, largest_size, longest_blob
from statemgr.model import codecs
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.record_size import (
    MOST_OUTSTANDING,
    MOST_RECORD,
    inline_attachments_limit,
    inline_chain_limit,
)


def config(stores: int = 1, **more: object) -> JobConfig:
    """Return a job with this many stores in every backend. Keys in ``more`` have ``__`` for ``.``."""
    mapping: dict[str, object] = {
        "job.name": "orders",
        "job.tasks": 1000,
        "kafka.bootstrap.servers": "localhost:9092",
        "blob.store.uri": "memory:",
        "task.backup.factories": ["kafka-changelog", "blob-store"],
        **{f"stores.store-{n}.value.serde": "bytes" for n in range(stores)},
    }
    return JobConfig.from_mapping(mapping | {key.replace("__", "."): value for key, value in more.items()})


def test_ordinary_jobs_fit() -> None:
    """FAULT 58: a thousand tasks, a hundred stores and a thousand partitions fit."""
    check_config(config(100))
    check_inputs(config(100), Inputs({f"orders-{n}": n for n in range(1000)}))


@pytest.mark.parametrize("stores", [1, 100])
def test_the_largest_size_is_that_of_the_largest_record(stores: int) -> None:
    """Only one of its outstanding TTLs is encoded, and the others are counted."""
    job = config(stores)
    (encoded,) = codecs.encode_record(largest(job, longest_blob(job), MOST_OUTSTANDING))
    assert 0 <= largest_size(job) - sum(map(len, encoded)) <= 4


def test_too_many_stores_are_refused() -> None:
    """FAULT 58: a task's record lists every store. If it cannot fit, the start fails and the error names the key."""
    with pytest.raises(ConfigError, match=f"the limit is {MOST_RECORD}") as refused:
        check_config(config(1000))
    assert refused.value.where["key"] == "stores"


def test_a_producer_that_takes_no_such_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT 58: a low record limit of the producer would make a later commit fail, so it is refused. The producer's own
    limit replaces the shared one, and a limit can be in the environment."""
    monkeypatch.setenv("LIMIT", "500000")
    for key in ("kafka.producer.message.max.bytes", "kafka.message.max.bytes"):
        with pytest.raises(ConfigError, match=r"message\.max\.bytes leaves 99964 bytes") as refused:
            check_config(config(**{key: 100_000}))
        assert refused.value.where["key"] == key
    check_config(config(kafka__producer__message__max__bytes=500_000))
    check_config(config(**{"kafka.producer.message.max.bytes": 500_000, "kafka.message.max.bytes": 100_000}))
    check_config(config(**{"kafka.message.max.bytes": "${env:LIMIT}"}))


def test_too_many_input_partitions_are_refused() -> None:
    """FAULT 58: the number of partitions decides, whatever their offsets are now, because offsets grow."""
    with pytest.raises(InvalidError, match="has 20000 partitions") as refused:
        check_inputs(config(), Inputs({f"orders-{n}": 0 for n in range(20_000)}))
    assert refused.value.where["key"] == "task.inputs"


def test_what_is_inline_is_bounded_by_the_publish() -> None:
    """FAULT 58: all tasks and stores share the limit of inline bytes in one publish and in one record."""
    for tasks, stores in ((1, 1), (1000, 1), (1000, 10), (50, 50)):
        assert inline_chain_limit(stores, tasks) * stores <= 64 * 1024
        assert inline_chain_limit(stores, tasks) * stores * tasks <= 768 * 1024
        assert inline_attachments_limit(tasks) * tasks <= 512 * 1024
    assert inline_chain_limit(1, 1) == 8 * 1024
    assert inline_attachments_limit(8) == 16 * 1024
