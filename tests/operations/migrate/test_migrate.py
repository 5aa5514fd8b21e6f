"""``statemgr migrate``: status, plan, advance and rollback of a real job, stage by stage."""

from __future__ import annotations

import codecs
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.errors import RetryableError
from statemgr.model.jobs.stages import Stage, Step
from statemgr.operations.migrate.preconditions import check_again
from statemgr.phases import Phase, observed
from tests.commits import blob_files, commit, current, totals
from tests.jobs import DUAL, SEGMENTS, job_mapping, with_changes
from tests.kafka_jobs import committed, delete_records, recreate, state_of
from tests.servers import KafkaServer, S3Server

CHANGELOG, BLOBS = "kafka-changelog", "blob-store"
STAGES = {
    1: ([CHANGELOG], [CHANGELOG]),
    2: (list(DUAL), [CHANGELOG]),
    3: (list(DUAL), [BLOBS, CHANGELOG]),
    4: ([BLOBS], [BLOBS]),
}
ROWS: dict[bytes, bytes | None] = {f"key-{number:03}".encode(): b"v%d" % number for number in range(100)}

_TOML = """\
# The totals of all orders.
[job]
name = "{name}"          # never changes
tasks = {tasks}

[task]
# both lists change in a migration
backup.factories = {backup}
restore.factories = {restore}
commit.snapshot.interval = ["50 commits"]

[stores.totals]
value.serde = "bytes"

[blob.store]
{blobs}

[kafka]
bootstrap.servers = "{servers}"   # the test's

[state]
dir = "{state}"
"""


class Job:
    """A job with a file that the commands change. Every commit reads the file, as a restart does."""

    def __init__(
        self, kafka: KafkaServer, directory: Path, stage: int, tasks: int = 1, s3: S3Server | None = None
    ) -> None:
        mapping = job_mapping(kafka, directory, kind=SEGMENTS, s3=s3)
        blobs = {
            key.removeprefix("blob.store."): value for key, value in mapping.items() if key.startswith("blob.store.")
        }
        backup, restore = STAGES[stage]
        self.file = directory / "job.toml"
        self.directory = directory
        self.tasks = tasks
        self.file.write_text(
            _TOML.format(
                name=mapping["job.name"],
                tasks=tasks,
                backup=json.dumps(backup),
                restore=json.dumps(restore),
                blobs="\n".join(f"{key} = {json.dumps(value)}" for key, value in blobs.items()),
                servers=kafka.bootstrap_servers,
                state=directory / "state",
            )
        )

    @property
    def config(self) -> JobConfig:
        return JobConfig.from_file(self.file)

    def commit(self, offset: int, items: dict[bytes, bytes | None] = ROWS) -> None:
        """Restart the job: every task opens, writes and commits."""
        for number in range(self.tasks):
            commit(self.config, items, {f"orders-{number}": offset}, f"Partition {number}")

    def set_stage(self, stage: int) -> None:
        """Edit the file by hand."""
        text = self.file.read_text().splitlines()
        for name, value in zip(("backup", "restore"), STAGES[stage], strict=True):
            text = [
                f"{name}.factories = {json.dumps(value)}" if line.startswith(f"{name}.f") else line for line in text
            ]
        self.file.write_text("\n".join(text) + "\n")

    def run(self, *arguments: str) -> Result:
        command = ["migrate", arguments[0], "--config", str(self.file), *arguments[1:]]
        return CliRunner().invoke(cli, command, catch_exceptions=False)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def unmet(self, *arguments: str) -> list[str]:
        """Return the names of the unmet preconditions. If there are any, the file stays and the exit status is 1."""
        before = self.file.read_text()
        result = self.run(*arguments, "--json")
        assert result.stdout, result.stderr
        names = [one["name"] for one in json.loads(result.stdout)["preconditions"] if not one["met"]]
        assert result.exit_code == (1 if names else 0)
        if names:
            assert self.file.read_text() == before
        return names


def test_a_job_moves_through_all_stages_and_back(kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """A47, A48: the commands move a job 1 → 2 → 3 → 4 → 3 → 2 → 1, with a restart after each, and no state is lost."""
    job = Job(kafka, tmp_path, stage=1, tasks=2, s3=s3)
    expected = {key: value for key, value in ROWS.items() if value is not None}
    job.commit(1)
    for number, (command, stage) in enumerate(
        [("advance", 2), ("advance", 3), ("advance", 4), ("rollback", 3), ("rollback", 2), ("rollback", 1)], 2
    ):
        moved = job.json(command, "--write")
        assert (moved["next"], moved["ready"], moved["written"]) == (stage, True, True), moved
        items: dict[bytes, bytes | None] = {b"step": b"%d" % number, b"key-%03d" % number: None}
        job.commit(number, items)
        expected[b"step"] = b"%d" % number
        del expected[b"key-%03d" % number]
        waited = job.run(command, "--wait", "--timeout", "0")
        assert waited.exit_code == 0
        assert f"all 2 stores have committed in stage {stage}" in waited.output
        status = job.json("status")
        assert [(one["stage"], one["configured"], one["missing"]) for one in status] == [(stage, stage, [])] * 2
        for factory in STAGES[stage][0]:
            assert set(map(str, totals(job.config, factory).values())) == {str(dict(sorted(expected.items())))}
        if stage in (2, 3):
            assert job.run("verify").exit_code == 0
    assert "nothing to do" in job.run("rollback").stdout


def test_the_file_keeps_its_comments_and_the_old_one_is_saved(kafka: KafkaServer, tmp_path: Path) -> None:
    """Only the lists of factories change, and another file has the old text. Without --write nothing changes. A trial
    upload does not make the directory of the blobs: its disk may not be mounted."""
    job, blobs = Job(kafka, tmp_path, stage=1), tmp_path / "blobs"
    job.commit(1)
    old = job.file.read_text()
    plan = job.json("plan")
    assert (plan["stage"], plan["next"], plan["ready"]) == (1, 2, True)
    assert plan["bytes"] > 100 * 8
    assert (plan["seconds"], blobs.exists()) == (None, False)
    (blobs / "of-another-job").mkdir(parents=True)
    assert job.json("plan")["seconds"] > 0
    assert '+backup.factories = ["kafka-changelog", "blob-store"]' in plan["diff"]
    assert job.json("advance")["written"] is False
    assert job.file.read_text() == old
    job.file.chmod(0o640)
    saved = Path(job.json("advance", "--write")["saved_as"])
    assert saved.read_text() == old
    assert job.file.stat().st_mode & 0o777 == saved.stat().st_mode & 0o777 == 0o640
    changed = [line for line in job.file.read_text().splitlines() if line not in old.splitlines()]
    assert changed == ['backup.factories = ["kafka-changelog", "blob-store"]']
    again = job.json("advance", "--write")
    assert (again["next"], again["written"], again["saved_as"]) == (2, True, None), "the job was not restarted yet"


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "byte order mark"])
def test_a_file_of_windows_keeps_its_bytes(kafka: KafkaServer, tmp_path: Path, mark: bytes) -> None:
    """Line endings, a byte order mark and lists over several lines stay as they are; the old file is saved."""
    job = Job(kafka, tmp_path, stage=1)
    text = job.file.read_text().replace(
        'restore.factories = ["kafka-changelog"]', 'restore.factories = [\n  "kafka-changelog",  # the topics\n]'
    )
    old = mark + text.replace("\n", "\r\n").encode()
    job.file.write_bytes(old)
    job.commit(1)
    saved = Path(job.json("advance", "--write")["saved_as"])
    assert saved.read_bytes() == old
    one = b'backup.factories = ["kafka-changelog"]'
    assert job.file.read_bytes() == old.replace(one, one[:-1] + b', "blob-store"]')


@pytest.mark.long
def test_status_for_people_fits_on_a_screen(kafka: KafkaServer, tmp_path: Path) -> None:
    """Tasks in the same stage share one line, and a task in another stage has its own."""
    job = Job(kafka, tmp_path, stage=1, tasks=20)
    job.commit(1)
    job.set_stage(2)
    commit(job.config, {}, {"orders-7": 2}, "Partition 7")
    shown = job.run("status").stdout
    assert len(shown.splitlines()) == 4
    assert "0-6, 8-19" in shown
    assert "1, configured 2" in shown
    assert "restart the job" in shown
    one = job.json("status", "--task", "7")[0]
    assert (one["stage"], one["missing"]) == (2, [])
    assert set(one["backends"]) == {CHANGELOG, BLOBS}
    assert all(held["behind"] == 0 and held["bytes"] > 0 for held in one["backends"].values())
    assert one["owner"]["epoch"] == current(job.config, "Partition 7").current.epoch  # type: ignore[union-attr]


def test_a_plan_names_what_is_not_met(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan reports a task that lost its checkpoint, a missing blob and a leftover TTL. It also shows that some
    tasks have not reached the stage in the file. A task that never had input is no reason to wait."""
    job = Job(kafka, tmp_path, stage=1, tasks=2)
    commit(job.config, ROWS, {"orders-0": 1})
    assert job.unmet("plan") == []
    commit(job.config, ROWS, {"orders-1": 1}, "Partition 1")
    text = job.file.read_text()
    job.file.write_text(text.replace("[task]", f'[task]\ncheckpoint.topic = "{kafka.fresh_name("other")}"'))
    commit(job.config, ROWS, {"orders-0": 1}, allow_empty_start=True, overwrite_changelog=True)
    assert job.unmet("advance", "--write") == ["checkpoints"]
    job.file.write_text(text)
    commit(job.config, ROWS, {"orders-0": 1}, overwrite_changelog=True)
    job.set_stage(2)
    commit(job.config, ROWS, {"orders-0": 2})
    waiting = job.json("plan")
    assert (waiting["stage"], waiting["next"], waiting["written"]) == (1, 2, True)
    job.commit(3)
    assert job.unmet("plan") == []
    blob = next(tmp_path / "blobs" / name for name in sorted(blob_files(tmp_path)) if name.endswith("index"))
    content = blob.read_bytes()
    blob.unlink()
    assert set(job.unmet("advance", "--write", "--trials", "2")) == {"blobs", "restore of Partition 0 from blob-store"}
    blob.write_bytes(content)
    expires = blob.with_name(f".{blob.name}.expires")
    expires.write_text(str(2**42))
    # the plan expects only the blobs of finished commits to have no TTL
    job.file.write_text(job.file.read_text().replace("[task]", "[task]\ncommit.timeout.ms = 1000"))
    time.sleep(1.5)
    assert job.unmet("plan") == ["blobs"]


def test_a_plan_without_a_blob_store(kafka: KafkaServer, tmp_path: Path) -> None:
    """Without a blob store there is nothing to upload to. The plan reports it, and the file stays as it is."""
    job = Job(kafka, tmp_path, stage=1)
    job.file.write_text(job.file.read_text().replace("uri = ", "#uri = "))
    job.commit(1)
    assert job.unmet("advance", "--write") == ["configuration", "blob store"]


def test_a_changelog_of_another_job_is_found_before_the_restart(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 48: a mistyped topic is an unmet precondition, for advance and for rollback, until the user permits it."""
    (tmp_path / "theirs").mkdir()
    theirs = Job(kafka, tmp_path / "theirs", stage=1)
    theirs.commit(1)
    topic = theirs.config.stores["totals"].changelog_topic
    before = committed(theirs.config, topic)
    job = Job(kafka, tmp_path, stage=1)
    job.commit(1)
    text = job.file.read_text()
    mistyped = "[stores.totals]\n" + f'changelog.topic = "{topic}"'
    job.file.write_text(text.replace("[stores.totals]", mistyped))
    assert job.unmet("advance", "--write") == ["changelogs"]
    job.file.write_text(text)
    for stage in (3, 4):
        job.set_stage(stage)
        job.commit(stage)
    job.file.write_text(job.file.read_text().replace("[stores.totals]", mistyped))
    assert job.unmet("rollback", "--write") == ["changelogs"]
    assert committed(theirs.config, topic) == before
    permit = ["permit", "--config", str(job.file), "--overwrite-changelog"]
    assert CliRunner().invoke(cli, permit, catch_exceptions=False).exit_code == 0
    assert job.json("rollback", "--write")["written"]
    assert state_of(committed(theirs.config, topic)) == totals(job.config, BLOBS)["Partition 0"]


def test_a_stage_that_was_left_by_hand(kafka: KafkaServer, tmp_path: Path) -> None:
    """The file moved from stage 4 to stage 1 by hand. No command says that there is nothing to do, or that a restart is
    enough; each command says how to continue."""
    job = Job(kafka, tmp_path, stage=3)
    job.commit(1)
    job.set_stage(4)
    job.commit(2)
    job.set_stage(1)
    advance = job.run("advance")
    assert advance.exit_code == 2
    assert "asks for stage 1" in advance.stderr
    assert "statemgr migrate rollback" in advance.stderr
    back = job.run("rollback", "--write")
    assert back.exit_code == 1
    assert "before you restart" in back.stdout
    assert "add blob-store to task.restore.factories" in back.stdout
    job.set_stage(3)
    assert job.unmet("rollback") == []
    job.commit(3)
    assert job.run("verify").exit_code == 0


def test_tasks_in_two_stages(kafka: KafkaServer, tmp_path: Path) -> None:
    """One task has not restarted yet, so the next step is the one in progress."""
    job = Job(kafka, tmp_path, stage=2, tasks=2)
    job.commit(1)
    job.set_stage(1)
    commit(job.config, {b"a": b"1"}, {"orders-1": 2}, "Partition 1")
    job.set_stage(2)
    assert job.unmet("plan", "--trials", "0") == []  # the file already says stage 2, and one task is in it
    waiting = job.json("plan")
    assert (waiting["stage"], waiting["next"], waiting["written"]) == (1, 2, True)
    shown = job.json("status")
    assert [(one["stage"], one["configured"]) for one in shown] == [(2, 2), (1, 2)]


def test_one_store_moves_alone(kafka: KafkaServer, tmp_path: Path) -> None:
    """A46: --store writes keys of that store, and the other stores stay in their stage."""
    job = Job(kafka, tmp_path, stage=1)
    job.file.write_text(job.file.read_text() + '\n[stores.counts]\nvalue.serde = "bytes"\n')
    job.commit(1)
    assert job.json("advance", "--store", "counts", "--write")["written"]
    assert job.config.stores["counts"].backup_factories == DUAL
    assert job.config.stores["totals"].backup_factories == (CHANGELOG,)
    job.commit(2)
    assert {one["store"]: one["stage"] for one in job.json("status")} == {"counts": 2, "totals": 1}


def test_stores_in_different_stages(kafka: KafkaServer, tmp_path: Path) -> None:
    """One store was moved alone, two stages further. A step of all stores is refused: a restart would not help, so the
    refusal names the stores to move. The named command works."""
    job = Job(kafka, tmp_path, stage=1)
    job.file.write_text(
        job.file.read_text() + f'\n[stores.counts]\nvalue.serde = "bytes"\nbackup.factories = {json.dumps(DUAL)}\n'
        f"restore.factories = {json.dumps(STAGES[3][1])}\n"
    )
    job.commit(1)
    for command, store in (("advance", "totals"), ("rollback", "counts")):
        (refused,) = (one for one in job.json(command, "--trials", "0")["preconditions"] if not one["met"])
        assert refused["name"] == "stage"
        assert refused["fix"].endswith(f"`statemgr migrate {command} --store {store}`")
        assert "restart" not in refused["fix"]
        assert job.json(command, "--trials", "0", "--store", store)["ready"]
    assert job.json("advance", "--store", "totals", "--write")["written"]
    (waiting,) = (one for one in job.json("advance", "--trials", "0")["preconditions"] if not one["met"])
    assert waiting["fix"].endswith("`statemgr migrate advance --store totals`"), "which says to restart"


def test_advance_waits_until_every_task_has_committed(kafka: KafkaServer, tmp_path: Path) -> None:
    """The restart happens while the command waits. Without a restart, the command times out with exit status 3."""
    job = Job(kafka, tmp_path, stage=1, tasks=2)
    job.commit(1)
    late = job.run("advance", "--write", "--wait", "--timeout", "1")
    assert late.exit_code == 3
    assert "hint: restart the job with the new configuration" in late.stderr
    restart = threading.Timer(1.0, lambda: job.commit(2))
    restart.start()
    waited = job.run("advance", "--wait", "--timeout", "60")
    restart.join()
    assert waited.exit_code == 0
    assert {one["stage"] for one in job.json("advance", "--wait")} == {2}
    assert [one["stage"] for one in job.json("status")] == [2, 2]


def test_waiting_for_no_store_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    """A mistyped name, or a job that uses other backends, would have nothing to wait for."""
    job = Job(kafka, tmp_path, stage=1)
    job.commit(1)
    mistyped = job.run("advance", "--wait", "--store", "total")
    assert mistyped.exit_code == 2
    assert "the job has no store 'total'" in mistyped.stderr
    assert job.run("plan", "--trials", "-1").exit_code == 2


_KILLED = """
import os, signal, sys
from statemgr.cli.main import cli
from statemgr.phases import Phase, add_observer
seen = []
def die(phase, subject):
    if phase is Phase(sys.argv[1]):
        seen.append(subject)
        if len(seen) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
add_observer(die)
cli.main(["migrate", "rollback", "--config", sys.argv[3], "--write"])
"""


@pytest.mark.crash
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param("publish.send-checkpoint", 2, marks=pytest.mark.long),
        ("publish.commit-transaction", 1),
        pytest.param("publish.commit-transaction", 3, marks=pytest.mark.long),
    ],
)
def test_a_rollback_from_stage_4_goes_on_after_a_kill(
    kafka: KafkaServer, tmp_path: Path, phase: str, number: int
) -> None:
    """Protocol 5: a second run completes a killed rollback. The changelogs hold the complete state again, and none of
    the keys that were deleted in stage 4."""
    job = Job(kafka, tmp_path, stage=3, tasks=3)
    job.commit(1)
    job.set_stage(4)
    job.commit(2, {b"key-000": None, b"new": b"1"})
    old = job.file.read_text()
    child = subprocess.run(
        [sys.executable, "-c", _KILLED, phase, str(number), str(job.file)], check=False, timeout=600, cwd=tmp_path
    )
    assert child.returncode == -signal.SIGKILL
    assert job.file.read_text() == old
    moved = job.json("rollback", "--write")
    assert (moved["stage"], moved["next"], moved["written"]) == (4, 3, True), moved
    expected = {**{key: value for key, value in ROWS.items() if key != b"key-000"}, b"new": b"1"}
    topic = job.config.stores["totals"].changelog_topic
    for partition in range(3):
        assert state_of(committed(job.config, topic, partition)) == expected
        record = current(job.config, f"Partition {partition}")
        assert record is not None
        assert record.current.input_offsets == {f"orders-{partition}": 2}
    assert job.run("verify").exit_code == 0
    assert [one["stage"] for one in job.json("status")] == [3, 3, 3]
    job.commit(3, {b"more": b"1"})
    assert job.run("verify").exit_code == 0


@pytest.mark.long
def test_a_rollback_from_stage_4_while_somebody_starts_the_job_again(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 61: a task that the rollback has finished commits again in stage 4, without its changelog. The command
    fails, and a second run succeeds."""
    job = Job(kafka, tmp_path, stage=3, tasks=2)
    job.commit(1)
    job.set_stage(4)
    job.commit(2)
    config, restarts = job.config, [b"late"]

    def restart(phase: Phase, subject: str) -> None:
        if phase is Phase.ACKNOWLEDGED and subject == "Partition 0" and restarts:
            key = restarts.pop()
            thread = threading.Thread(target=commit, args=(config, {key: b"1"}, {"orders-0": 3}))
            thread.start()
            thread.join()

    old = job.file.read_text()
    with observed(restart):
        stopped = job.run("rollback", "--write")
    assert stopped.exit_code == 1
    assert "somebody still runs the job" in stopped.stderr
    assert job.file.read_text() == old
    assert job.json("rollback", "--write")["written"]
    assert [one["stage"] for one in job.json("status")] == [3, 3]
    assert job.run("verify").exit_code == 0
    assert totals(job.config, CHANGELOG)["Partition 0"] == {**ROWS, b"late": b"1"}


def test_a_changelog_that_has_lost_records_is_no_way_back(kafka: KafkaServer, tmp_path: Path) -> None:
    """The stage before restores from changelogs alone. The largest task is whole, so the trial restore succeeds. The
    job, started again in its stage, writes the state to the changelog once more."""
    job = Job(kafka, tmp_path, stage=3, tasks=2)
    commit(job.config, {b"small": b"1"}, 1)
    commit(job.config, ROWS, {"orders-1": 1}, "Partition 1")
    delete_records(job.config, job.config.stores["totals"].changelog_topic, 1)
    assert job.unmet("rollback", "--write") == ["restore"]
    assert "the changelog of Partition 0 / totals has lost state" in job.run("rollback").output
    with pytest.raises(RetryableError, match="has lost state") as raised:  # if it happens during the checks
        check_again(job.config, Step(Stage.BLOBS_FIRST, Stage.DUAL_COMMIT, written=False), ["totals"])
    assert "somebody has committed" not in raised.value.message
    assert "start the job as it is configured" in str(raised.value.hint)
    commit(job.config, {b"small": b"2"}, 2)
    assert job.json("rollback", "--write")["written"]
    assert totals(job.config, CHANGELOG)["Partition 0"] == {b"small": b"2"}


def test_a_process_with_an_older_configuration_commits_during_the_checks(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 61: the next stage restores from changelogs, which that commit does not feed. The file stays as it is."""
    job = Job(kafka, tmp_path, stage=4)
    older = job.config
    job.set_stage(3)
    job.commit(1)
    old, begins = job.file.read_text(), [{b"late": b"1"}]

    def take_over(phase: Phase, subject: str) -> None:
        if begins:  # the trial restore has begun
            thread = threading.Thread(target=commit, args=(older, begins.pop(), 2))
            thread.start()
            thread.join()

    with observed(take_over):
        stopped = job.run("rollback", "--write")
    assert stopped.exit_code == 3
    assert "no backend of the next restore list has Partition 0 / totals" in stopped.stderr
    assert "restart every process of the job" in stopped.stderr
    assert job.file.read_text() == old


def test_status_and_a_changelog_that_was_created_again(kafka: KafkaServer, tmp_path: Path) -> None:
    """`migrate status` reports that the changelog was deleted and created again."""
    job = Job(kafka, tmp_path, stage=2)
    job.commit(1)
    recreate(job.config, job.config.stores["totals"].changelog_topic)
    held = job.json("status")[0]["backends"]
    assert "was deleted and created again" in held[CHANGELOG]["problem"]
    assert held[BLOBS]["problem"] is None


def test_a_rollback_from_stage_4_into_a_new_topic(kafka: KafkaServer, tmp_path: Path) -> None:
    """The changelog was deleted, since nobody needed it any more. The rollback fills the new topic. The job's port for
    metrics is taken."""
    job = Job(kafka, tmp_path, stage=3)
    job.commit(1)
    job.set_stage(4)
    job.commit(2, {b"new": b"1"})
    recreate(with_changes(job.config, task__backup__factories=list(DUAL)), job.config.stores["totals"].changelog_topic)
    with socket.create_server(("", 0)) as taken:
        job.file.write_text(f"metrics.port = {taken.getsockname()[1]}\n{job.file.read_text()}")
        assert job.json("rollback", "--write")["written"]
    assert job.run("verify", "--against", "raw-topic").exit_code == 0


def test_a_rollback_from_stage_4_after_tasks_have_gone_back_together(kafka: KafkaServer, tmp_path: Path) -> None:
    """They share a checkpoint, as on Spark, but another task never had input, and has none."""
    job = Job(kafka, tmp_path, stage=4, tasks=3)
    for number, task in enumerate(("Partition 0", "Partition 1")):
        commit(job.config, ROWS, {f"orders-{number}": 1}, task)
    back = ["checkpoints", "rollback", "--before", "2099-01-01", "--write", "--config", str(job.file)]
    assert CliRunner().invoke(cli, back, catch_exceptions=False).exit_code == 0
    assert len({current(job.config, task).current.checkpoint_id for task in ("Partition 0", "Partition 1")}) == 1  # type: ignore[union-attr]
    assert job.json("rollback", "--write")["written"]
    assert totals(job.config, CHANGELOG) == {"Partition 0": ROWS, "Partition 1": ROWS}


def test_a_rollback_of_a_job_that_is_published_as_a_whole(kafka: KafkaServer, tmp_path: Path) -> None:
    """As on Spark: the rollback keeps the micro-batch, so that the query continues where it was. If another driver
    takes the job over meanwhile, the command says so."""
    from statemgr.model.checkpoint import MicroBatch
    from statemgr.operations.migrate import rebuild
    from statemgr.reader import JobReader
    from tests.commits import attempt

    job = Job(kafka, tmp_path, stage=4, tasks=2)
    batch = MicroBatch("query", 1, "{}", '{"a": 1}')
    with StateManager(job.config, "spark-hash") as manager:
        epoch = manager.acquire()
        names = [f"Partition {number}" for number in range(2)]
        manager.publish([attempt(job.config, epoch, name, ROWS, 1) for name in names], batch)

    def taken_over(*arguments: Any, **more: Any) -> JobReader:
        again.undo()
        with StateManager(job.config, "spark-hash") as newer:
            epoch = newer.acquire()
            newer.publish([attempt(job.config, epoch, name, ROWS, 1) for name in names], batch)
        return JobReader(*arguments, **more)

    with pytest.MonkeyPatch.context() as again:
        again.setattr(rebuild, "JobReader", taken_over)
        stopped = job.run("rollback", "--write")
    assert stopped.exit_code == 1
    assert "has published checkpoint" in stopped.stderr
    assert job.json("rollback", "--write")["written"]
    for name in names:
        record = current(job.config, name)
        assert record is not None
        assert record.current.batch == batch
        assert set(record.current.state_checkpoint_markers) == {CHANGELOG, BLOBS}
    assert job.run("verify").exit_code == 0
    with StateManager(job.config, "spark-hash") as manager:
        epoch = manager.acquire()
        manager.publish([attempt(job.config, epoch, name, {b"a": b"1"}, 2) for name in names], batch)
