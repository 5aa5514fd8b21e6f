"""What each release has written is opened, verified, migrated and rolled back by the present version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard

from statemgr import JobConfig, StateManager, __version__
from statemgr.flows.opening.open_job import JobTopics
from statemgr.health.verify_blobs import verify_blobs
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.codecs.schemas import load_schema_files, single_objects
from statemgr.operations.migrate.verify import StoreToVerify, Verifier
from statemgr.operations.rescale.undo import undo
from statemgr.operations.rollback.owner import Goal, roll_back
from statemgr.ports import no_progress
from statemgr.reader import JobReader
from statemgr.services import submit_here
from statemgr.testing.memory_servers import MemoryServers
from tests.compatibility.corpus import DIRECTORY, Truth, loaded
from tests.compatibility.jobs import BLOBS, CHANGELOG, JOBS
from tests.compatibility.records import READERS, plain, read_records

JOB_FILES = sorted(DIRECTORY.glob("*/*.job"))
RECORD_FILES = sorted(DIRECTORY.glob("*/records"))
Written = tuple[MemoryServers, Sequence[Truth]]


def _name(file: Path) -> str:
    return f"{file.parent.name}-{file.stem}"


@pytest.fixture(params=JOB_FILES, ids=_name)
def written(request: pytest.FixtureRequest) -> Iterator[Written]:
    """A job as a release has left it, and what its checkpoints have."""
    with loaded(request.param) as job:
        yield job


def _newest(truths: Sequence[Truth]) -> dict[str, Truth]:
    return {truth.task: truth for truth in truths}


def _content(task: Any, truth: Truth) -> Mapping[str, Mapping[bytes, bytes]]:
    return {store: dict(task.store(store).range()) for store in truth.stores}


def _backends(servers: MemoryServers) -> set[str]:
    return {factory for store in servers.config.stores.values() for factory in store.backup_factories}


def _changed(servers: MemoryServers, disk: str, **keys: object) -> JobConfig:
    config = servers.on_disk(servers.config, disk)
    return JobConfig.from_mapping(config.to_mapping(), {key.replace("__", "."): value for key, value in keys.items()})


def test_the_corpus_of_this_version_is_whole() -> None:
    """It has a file for each job and record, below 300 KB, and a record of each schema or of an older version."""
    directory = DIRECTORY / __version__
    assert {file.name for file in directory.iterdir()} == {*(f"{name}.job" for name in JOBS), "records"}
    assert sum(file.stat().st_size for file in directory.iterdir()) < 300_000
    assert read_records(directory / "records").keys() == READERS.keys()
    found = b"".join(zstandard.decompress(file.read_bytes()) for file in directory.iterdir())
    assert [name for name in load_schema_files() if not any(one in found for one in single_objects(name).headers)] == []


@pytest.mark.parametrize("file", RECORD_FILES, ids=_name)
def test_each_record_means_what_it_meant(file: Path) -> None:
    """A reader may know more fields than the writer; those that were written have their values."""
    for kind, (key, value, meant) in read_records(file).items():
        assert _lacking(meant, msgpack.unpackb(msgpack.packb(plain(READERS[kind](key, value))))) is None, kind


def _lacking(old: Any, new: Any) -> Any:
    """The first part of an old value that a new one has differently."""
    if isinstance(old, dict) and isinstance(new, dict):
        return next((key for key in old if key not in new or _lacking(old[key], new[key]) is not None), None)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next((pair for pair in zip(old, new, strict=True) if _lacking(*pair) is not None), None)
    return None if old == new else (old, new)


def test_each_retained_checkpoint_is_read(written: Written) -> None:
    """The reader finds every checkpoint that the topic has, with its input offsets and its state."""
    servers, truths = written
    by_id = {(truth.task, truth.checkpoint_id): truth for truth in truths}
    seen = 0
    with JobReader(servers.on_disk(servers.config, "reader"), services=servers.services) as reader:
        for record in reader.records().values():
            for checkpoint in record.checkpoints:
                truth = by_id[record.task, str(checkpoint.checkpoint_id)]
                assert checkpoint.input_offsets == truth.inputs
                seen += 1
                for store, content in truth.stores.items():
                    with reader.open_store(record.task, store, truth.checkpoint_id) as opened:
                        assert dict(opened.scan(None, None)) == content
        assert seen >= len(_newest(truths))
        reader.permits(), reader.offers(), reader.replaced(), [*reader.history()]


def test_each_backend_restores_and_the_job_goes_on(written: Written) -> None:
    """A task opens from each backend alone with an empty disk, commits, and opens again."""
    servers, truths = written
    for number, backend in enumerate(sorted(_backends(servers))):
        config = _changed(servers, backend, task__restore__factories=[backend])
        with StateManager(config, services=servers.services) as manager:
            for name, truth in _newest(truths).items():
                with manager.open_task(name) as task:
                    later = {b"later": b"%d" % (number - 1)} if number else {}
                    assert _content(task, truth) == {name: {**has, **later} for name, has in truth.stores.items()}
                    for store in truth.stores:
                        task.store(store).put(b"later", b"%d" % number)
                    task.commit(truth.inputs)


def test_backends_and_blobs_are_verified(written: Written) -> None:
    """Both backends have the same content, and every blob is there with its hash."""
    servers, _ = written
    config = servers.on_disk(servers.config, "verify")
    with closing(servers.services(config)) as services, closing(CheckpointTopic(config, services.clock)) as log:
        if BLOBS in _backends(servers):
            found = verify_blobs(services, log.read, (), 1.0, no_progress)
            assert found.read > 0
            assert (found.damaged, found.expiring, found.lost) == ([], [], [])
        if len(_backends(servers)) > 1:
            verifier = Verifier(services, submit_here(services), no_progress, processes=1, differences=3)
            for record in log.read().values():
                for store in record.current.stores:
                    wanted = StoreToVerify(record, record.current, store, (BLOBS, CHANGELOG))
                    assert verifier.verify(wanted).equal


def test_it_migrates_to_the_other_backend_and_back(written: Written) -> None:
    """A commit fills the backend that was missing, which restores the state alone, and then the other one again."""
    servers, truths = written
    first = sorted(_backends(servers))[0]
    other = CHANGELOG if first == BLOBS else BLOBS
    both, often = [first, other], ["16 commits"]
    for number, (backup, restore) in enumerate([(both, first), ([other], other), (both, other), ([first], first)]):
        config = _changed(
            servers, f"step-{number}", task__backup__factories=backup, task__restore__factories=[restore],
            task__commit__snapshot__interval=often, task__checkpoint__write__versions=[2],
        )  # fmt: skip
        with StateManager(config, services=servers.services) as manager:
            for name, truth in _newest(truths).items():
                with manager.open_task(name) as task:
                    assert _content(task, truth) == truth.stores, (backup, restore)
                    task.commit(truth.inputs)


def test_it_rolls_back(written: Written) -> None:
    """The oldest retained checkpoint of every task, or the layout before, becomes current again."""
    servers, truths = written
    config = servers.on_disk(servers.config, "operator")
    with (
        closing(servers.services(config)) as services,
        closing(CheckpointTopic(config, services.clock, owned=True)) as log,
    ):
        records = log.read()
        if log.retired():
            config = undo(services, log, servers.services, no_progress)[0].new_config
            expected = [truths[-3]]  # the last one before the two of the new layout
        else:
            oldest = str(records["Partition 0"].checkpoints[0].checkpoint_id)
            roll_back(services, log, JobTopics(services), Goal((oldest,), None))
            expected = [one for one in truths if one.checkpoint_id == oldest]
            assert [one.task for one in expected] == sorted(records)
    with StateManager(config, services=servers.services) as manager:
        for truth in expected:
            with manager.open_task(truth.task) as task:
                assert _content(task, truth) == truth.stores
