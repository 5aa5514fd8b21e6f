"""A store whose type is changed in the configuration, while blobs, a changelog or both have its state."""

from __future__ import annotations

import pytest
from confluent_kafka import Message

from statemgr import Task
from statemgr.errors import ConfigError
from statemgr.testing import JobTester

CHANGES = [("rocksdb", "memory"), ("memory", "rocksdb")]
CHANGELOG, BLOBS = "kafka-changelog", "blob-store"


def keep(task: Task, message: Message) -> None:
    """Keep the newest value of each key."""
    task.store("s").put(message.key() or b"", message.value() or b"")


def job(kind: str, *backends: str) -> JobTester:
    """A job with one store, in these backends. Restores prefer the first one."""
    config = {"job.name": "orders", "job.tasks": 1, "task.inputs": ["orders"], "stores.s.type": kind}
    return JobTester({**config, "task.backup.factories": backends, "task.restore.factories": backends}, keep)


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("loses_disk", [False, True])
@pytest.mark.parametrize("backends", [(BLOBS,), (BLOBS, CHANGELOG)])
def test_blobs_have_a_store_of_another_type(old: str, new: str, loses_disk: bool, backends: tuple[str, ...]) -> None:
    """The opening says which key to set back, and no other backend hides it. Then the job continues."""
    with job(old, *backends) as tester:
        tester.send("orders", b"k", b"1")
        tester.commit()
        tester.crash(lose_disk=loses_disk)
        with pytest.raises(ConfigError, match=f"as a {old} store.*stores.s.type") as caught:
            tester.restore(settings={"stores.s.type": new})
        assert caught.value.where["store"] == "s"
        tester.restore(settings={"stores.s.type": old})
        assert tester.store("s").get(b"k") == b"1"


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("loses_disk", [False, True])
def test_a_changelog_restores_any_type(old: str, new: str, loses_disk: bool) -> None:
    """A changelog has keys and values, whatever the type. A local copy of the old type is replaced."""
    with job(old, CHANGELOG) as tester:
        tester.send("orders", b"k", b"1")
        tester.commit()
        tester.crash(lose_disk=loses_disk)
        tester.restore(settings={"stores.s.type": new})
        assert tester.store("s").get(b"k") == b"1"


@pytest.mark.parametrize(("old", "new"), CHANGES)
@pytest.mark.parametrize("loses_disk", [False, True])
@pytest.mark.parametrize("interval", ["15 min", "1 commit"])
def test_a_type_is_changed_by_a_restore_from_the_changelog(old: str, new: str, loses_disk: bool, interval: str) -> None:
    """The next commit stores a snapshot of the new type, so that blobs restore it again."""
    with job(old, BLOBS, CHANGELOG) as tester:
        tester.send("orders", b"k", b"1")
        tester.commit()
        tester.crash(lose_disk=loses_disk)
        tester.restore(CHANGELOG, settings={"stores.s.type": new, "task.commit.snapshot.interval": interval})
        for key in (b"k2", b"k3"):
            tester.send("orders", key, b"2")
            tester.commit()
        tester.crash(lose_disk=True)
        tester.restore(BLOBS)
        assert dict(tester.store("s").range()) == {b"k": b"1", b"k2": b"2", b"k3": b"2"}
