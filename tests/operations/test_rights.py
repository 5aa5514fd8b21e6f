"""The documented rights of Kafka and S3 suffice, and each of them is needed, on servers that enforce them."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from statemgr import JobConfig, StateManager
from statemgr.blobs import open_blob_store
from statemgr.cli.main import cli
from statemgr.errors import AccessDenied, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.phases import Phase
from statemgr.ports import UnfinishedUpload, list_blobs
from statemgr_tools.dev.s3 import find_versitygw
from tests.commits import failing
from tests.jobs import DUAL
from tests.old_jobs import commit, make, write
from tests.secured import BUCKET, Right, SecuredKafka, SecuredS3, documented
from tests.servers import KafkaServer

pytestmark = pytest.mark.integration
GROUP, INPUT, PREFIX = "clicks-group", "clicks-in", "team"
OLD_TOPIC, OLD_GROUP = "older-changelog", "older"
#: The steps in the life of a job, as the page names them.
STEPS = ("first start", "run", "restore", "gc", "doctor")
#: Step → a shorter step that needs the same rights.
_STEP_OF = {"run": "commit", "restore": "commit"}


@pytest.fixture(scope="module")
def servers(
    secured_kafka: SecuredKafka, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SecuredKafka, SecuredS3]]:
    """Start a broker and an S3 server with users."""
    if find_versitygw() is None:
        pytest.skip("needs versitygw, which enforces policies")
    secured_kafka.make_topic(INPUT)
    plain = KafkaServer(bootstrap_servers=secured_kafka.broker.bootstrap_servers, kind="local")
    make(plain, OLD_TOPIC, 1)
    write(plain, OLD_TOPIC, 0, [(b"a", b"1"), (b"b", b"2")])
    commit(plain, OLD_GROUP, {(INPUT, 0): 0})
    with SecuredS3(tmp_path_factory.mktemp("secured-s3")) as s3:
        yield secured_kafka, s3


class Life:
    """One job, step by step, run by the user."""

    def __init__(self, servers: tuple[SecuredKafka, SecuredS3], directory: Path, name: str) -> None:
        self.kafka, self.s3 = servers
        self._directory = directory
        self.name = name
        mapping: dict[str, object] = {
            "job.name": name, "state.dir": str(directory / "state"), "task.inputs": [INPUT],
            "task.backup.factories": list(DUAL), "task.commit.ms": 200, "task.commit.timeout.ms": 10_000,
            "stores.totals.value.serde": "bytes", "blob.store.retry.policy.max.retries": 1,
        }  # fmt: skip
        self.config = JobConfig.from_mapping(mapping | self.kafka.settings | self.s3.settings(PREFIX))
        names = {"<job.name>": name, "<job.id>": "1", "<bucket>": BUCKET, "<prefix>": PREFIX}
        self.rights = documented(
            names | {"<group>": GROUP, "<input topic>": INPUT, "<old topic>": OLD_TOPIC, "<old group>": OLD_GROUP}
        )
        self.path = directory / "job.toml"
        directory.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f'"{k}" = {json.dumps(v)}\n' for k, v in self.config.to_mapping().items()))

    def allow(self, rights: list[Right]) -> None:
        """Allow exactly these rights."""
        self.kafka.allow(rights)
        self.s3.allow(rights)

    def step(self, name: str) -> None:
        """Run a step. Raises: what the step raises; AccessDenied for a command that fails."""
        {
            "first start": lambda: self._command("topics", "create"),
            "run": self._run,
            "commit": self._commit,
            "restore": self._restore,
            "gc": lambda: self._command("gc", "--write"),
            "doctor": lambda: self._command("doctor", "--json"),
            "adopt": self.adopt,
        }[name]()

    def adopt(self, *more: str) -> None:
        """Look at the older job, or adopt it."""
        old = ("--from", "raw", "--job", OLD_GROUP, "--changelog", f"totals={OLD_TOPIC}", "--settle", "0")
        self._command("adopt", *old, *more)

    def _command(self, *arguments: str) -> None:
        result = CliRunner().invoke(cli, [*arguments, "--config", str(self.path)], catch_exceptions=False)
        if result.exit_code:
            raise AccessDenied(result.output + result.stderr)

    def _run(self) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.broker.bootstrap_servers})
        for number in range(5):
            producer.produce(INPUT, key=b"%d" % number, value=b"x", partition=0)
        producer.flush(30)
        consumer = self.config.consumer(GROUP)
        done = 0
        try:
            with StateManager(self.config) as manager:

                def process(task: object, message: object) -> None:
                    nonlocal done
                    task.store("totals").put(message.key(), message.value())  # type: ignore[attr-defined]
                    done += 1
                    if done == 5:
                        signal.raise_signal(signal.SIGTERM)

                manager.run(consumer, process)
        finally:
            consumer.close()
        assert done == 5

    def _commit(self) -> None:
        with StateManager(self.config) as manager, manager.open_task("Partition 0") as task:
            offset = task.last_checkpoint.input_offsets["x-0"] if task.last_checkpoint else 0
            task.store("totals").put(b"a", b"%d" % offset)
            task.commit({"x-0": offset + 1})

    def _restore(self) -> None:
        for factory in DUAL:
            there = {"state.dir": str(self._directory / factory), "task.restore.factories": [factory]}
            config = JobConfig.from_mapping({**self.config.to_mapping(), **there})
            with StateManager(config) as manager, manager.open_task("Partition 0") as task:
                assert task.restored[0].factory in (factory, "local")
                assert len(dict(task.store("totals").range())) == 5


def test_the_documented_rights_suffice(servers: tuple[SecuredKafka, SecuredS3], tmp_path: Path) -> None:
    """FAULT 10: a user with exactly the rights of the page creates topics, runs, restores, collects and checks. The job
    stores nothing outside its prefix."""
    life = Life(servers, tmp_path, "clicks")
    root = life.s3.root()
    life.allow(life.rights)
    for name in STEPS:
        life.step(name)
    listed = root.list_objects_v2(Bucket=BUCKET)["Contents"]
    own = f"{PREFIX}/clicks/1/"
    assert all(found["Key"].startswith(own) for found in listed), "nothing is outside of the job's prefix"


def test_the_rights_to_run_suffice_after_a_failed_first_start(
    servers: tuple[SecuredKafka, SecuredS3], tmp_path: Path
) -> None:
    """FAULT 10: blobs that a first start left behind when its publish failed do not keep the next one from starting."""
    life = Life(servers, tmp_path, "begun")
    life.allow([right for right in life.rights if right.purpose in ("first start", "run")])
    with failing(Phase.BEGIN), pytest.raises(UnavailableError):
        life.step("commit")
    assert life.s3.root().list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/begun/1/")["KeyCount"]
    shutil.rmtree(tmp_path / "state")
    life.step("commit")


@pytest.mark.long
def test_the_documented_rights_suffice_to_adopt(servers: tuple[SecuredKafka, SecuredS3], tmp_path: Path) -> None:
    """The rights for `adopt` and those for a job are enough to look at an older job, and to adopt it."""
    life = Life(servers, tmp_path, "adopted")
    life.allow(life.rights)
    life.adopt()
    life.adopt("--write")
    with StateManager(life.config) as manager, manager.open_task("Partition 0") as task:
        assert dict(task.store("totals", key_serde="bytes").range()) == {b"a": b"1", b"b": b"2"}


@pytest.mark.long
def test_each_right_of_kafka_is_needed_and_named(servers: tuple[SecuredKafka, SecuredS3], tmp_path: Path) -> None:
    """FAULT 10: without any one of Kafka's rights, its step fails with AccessDenied, which names right and resource."""
    life = Life(servers, tmp_path, "orders")
    life.allow(life.rights)
    for name in ("first start", "commit"):
        life.step(name)
    wrong = []
    for number, right in enumerate(life.rights):
        if right.server != "Kafka":
            continue
        # a job that has nothing yet tries the rights to create something, and to adopt an older job
        is_new = right.right == "Create" or right.purpose == "adopt"
        job = Life(servers, tmp_path / str(number), f"fresh{number}") if is_new else life
        lost = job.rights[number]
        job.allow([other for other in job.rights if other != lost])
        kind, _, name = lost.resource.strip("`").partition(" `")
        of_input = name in (INPUT, GROUP)
        try:
            job.step("run" if of_input else _STEP_OF.get(lost.purpose, lost.purpose))
        except AccessDenied as error:
            if not re.search(rf"{lost.right}\b[^,]* on {kind} ([\w.-]+ or )?{name.rstrip('*')}", str(error)):
                wrong.append((lost, str(error)))
        else:
            wrong.append((lost, "it was not needed"))
    assert not wrong, "\n\n".join(map(str, wrong))


def test_each_right_of_s3_is_needed_and_named(servers: tuple[SecuredKafka, SecuredS3], tmp_path: Path) -> None:
    """FAULT 10: without any one of S3's rights, its request fails with AccessDenied, which names right and bucket."""
    life = Life(servers, tmp_path, "visits")
    root, key = life.s3.root(), "visits/1/Partition_0/totals/a/x"
    upload = root.create_multipart_upload(Bucket=BUCKET, Key=f"{PREFIX}/visits/1/u")["UploadId"]
    life.allow(life.rights)
    blobs = open_blob_store(life.config, SystemClock())
    blobs.put(key, b"x", ttl_days=30)
    calls: dict[str, Callable[[], object]] = {
        "s3:PutObject": lambda: blobs.put(key + "2", b"x", ttl_days=30),
        "s3:PutObjectTagging": lambda: blobs.put(key + "3", b"x", ttl_days=30),
        "s3:GetObject": lambda: blobs.get(key).__enter__(),
        "s3:ListBucket": lambda: list(list_blobs(blobs, "visits/1/")),
        "s3:GetObjectTagging": lambda: blobs.stat(key),
        "s3:DeleteObjectTagging": lambda: blobs.remove_ttl(key),
        "s3:ListBucketMultipartUploads": lambda: list(blobs.administration.unfinished("visits/1/")),
        "s3:AbortMultipartUpload": lambda: blobs.administration.abandon(UnfinishedUpload("visits/1/u", upload, 0)),
        "s3:DeleteObject": lambda: blobs.delete(key),
    }
    rights = {right.right: right for right in life.rights if right.server == "S3"}
    # versitygw has no lifecycle rules, and so no right to them
    assert rights.keys() - calls.keys() == {"s3:GetLifecycleConfiguration", "s3:PutLifecycleConfiguration"}
    for name, call in calls.items():
        life.allow([right for right in life.rights if right.right != name])
        with pytest.raises(AccessDenied) as caught:
            call()
        assert name in str(caught.value.where["missing_right"])
        assert caught.value.where["bucket"] == BUCKET
        life.allow(life.rights)
        call()
    blobs.close()


def test_jobs_that_share_a_bucket_are_isolated(servers: tuple[SecuredKafka, SecuredS3], tmp_path: Path) -> None:
    """A user with the documented rights cannot reach what another job stores below the same prefix."""
    life = Life(servers, tmp_path, "mine")
    root, key = life.s3.root(), f"{PREFIX}/theirs/1/Partition_0/totals/a/x"
    root.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    life.allow(life.rights)
    blobs = open_blob_store(life.config, SystemClock())
    theirs = key.removeprefix(f"{PREFIX}/")
    for call in (
        lambda: blobs.get(theirs).__enter__(),
        lambda: blobs.delete(theirs),
        lambda: blobs.put(theirs + "2", b"x", ttl_days=30),
    ):
        with pytest.raises(AccessDenied):
            call()
    blobs.put("mine/1/Partition_0/totals/a/x", b"x", ttl_days=30)
    blobs.close()
    assert root.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"x"
