"""An adoption of Samza's snapshots that is killed with SIGKILL at every phase, or overtaken by another one.

Oracle: before the publish, the new job has no checkpoint and only blobs with a TTL, and one more run of the command
completes the adoption. After the publish, the new job has the old state, and its first opening removes the TTLs. The
old job's blobs are unchanged, and garbage collection deletes what the killed run left behind.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr import JobConfig
from statemgr.cli.main import cli
from statemgr.phases import Phase
from tests.blob_ages import names, time_passes
from tests.commits import check_blobs, referenced
from tests.old_jobs import Adopter, state
from tests.operations.adopt.test_killed import standing, start
from tests.operations.adopt.test_samza import blob_files, snapshot_rows
from tests.peers.samza import BLOBS, SamzaJob
from tests.servers import KafkaServer

#: The phases at which the process dies, each with the occurrence that kills it. The TTLs are removed after the publish,
#: or, of blobs that are adopted in place, before it.
STEPS = [
    pytest.param(phase, number, marks=mark, id=f"{phase.value}-{number}")
    for phase, number, mark in (
        (Phase.FENCE, 1, pytest.mark.heavy),
        (Phase.UPLOAD, 1, pytest.mark.heavy),
        (Phase.PUT_INDEX, 2, pytest.mark.heavy),
        (Phase.READ_TOPIC, 1, pytest.mark.heavy),
        (Phase.SEND_CHECKPOINT, 1, pytest.mark.heavy),
        (Phase.COMMIT_TRANSACTION, 1, pytest.mark.long),
        (Phase.ACKNOWLEDGED, 1, pytest.mark.heavy),
        (Phase.REMOVE_TTL, 1, pytest.mark.heavy),
        (Phase.REMOVE_TTL, 2, pytest.mark.long),
    )
]


@pytest.fixture(scope="module")
def samza(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> SamzaJob:
    """Run a Samza job, which every test adopts again for a different new job."""
    job = SamzaJob(kafka, tmp_path_factory.mktemp("samza"), 2, backends=(BLOBS,))
    job.run(job.send(snapshot_rows()))
    return job


@pytest.mark.parametrize("in_place", [False, True], ids=["uploaded", "in-place"])
@pytest.mark.parametrize(("phase", "number"), STEPS)
def test_killed_while_snapshots_are_adopted(
    samza: SamzaJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, number: int, in_place: bool
) -> None:
    """After a kill at any phase, one more run completes the adoption."""
    adoption = Adoption.of(samza, tmp_path, monkeypatch, in_place=in_place)
    child = adoption.start("SIGKILL", phase, number)
    said, _ = child.communicate(timeout=600)
    assert child.returncode == -signal.SIGKILL, said
    published = phase is Phase.ACKNOWLEDGED or (phase is Phase.REMOVE_TTL and not in_place)
    assert ("already adopted" in adoption.run()) is published
    adoption.check(monkeypatch)


@pytest.mark.heavy
@pytest.mark.parametrize("in_place", [False, True], ids=["uploaded", "in-place"])
@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (Phase.PUT_INDEX, "already adopted"),
        (Phase.COMMIT_TRANSACTION, "FencedError"),
        (Phase.ACKNOWLEDGED, "adopted: checkpoint"),
    ],
)
def test_two_operators_adopt_snapshots(
    samza: SamzaJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase, said: str, in_place: bool
) -> None:
    """A second run, with a directory of another machine, overtakes one that is stopped and then goes on."""
    adoption = Adoption.of(samza, tmp_path, monkeypatch, in_place=in_place)
    with standing(adoption.start("SIGSTOP", phase, 1, "--set", f"state.dir={tmp_path / 'machine'}")) as first:
        adoption.run()
    output, _ = first.communicate(timeout=120)
    assert said in output, output
    adoption.check(monkeypatch)


@dataclass
class Adoption:
    """An adoption of the job's snapshots, in place of a copy of the blobs or with an upload."""

    samza: SamzaJob
    adopter: Adopter
    config: JobConfig
    how: list[str]
    blobs: Path
    before: dict[str, bytes]

    @classmethod
    def of(cls, samza: SamzaJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_place: bool) -> Adoption:
        """Copy the blobs of the job, and write the configuration."""
        monkeypatch.setattr(samza, "directory", tmp_path)
        blobs = Path(shutil.copytree(samza.blobs, tmp_path / "samza-blobs"))
        adopter = samza.adopter("--blobs", blobs.as_uri())
        topic = f"task.checkpoint.topic={samza.kafka.fresh_name('checkpoints')}"
        if in_place:
            how, config = ["--in-place"], adopter.init(samza.name, "--in-place", "--set", topic)
        else:
            uri = f"blob.store.uri={(tmp_path / 'blobs').as_uri()}"
            how, config = [], adopter.init(f"{samza.name}-new", "--set", uri, "--set", topic)
        return cls(samza, adopter, config, how, blobs, blob_files(blobs))

    def start(self, strike: str, phase: Phase, number: int, *more: str) -> subprocess.Popen[str]:
        """Start the command in a process that strikes itself."""
        return start(self.adopter, self.how, strike, phase, number, *more)

    def run(self) -> str:
        """Run the command to its end."""
        return self.adopter.run("--write", *self.how)

    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check the state of the new job, its blobs, those of the old job, and garbage collection."""
        offsets = [{f"{self.samza.topic}-{n}": 3000} for n in (0, 1)]
        assert state(self.config) == ([{"counts": of} for of in self.samza.expected], offsets)
        check_blobs(self.config)
        assert self.before.items() <= blob_files(self.blobs).items()
        time_passes(monkeypatch)
        collected = CliRunner().invoke(cli, ["gc", "--config", str(self.adopter.file), "--write"])
        assert collected.exit_code == 0, collected.output
        needed = set().union(*(referenced(self.config, f"Partition {n}") for n in (0, 1)))
        assert names(self.config) == needed
        assert self.how or blob_files(self.blobs) == self.before
        there = JobConfig.from_mapping(self.config.to_mapping(), {"state.dir": str(self.samza.directory / "there")})
        assert state(there)[0] == [{"counts": of} for of in self.samza.expected]
