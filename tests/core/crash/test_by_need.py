"""A state that is read by need, whose process is killed at every step, or meets the limits of its machine."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.backends.blobs import snapshots
from statemgr.errors import DiskFull, StatemgrError
from statemgr.local.transfer_files import NewFile
from statemgr.model.checkpoint import BlobMarker
from statemgr.model.hashing import content_hash
from statemgr.wiring import open_services
from tests.by_need import ROCKSDB, State, check, index_of, key, large_state, partial_state, publish
from tests.segment_tasks import config_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[JobConfig, BlobMarker, State]:
    """A small state of several tables, which have several parts each."""
    monkeypatch.setattr(snapshots, "_LARGE", 8 * 1024)
    config = config_of(tmp_path, **ROCKSDB, blob__store__part__size=64 * 1024, blob__store__parallelism=2)
    config, marker, state = publish(config, large_state(1))
    assert isinstance(marker, BlobMarker)
    return config, marker, state


def check_whole(config: JobConfig, marker: BlobMarker, state: State, here: Path, left: list[Path]) -> None:
    """Check that the next opening is exact, and that each file is what the index says when all of it is here."""
    services = open_services(config)
    hashes = {file.name: file.hash for file in index_of(services, marker).root.files if file.tail is not None}
    services.close()
    with partial_state(config, marker, here, left) as partial:
        check(partial.store, state)  # type: ignore[arg-type]
        partial.fetch_rest(lambda: None)
        check(partial.store, state)  # type: ignore[arg-type]
        for name, wanted in hashes.items():
            assert content_hash((here / "parts" / name).read_bytes()) == wanted


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.heavy)])
def test_killed_at_each_step(published: tuple[JobConfig, BlobMarker, State], tmp_path: Path, every: int) -> None:
    """Each process takes over what the killed one before it has left."""
    config, marker, state = published
    assert marker.inline is not None
    left: list[Path] = []
    for step in count(1, every):
        here = tmp_path / str(step)
        here.mkdir()
        order = {"config": config.to_mapping(), "marker": marker.inline.hex(), "die_at": step, "here": str(here)}
        order["left"] = [str(one) for one in left]
        command = [sys.executable, "-m", "tests.core.crash.by_need_child", json.dumps(order)]
        child = subprocess.run(command, cwd=ROOT, timeout=600)
        left += [here / "parts"] if (here / "parts").exists() else []
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL
        check_whole(
            config, marker, state, tmp_path / f"{step}-fresh", [_copied(one, tmp_path / f"{step}-left") for one in left]
        )
    assert step > 1


def _copied(directory: Path, target: Path) -> Path:
    """What a killed process has left, for another one."""
    subprocess.run(["cp", "-r", "--sparse=always", str(directory), str(target)], check=True)
    return target


def test_the_disk_is_full(
    published: tuple[JobConfig, BlobMarker, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and the rest fail with DiskFull while nothing can be written, and succeed when there is space again."""
    config, marker, state = published
    write, source = NewFile.write, random.Random(2)

    def full(self: NewFile, fd: int, offset: int, data: memoryview) -> None:
        if source.random() < 0.5:
            raise OSError(28, "No space left on device")
        write(self, fd, offset, data)

    with partial_state(config, marker, tmp_path / "here") as partial:
        monkeypatch.setattr(NewFile, "write", full)
        failures = 0
        for number in range(0, 24_000, 97):
            try:
                assert partial.store.get(key(number)) == state.get(key(number))
            except DiskFull:
                failures += 1
        with pytest.raises(DiskFull):
            partial.fetch_rest(lambda: None)
        monkeypatch.setattr(NewFile, "write", write)
        assert failures
        partial.fetch_rest(lambda: None)
        check(partial.store, state)  # type: ignore[arg-type]


def test_no_descriptor_is_left(published: tuple[JobConfig, BlobMarker, State], tmp_path: Path) -> None:
    """Reads fail with a typed error, and the same reads succeed later."""
    config, marker, state = published
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with partial_state(config, marker, tmp_path / "here") as partial:
        failures = 0
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
            for number in range(0, 24_000, 97):
                try:
                    assert partial.store.get(key(number)) == state.get(key(number))
                except StatemgrError:
                    failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert failures
        check(partial.store, state)  # type: ignore[arg-type]
        partial.fetch_rest(lambda: None)
        check(partial.store, state)  # type: ignore[arg-type]
