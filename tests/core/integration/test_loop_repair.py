"""A consumer loop repairs damaged backups in separate commits, next to its regular ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemgr.errors import CorruptError, MissingError, RetryableError
from tests.commits import TASK, commit, current, totals
from tests.core.integration.test_repair import FACTORY, STATE, delete, dual
from tests.jobs import SEGMENTS, SNAPSHOTS
from tests.kafka_jobs import wait_until
from tests.loop_members import make_topic, member, produce
from tests.servers import KafkaServer

MESSAGES = 400


@pytest.mark.parametrize(("kind", "busy"), [(SEGMENTS, True), (SNAPSHOTS, False)])
def test_a_loop_repairs_what_its_opening_finds(kafka: KafkaServer, tmp_path: Path, kind: str, busy: bool) -> None:
    """FAULT 45: the index of the snapshot is gone, and nothing reads it. The loop creates it again, whether or not
    input arrives, and counts every message once."""
    topic = kafka.fresh_name("in")
    make_topic(kafka, topic, 1)
    config = dual(kafka, tmp_path, kind, task__commit__ms=100)
    commit(config, STATE, {f"{topic}-0": 0})
    delete(config, tmp_path, "index")

    def restored() -> dict[bytes, bytes]:
        try:
            return totals(config, FACTORY)[TASK]
        except (MissingError, CorruptError, RetryableError):
            return {}

    def is_counted() -> bool:
        record = current(config)
        return record is not None and record.current.input_offsets == {f"{topic}-0": MESSAGES}

    assert not restored()
    if busy:
        produce(kafka, topic, 1, range(MESSAGES))
    stop, errors = member(config, kafka.fresh_name("group"), topic)
    try:
        wait_until(lambda: bool(errors or restored()))
        if not busy:
            produce(kafka, topic, 1, range(MESSAGES))
        wait_until(lambda: bool(errors) or is_counted())
    finally:
        stop()
    assert not errors
    counts = {b"k%d" % key: b"%d" % (MESSAGES // 50) for key in range(50)}
    assert restored() == totals(config, "kafka-changelog")[TASK] == STATE | counts
