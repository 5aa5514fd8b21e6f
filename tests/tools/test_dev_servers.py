from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from statemgr.config import JobConfig
from statemgr.errors import CorruptError, InvalidError, PrerequisiteMissing, UnavailableError
from statemgr_tools.commands.dev import _compare_configuration, command
from statemgr_tools.dev import down, jars, s3, status, up
from statemgr_tools.dev import servers as dev_servers
from statemgr_tools.dev.kafka import KafkaBroker
from statemgr_tools.dev.process import ServerProcess, free_port, spawn, wait_until_ready
from statemgr_tools.dev.s3 import S3Server, find_seaweedfs, find_versitygw
from statemgr_tools.dev.servers import DevServers, read_state
from statemgr_tools.dev.servers import running as running_servers
from tests import servers

_TIMEOUT_S = 60.0


def _create_topic(bootstrap_servers: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(_TIMEOUT_S)


def _commit_one_transaction(bootstrap_servers: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": f"{topic}-writer"})
    producer.init_transactions(_TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, key=b"k", value=b"v")
    producer.commit_transaction(_TIMEOUT_S)


def test_the_shared_broker_commits_a_transaction(kafka: servers.KafkaServer) -> None:
    """The suite's broker, of whichever kind, accepts a transaction."""
    topic = kafka.fresh_name("transaction")
    _create_topic(kafka.bootstrap_servers, topic)
    _commit_one_transaction(kafka.bootstrap_servers, topic)


def test_the_shared_broker_creates_no_topic_by_itself(kafka: servers.KafkaServer) -> None:
    """A metadata request for a topic that nobody created does not create it."""
    topic = kafka.fresh_name("absent")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.list_topics(topic, timeout=_TIMEOUT_S)
    assert topic not in admin.list_topics(timeout=_TIMEOUT_S).topics


def test_the_shared_s3_server_keeps_objects_and_tags(s3: servers.S3Server) -> None:
    """The suite's S3 server, of whichever kind, stores an object with its tags and deletes it."""
    client, key = s3.client(), f"{s3.fresh_prefix()}/blob"
    client.put_object(Bucket=s3.bucket, Key=key, Body=b"bytes", Tagging="ttl=30")
    with client.get_object(Bucket=s3.bucket, Key=key)["Body"] as body:
        assert body.read() == b"bytes"
    assert client.get_object_tagging(Bucket=s3.bucket, Key=key)["TagSet"] == [{"Key": "ttl", "Value": "30"}]
    client.delete_object(Bucket=s3.bucket, Key=key)
    assert client.list_objects_v2(Bucket=s3.bucket, Prefix=key)["KeyCount"] == 0
    client.close()


@pytest.mark.long
def test_servers_whose_starter_died_are_known(tmp_path: Path) -> None:
    """If `dev up` is killed after it has started a broker, the next `up` waits for that broker and `down` stops it."""
    code = "import sys; from statemgr_tools.dev import up; up(sys.argv[1], s3=False)"
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    deadline = time.monotonic() + _TIMEOUT_S
    while status(tmp_path).kafka_pid is None:
        assert time.monotonic() < deadline, "no server was noted"
        time.sleep(0.01)
    starter.kill()
    starter.wait()
    pid = status(tmp_path).kafka_pid
    running = up(tmp_path, s3=False)
    assert running.kafka_pid == pid
    assert running.bootstrap_servers is not None
    assert AdminClient({"bootstrap.servers": running.bootstrap_servers}).list_topics(timeout=_TIMEOUT_S).brokers
    assert down(tmp_path)
    assert status(tmp_path).kafka_pid is None


@pytest.mark.long
def test_an_own_broker_keeps_its_data_over_a_kill_and_goes_on_after_a_pause(own_kafka) -> None:
    """A broker that is killed and started again, suspended and resumed keeps its address and its topics."""
    broker = own_kafka()
    _create_topic(broker.bootstrap_servers, "kept")
    broker.kill()
    assert not broker.process.running
    broker.start()
    broker.process.suspend()
    broker.process.resume()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    assert "kept" in admin.list_topics(timeout=_TIMEOUT_S).topics


def test_without_an_s3_server_no_broker_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes first, and its hint names the way out, which is enough for the example of `init`."""
    monkeypatch.setattr(s3, "find_versitygw", lambda **_: None)
    monkeypatch.setattr(dev_servers, "find_versitygw", lambda **_: None)
    monkeypatch.setattr(s3.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(KafkaBroker, "start", lambda *_, **__: pytest.fail("the broker was started"))
    with pytest.raises(PrerequisiteMissing, match="no S3 server") as missing:
        up(tmp_path)
    assert "`statemgr dev up --no-s3`" in (missing.value.hint or "")


@pytest.mark.parametrize(("kind", "forgets"), [("moto", True), ("versitygw", False)])
def test_a_server_in_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, forgets: bool) -> None:
    """Otherwise the blobs of a job would be gone after `dev down` for no reason that anybody sees."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev_servers, "up", lambda *_, **__: DevServers(directory=str(tmp_path), s3_server=kind))
    assert ("keeps objects in memory" in CliRunner().invoke(command, ["up"]).stderr) == forgets


def test_dev_up_status_down_by_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers outlive `up`, a second `up` finds them, `down` stops them, and a third `up` still has the data. It
    names the lines of job.toml that have other addresses, and writes them on request.
    """
    runner = CliRunner()
    monkeypatch.chdir(tmp_path)
    example = '[job]\nname = "orders" # mine\n[kafka]\nbootstrap.servers = "localhost:9092"\n'
    Path("job.toml").write_text(example)

    def call(*arguments: str) -> dict:
        result = runner.invoke(command, [*arguments, "--directory", str(tmp_path), "--json"])
        return json.loads(result.stdout) | {"exit": result.exit_code}

    try:
        any_port = ("--kafka-port", "0", "--s3-port", "0")
        first = call("up", *any_port)
        _create_topic(first["bootstrap_servers"], "kept")
        assert call("up") == first
        assert call("status") == first
        line = f'kafka.bootstrap.servers = "{first["bootstrap_servers"]}"'
        assert line in runner.invoke(command, ["up", "--directory", str(tmp_path)]).stderr.splitlines()
        assert Path("job.toml").read_text() == example
        written = runner.invoke(command, ["up", "--directory", str(tmp_path), "--write"])
        assert line in written.stderr.splitlines()
        (saved,) = Path().glob("job.toml.*")
        assert f"the old file is {saved}:" in written.stderr
        assert Path("job.toml").read_text() == example.replace("localhost:9092", first["bootstrap_servers"])
        assert "job.toml" not in runner.invoke(command, ["up", "--directory", str(tmp_path)]).stderr
        assert call("down") == {"stopped": True, "exit": 0}
        assert not psutil.pid_exists(first["kafka_pid"])
        assert not psutil.pid_exists(first["s3_pid"])
        assert call("status")["exit"] == 1
        again = call("up")
        assert again["bootstrap_servers"] == first["bootstrap_servers"]
        admin = AdminClient({"bootstrap.servers": again["bootstrap_servers"]})
        assert "kept" in admin.list_topics(timeout=_TIMEOUT_S).topics
    finally:
        down(tmp_path)


@pytest.mark.parametrize(
    ("uri", "written"),
    [
        ("s3://statemgr/a", {"kafka.bootstrap.servers": "127.0.0.1:1", "blob.store.s3.endpoint": "http://127.0.0.1:2"}),
        ("file:///tmp/a", {"kafka.bootstrap.servers": "127.0.0.1:1"}),
    ],
)
def test_addresses_that_job_toml_lacks_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, written: dict[str, str]
) -> None:
    """Without them, the next command would ask for the brokers, or go to Amazon."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(f'[job]\nname = "a"\n[stores.s]\n[blob.store]\nuri = "{uri}"\n')
    before = JobConfig.from_file(Path("job.toml")).to_mapping()
    running = DevServers(directory="x", bootstrap_servers="127.0.0.1:1", s3_endpoint="http://127.0.0.1:2")
    for _ in range(2):
        _compare_configuration(running, write=True)
        assert JobConfig.from_file(Path("job.toml")).to_mapping() == {**before, **written}
    assert len([*Path().glob("job.toml.*")]) == 1, "the second time, there is nothing to write"


def test_the_state_file_is_for_its_owner_only(tmp_path: Path) -> None:
    """Only the owner can read the state file, which has the local server's keys, and no repr shows the secret key."""
    try:
        running = up(tmp_path, kafka=False)
        assert (tmp_path / "servers.json").stat().st_mode & 0o077 == 0
        assert running.s3_secret_key not in repr(running)
        assert running.s3_secret_key not in repr(read_state(tmp_path))
    finally:
        down(tmp_path)


def test_a_reused_pid_is_never_stopped(tmp_path: Path) -> None:
    """A process with the same PID but another start time belongs to somebody else."""
    stranger = spawn(["sleep", "60"], log=tmp_path / "log")
    try:
        remembered = ServerProcess(pid=stranger.pid, started_at=stranger.started_at - 100, log=stranger.log)
        assert not remembered.running
        assert not remembered.stop()
        remembered.kill()
        assert stranger.running
    finally:
        stranger.kill()
    assert not stranger.running


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """After the grace time, the server gets a SIGKILL."""
    server = spawn(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"], log=tmp_path / "log")
    wait_until_ready(server, lambda: "ready" in server.log.read_text(), name="it", deadline_s=60)
    assert server.stop(grace_s=0.3)
    assert not server.running


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    """The error names the log and quotes it."""
    server = spawn(["sh", "-c", "echo 'error: no room'; exit 3"], log=tmp_path / "log")
    with pytest.raises(UnavailableError, match="no room") as raised:
        wait_until_ready(server, lambda: False, name="it", deadline_s=60)
    assert raised.value.where["log"] == str(tmp_path / "log")


def test_a_server_that_never_answers_meets_the_deadline(tmp_path: Path) -> None:
    """The wait ends with a typed error."""
    server = spawn(["sleep", "60"], log=tmp_path / "log")
    try:
        with pytest.raises(UnavailableError, match="not ready"):
            wait_until_ready(server, lambda: False, name="it", deadline_s=0.2)
    finally:
        server.kill()


def test_a_killed_server_is_seen_as_down_and_comes_back(tmp_path: Path) -> None:
    """`status` asks the process, not the file. `up` starts the missing server again with the same keys."""
    try:
        first = up(tmp_path, kafka=False)
        os.kill(first.s3_pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while status(tmp_path).s3_pid is not None:
            assert time.monotonic() < end
            time.sleep(0.02)
        second = up(tmp_path, kafka=False)
        assert (second.s3_endpoint, second.s3_access_key) == (first.s3_endpoint, first.s3_access_key)
        assert second.s3_pid != first.s3_pid
    finally:
        down(tmp_path)


def test_a_port_that_is_in_use_is_an_error_that_names_it_and_the_option(tmp_path: Path) -> None:
    """The error names the port and the option of each server, and nothing starts. Once the port is free, the server
    starts on it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for parts, option in ({"s3": False}, "--kafka-port"), ({"kafka": False}, "--s3-port"):
            with pytest.raises(InvalidError, match=f"port {port} is in use by .*{os.getpid()}") as error:
                up(tmp_path, kafka_port=port, s3_port=port, **parts)
            assert option in (error.value.hint or "")
        assert read_state(tmp_path) == {}
    try:
        assert up(tmp_path, kafka=False, s3_port=port).s3_endpoint == f"http://127.0.0.1:{port}"
        assert up(tmp_path, kafka=False).s3_endpoint == f"http://127.0.0.1:{port}"
        with pytest.raises(InvalidError, match=f"already runs on port {port}"):
            up(tmp_path, kafka=False, s3_port=free_port())
    finally:
        down(tmp_path)


def test_progress_is_shown_where_its_output_is_no_terminal(tmp_path: Path) -> None:
    """`up` reports its steps on standard error and prints the addresses on standard output, as one JSON object."""
    started = subprocess.run(
        [
            sys.executable,
            "-m",
            "statemgr",
            "dev",
            "up",
            "--json",
            "--no-kafka",
            "--s3-port",
            "0",
            "--directory",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        port = json.loads(started.stdout)["s3_endpoint"].rpartition(":")[2]
        assert started.stderr.splitlines()[-1] == f"starting the S3 server on port {port}"
    finally:
        down(tmp_path)


@pytest.mark.long
def test_an_installed_kafka_is_used_where_a_variable_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With KAFKA_HOME set, the broker runs with the jars of that installation, and nothing is downloaded."""
    libraries = tmp_path / "kafka" / "libs"
    libraries.mkdir(parents=True)
    for jar in jars.broker_jars():
        (libraries / jar.name).symlink_to(jar)
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path / "kafka"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    steps: list[str] = []
    try:
        running = up(tmp_path / "dev", s3=False, report=steps.append)
        assert running.bootstrap_servers is not None
        assert [step.partition(" on port")[0] for step in steps] == ["starting the Kafka broker"]
        _create_topic(running.bootstrap_servers, "there")
        assert str(libraries) in " ".join(psutil.Process(running.kafka_pid).cmdline())
    finally:
        down(tmp_path / "dev")


def test_a_taken_port_is_given_up_for_another(tmp_path: Path) -> None:
    """If somebody else listens on the port of the last run, the server starts on another port."""
    try:
        first = up(tmp_path, kafka=False)
        down(tmp_path)
        stopped = read_state(tmp_path)["s3"]
        other = S3Server(directory=tmp_path / "other", kind=stopped.kind, port=stopped.port)
        other.start()
        try:
            assert up(tmp_path, kafka=False).s3_endpoint != first.s3_endpoint
        finally:
            other.stop()
    finally:
        down(tmp_path)


def test_servers_that_ran_before_are_kept(tmp_path: Path) -> None:
    """A program that stops what it has started leaves the others alone."""
    try:
        up(tmp_path, kafka=False)
        assert running_servers(tmp_path) == {"s3"}
        assert not down(tmp_path, keep={"s3"})
        assert running_servers(tmp_path) == {"s3"}
    finally:
        assert down(tmp_path)
    assert running_servers(tmp_path) == set()


@pytest.mark.parametrize("kind", ["versitygw", "moto", "seaweedfs"])
def test_each_s3_server_serves_a_bucket(tmp_path: Path, kind: str) -> None:
    """The preferred server, the fallback and the second real one can store an object and find it again."""
    if kind == "versitygw" and find_versitygw() is None:
        pytest.skip("neither versitygw nor Go is here")
    if kind == "seaweedfs" and find_seaweedfs(build=False) is None:
        pytest.skip("SeaweedFS is not here; `make test-clouds` builds it, in minutes")
    server = S3Server(directory=tmp_path, kind=kind, port=free_port())
    server.start()
    try:
        view = servers.S3Server(
            endpoint=server.endpoint,
            bucket=server.bucket,
            region=server.region,
            access_key=server.access_key,
            secret_key=server.secret_key,
            server=kind,
            kind="local",
        )
        client = view.client()
        client.put_object(Bucket=view.bucket, Key="a/b", Body=b"x")
        assert client.head_object(Bucket=view.bucket, Key="a/b")["ContentLength"] == 1
        client.close()
    finally:
        server.stop()


def test_a_damaged_state_file_is_an_error_that_says_what_to_remove(tmp_path: Path) -> None:
    """The error names the file that is damaged."""
    (tmp_path / "servers.json").write_text('{"kafka": 7}')
    with pytest.raises(CorruptError, match=r"servers\.json"):
        status(tmp_path)


def test_cached_jars_need_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the jars are cached, no process runs and no Java is needed."""
    found = jars.broker_jars()
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    assert jars.broker_jars() == found
    assert any(jar.name.startswith("kafka_2.13-") for jar in found)


def test_a_directory_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Square brackets in the name of a directory are text."""
    running = DevServers(directory=str(tmp_path / "[dev]" / "x]"), kafka_pid=1)
    monkeypatch.setattr(dev_servers, "status", lambda directory: running)
    found = CliRunner().invoke(command, ["status"])
    assert found.exit_code == 0, found.output
    assert running.directory in found.output
