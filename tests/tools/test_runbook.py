"""Each test causes a fault of the runbook for real, and the page of `statemgr ui` names the part at fault."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from click.testing import CliRunner

from statemgr import JobConfig, StateManager
from statemgr.cli.main import cli
from statemgr.engine import coordinator
from statemgr.errors import CorruptRecord, DiskFull, UnavailableError
from statemgr.health.problems import Fault
from statemgr.phases import Phase
from statemgr_tools.dev.process import free_port
from statemgr_tools.dev.s3 import S3Server as OwnS3
from tests.commits import TASK, current, failing, referenced, write
from tests.jobs import SEGMENTS, SNAPSHOTS, job_mapping
from tests.kafka_jobs import alter_topic, delete_records, send, wait_until
from tests.loop_members import ROOT, Process, make_topic, produce
from tests.secured import Right, SecuredKafka, documented
from tests.servers import KafkaServer, S3Server

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("runbook")]
INPUT, GROUP = "orders", "orders-group"
#: One problem on a page: the fault, the part at fault, and what was seen.
Line = tuple[str, str, str]


@dataclass
class Page:
    """The page of one job on the server of `statemgr ui`. ``number``: the job's place on the command line."""

    port: int
    number: int

    def ask(self, path: str = "", method: str = "GET", body: str | None = None) -> tuple[int, str]:
        """Return the status and body of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, f"/{self.number}/{path}", body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def lines(self) -> list[Line]:
        """Return the list of problems."""
        found = re.search(r"<caption>Problems</caption>.*?</table>", self.ask()[1])
        rows = re.findall(
            r'<tr><td><a href="/runbook#([a-z-]+)">.*?</td><td>(.*?)</td><td>(.*?)</td>', found[0] if found else ""
        )
        return [(fault, unescape(part), unescape(detail)) for fault, part, detail in rows]

    def names(self, fault: Fault, part: str, detail: str = "") -> Line:
        """Wait until the page lists a fault whose part contains ``part``, and whose observation contains ``detail``."""

        def fits(line: Line) -> bool:
            return line[0] == fault.value and part in line[1] and detail in line[2]

        seen = self._wait(lambda lines: any(map(fits, lines)))
        return next(filter(fits, seen))

    def is_fine(self) -> None:
        """Wait until the page lists no problem."""
        self._wait(lambda lines: not lines)

    def _wait(self, done: Callable[[list[Line]], bool]) -> list[Line]:
        end = time.monotonic() + 60
        while not done(seen := self.lines()):
            assert time.monotonic() < end, seen
            time.sleep(0.1)
        return seen

    def press(self, kind: str) -> None:
        """Press a button and wait for the end of its checks."""
        assert self.ask("run", "POST", urlencode({"kind": kind}))[0] == 303
        wait_until(lambda: "Running for" not in self.ask("blobs")[1] and "still run" not in self.ask()[1])


@dataclass
class Scene:
    """A broker, an S3 server, one process of a job on them, and the pages of `statemgr ui`.

    ``job`` has its blobs on S3, and ``denied`` is the same job with a user that has limited rights. ``files`` has its
    blobs in a directory, and no process.
    """

    kafka: SecuredKafka
    s3: OwnS3
    job: JobConfig
    files: JobConfig
    directory: Path
    disk: Path | None
    rights: list[Right]
    pages: dict[str, Page] = field(default_factory=dict)
    child: Process | None = None

    @property
    def server(self) -> KafkaServer:
        """The broker, for producers."""
        return KafkaServer(bootstrap_servers=self.kafka.broker.bootstrap_servers, kind="local")

    def produce(self, count: int) -> None:
        """Produce new messages."""
        produce(self.server, INPUT, 2, range(count))

    @contextmanager
    def process(self, **order: object) -> Iterator[Process]:
        """Run a process of the job while the block runs, in place of the one that ran before."""
        self.stop()
        log = self.directory / "member.log"
        self.child = Process.start(self.job, GROUP, INPUT, log, **order)
        yield self.child
        self.stop()

    def running(self) -> Process:
        """Return the process of the job. If none runs, start one that has nothing to do."""
        if self.child is None or self.child.child.poll() is not None:
            self.child = Process.start(self.job, GROUP, INPUT, self.directory / "member.log")
        return self.child

    def stop(self) -> None:
        """Stop the process."""
        if self.child is not None:
            self.child.child.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.child.child.communicate(timeout=20)
            self.child.kill()
            self.child = None


def toml(config: JobConfig, path: Path) -> str:
    """Write a configuration. Returns: the name of the file."""
    path.write_text("".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in config.to_mapping().items()))
    return str(path)


@contextmanager
def served(metrics: str, *files: str) -> Iterator[int]:
    """Run `statemgr ui` as a process. Yields: its port."""
    configs = [word for file in files for word in ("-c", file)]
    command = [sys.executable, "-m", "statemgr", "ui", *configs, "--metrics", metrics, "--port", "0"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline().strip().rstrip("/").rpartition(":")[2])
    finally:
        child.terminate()
        child.communicate(timeout=300)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Start everything once for all faults."""
    directory = tmp_path_factory.mktemp("runbook")
    s3 = OwnS3(directory=directory / "s3")
    with SecuredKafka(directory / "kafka") as kafka:
        try:
            s3.start()
            with small_disk(directory / "disk") as disk:
                yield from _scene(kafka, s3, directory, disk)
        finally:
            s3.stop()


@contextmanager
def small_disk(target: Path) -> Iterator[Path | None]:
    """Mount a file system of 128 MiB. Yields: its directory, or None if this user may not mount one."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    target.mkdir()
    command = [mount or "", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(target)]
    if None in (mount, umount) or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield target
    finally:
        subprocess.run([umount or "", "--lazy", str(target)], check=True)


def _scene(kafka: SecuredKafka, s3: OwnS3, directory: Path, disk: Path | None) -> Iterator[Scene]:
    server = KafkaServer(bootstrap_servers=kafka.broker.bootstrap_servers, kind="local")
    store = S3Server(
        endpoint=s3.endpoint, bucket=s3.bucket, region=s3.region, access_key=s3.access_key,
        secret_key=s3.secret_key, server=str(s3.kind), kind="local",
    )  # fmt: skip
    metrics_port = free_port()
    mapping = job_mapping(
        server, directory / "job", name="orders", tasks=2, s3=store, kind=SEGMENTS, task__commit__ms=500,
        task__inputs=[INPUT], metrics__port=metrics_port,
    )  # fmt: skip
    files = JobConfig.from_mapping(
        job_mapping(server, directory / "files", name="files", kind=SNAPSHOTS, task__checkpoint__retained=1)
    )
    make_topic(server, INPUT, 2)
    denied = JobConfig.from_mapping(mapping | kafka.settings)
    names = {"<job.name>": "orders", "<job.id>": "1", "<input topic>": INPUT, "<group>": GROUP}
    others = {"<bucket>": s3.bucket, "<prefix>": "x", "<old topic>": "old", "<old group>": "old"}
    rights = documented(names | others)
    kafka.allow(rights)
    scene = Scene(kafka, s3, JobConfig.from_mapping(mapping), files, directory, disk, rights)
    small = job_mapping(server, directory / "small", name="small", kind=SNAPSHOTS, state__dir=str(disk or directory))
    configs = {"job": scene.job, "files": files, "denied": denied, "small": JobConfig.from_mapping(small)}
    given = [toml(config, directory / f"{name}.toml") for name, config in configs.items()]
    try:
        with served(f"http://127.0.0.1:{metrics_port}/metrics", *given) as port:
            scene.pages = {name: Page(port, number) for number, name in enumerate(configs)}
            scene.running()
            scene.produce(100)
            wait_until(lambda: "<dd>2 of 2</dd>" in scene.pages["job"].ask()[1])
            scene.pages["job"].is_fine()
            yield scene
    finally:
        scene.stop()


# --- servers ----------------------------------------------------------------------------------------------------------


def test_broker_gone(scene: Scene) -> None:
    """The page names a killed broker by its address, and still shows what it read before."""
    scene.running()
    scene.kafka.broker.kill()
    try:
        scene.pages["job"].names(Fault.BROKER_GONE, scene.kafka.broker.bootstrap_servers)
        status, page = scene.pages["job"].ask()
        assert status in (200, 503)
        assert "Partition 0" in page, "what was read before is still shown"
    finally:
        scene.kafka.broker.start()
    scene.running()
    scene.pages["job"].is_fine()


def test_blob_store_gone(scene: Scene) -> None:
    """The page names an S3 server that does not answer by its bucket and endpoint."""
    scene.running()
    moto = scene.s3.kind == "moto"  # a restart would lose its objects
    (scene.s3.process.suspend if moto else scene.s3.process.kill)()  # type: ignore[union-attr]
    try:
        line = scene.pages["job"].names(Fault.BLOB_STORE_GONE, scene.s3.endpoint)
        assert scene.s3.bucket in line[1]
    finally:
        scene.s3.process.resume() if moto else scene.s3.start()  # type: ignore[union-attr, func-returns-value]
    scene.running()
    scene.pages["job"].is_fine()


# --- members ----------------------------------------------------------------------------------------------------------


def test_lag_grows(scene: Scene) -> None:
    """The page names a task that is slower than its input, with its source partition and both rates."""
    enough = threading.Event()

    def send_on() -> None:
        while not enough.wait(0.1):
            scene.produce(60)

    with scene.process(slow=0.05):
        thread = threading.Thread(target=send_on)
        thread.start()
        try:
            line = scene.pages["job"].names(Fault.LAG_GROWS, "Partition ", "arrive each second")
            assert re.fullmatch(rf"Partition (\d), which reads {INPUT}-\1", line[1])
        finally:
            enough.set()
            thread.join()
    scene.running()
    scene.pages["job"].is_fine()


def publisher_of(config: JobConfig) -> int | None:
    """Return the process that has published the checkpoint of the first task."""
    record = current(config)
    return record.current.owner.process if record and record.current.owner else None


def test_member_stuck(scene: Scene) -> None:
    """The page names a process that stands still by its address, and its tasks with the input that waits."""
    child = scene.running()
    scene.produce(20)
    wait_until(lambda: publisher_of(scene.job) == child.child.pid)  # not the process of the test before
    child.child.send_signal(signal.SIGSTOP)
    try:
        scene.produce(100)
        line = scene.pages["job"].names(Fault.MEMBER_STUCK, "Partition 0", "messages wait")
        assert f"process {child.child.pid} " in line[1], "the owner's process"
        scene.pages["job"].names(Fault.MEMBER_STUCK, f":{scene.job.get('metrics.port')}/metrics")
        command = [sys.executable, "-m", "statemgr", "top", "--json", "-c", str(scene.directory / "job.toml")]
        top = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
        assert {one["fault"] for one in top["problems"]} == {"member-stuck"}
    finally:
        child.child.send_signal(signal.SIGCONT)
    scene.pages["job"].is_fine()


def test_wrong_clock(scene: Scene) -> None:
    """The page names an owner whose clock is a minute ahead by its tasks, with the difference."""
    with scene.process(clock_ahead=60):
        scene.produce(100)
        line = scene.pages["job"].names(Fault.WRONG_CLOCK, "the owner of Partition 0", "ahead of the broker's")
        assert re.search(r"(59|60) s ahead", line[2])
    scene.running()
    scene.produce(100)
    scene.pages["job"].is_fine()


# --- rights -----------------------------------------------------------------------------------------------------------


def test_missing_rights(scene: Scene) -> None:
    """The page names the right that its user lacks, with the resource."""
    page, topic = scene.pages["denied"], scene.job.checkpoint_topic
    page.is_fine()
    scene.kafka.allow(one for one in scene.rights if not (one.right == "Read" and topic in one.resource))
    scene.running()
    scene.produce(100)  # only new records are read
    try:
        page.names(Fault.MISSING_RIGHTS, f"Read on topic {topic}")
    finally:
        scene.kafka.allow(scene.rights)
    page.is_fine()


# --- blobs, on a directory --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blobs(scene: Scene) -> Path:
    """Make two checkpoints of the job without a process. Returns: the directory of its blobs."""
    with StateManager(scene.files) as manager, manager.open_task(TASK) as task:
        for number in range(2):
            write(task, {b"%d" % key: b"value %d" % number for key in range(100)})
            task.commit({"x-0": number})
    scene.pages["files"].is_fine()
    return scene.directory / "files" / "blobs"


def files_below(directory: Path) -> set[Path]:
    """Return all files."""
    return {path for path in directory.rglob("*") if path.is_file()}


def test_blobs_orphaned(scene: Scene, blobs: Path) -> None:
    """A commit died before its publish and left blobs behind. After a click, the page counts them, with an example."""
    page, before = scene.pages["files"], files_below(blobs)
    with failing(Phase.BEGIN), StateManager(scene.files) as manager, suppress(UnavailableError):
        task = manager.open_task(TASK)
        write(task, {b"more": b"x" * 1000})
        task.commit({"x-0": 2})
    orphans = files_below(blobs) - before
    assert orphans
    old = time.time() - 3 * 24 * 3600
    for path in orphans:
        os.utime(path, (old, old))
    page.press("deeper")
    line = page.names(Fault.BLOBS_ORPHANED, str(blobs), "1 old blob (")
    assert TASK.replace(" ", "_") in line[2]
    for path in orphans:
        path.unlink()
    page.press("deeper")
    page.is_fine()


def test_corrupt_blob(scene: Scene, blobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all bytes are read, the page names a blob with a changed byte, and the task that needs it. The command of
    the runbook tells the running owner, which replaces it, and the fault leaves the page without another click."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.2)
    page = scene.pages["files"]
    with StateManager(scene.files) as manager, manager.open_task(TASK) as task:
        wait_until(task.check_up)
        blob = max((blobs / name for name in referenced(scene.files)), key=lambda path: path.stat().st_size)
        whole = blob.read_bytes()
        blob.chmod(0o600)
        blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        page.press("read")
        line = page.names(Fault.CORRUPT_BLOB, blob.name)
        assert f"{TASK} needs it for checkpoint" in line[2]
        command = ["snapshots", "verify", "--read-data", "--repair", "-c", str(scene.directory / "files.toml")]
        assert CliRunner().invoke(cli, command).exit_code == CorruptRecord.exit_status
        page.is_fine()


def test_topic_damaged(scene: Scene, blobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page names a topic with a setting that may lose records, and a changelog that has lost some. After the
    command of the page, and a look of the owner, it names neither."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.2)
    page, topic = scene.pages["files"], scene.files.stores["totals"].changelog_topic
    with StateManager(scene.files) as manager, manager.open_task(TASK) as task:
        alter_topic(scene.files, topic, cleanup__policy="delete")
        line = page.names(Fault.TOPIC_DAMAGED, topic, "cleanup.policy is delete and must be compact")
        assert f"--entity-name {topic} --add-config cleanup.policy=compact" in line[2]
        alter_topic(scene.files, topic, cleanup__policy="compact")
        page.is_fine()
    delete_records(scene.files, topic, 100)
    page.names(Fault.TOPIC_DAMAGED, f"{TASK}, store totals", "records were deleted, and not by compaction")
    with StateManager(scene.files) as manager, manager.open_task(TASK) as task:
        assert task.last_checkpoint is not None
        page.is_fine()


def test_corrupt_record(scene: Scene, blobs: Path) -> None:
    """The page names a record of other software on the checkpoint topic by topic, partition and offset."""
    topic = scene.files.checkpoint_topic
    send(scene.files, topic, [(b"not", b"ours")])
    line = scene.pages["files"].names(Fault.CORRUPT_RECORD, f"{topic}-0 offset ")
    with pytest.raises(CorruptRecord) as refused, StateManager(scene.files) as manager:
        manager.open_task(TASK)
    assert line[1].endswith(f"offset {refused.value.where['offset']}")


def test_disk_full(scene: Scene) -> None:
    """When a commit fails for lack of space, the page names the directory on the full disk."""
    page, directory = scene.pages["small"], scene.disk
    if directory is None:
        pytest.skip("mounting a small file system needs root")
    config = JobConfig.from_file(str(scene.directory / "small.toml"))
    ballast = directory / "ballast"
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        task.commit({"x-0": 1})
        page.is_fine()
        write(task, {b"%d" % key: os.urandom(1000) for key in range(1000)})
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(65_536))
        with pytest.raises(DiskFull):
            task.commit({"x-0": 2})
        page.names(Fault.DISK_FULL, str(directory), "MiB free")
        ballast.unlink()
        task.commit({"x-0": 2})
    page.is_fine()


# --- the runbook ------------------------------------------------------------------------------------------------------


def test_every_fault_has_its_section_on_the_page(scene: Scene) -> None:
    """The page shows a section of the runbook for each fault."""
    with closing(http.client.HTTPConnection("127.0.0.1", scene.pages["job"].port, timeout=60)) as connection:
        connection.request("GET", "/runbook")
        page = connection.getresponse().read().decode()
    for fault in Fault:
        assert f'<h2 id="{fault.value}">{fault.title}</h2>' in page
