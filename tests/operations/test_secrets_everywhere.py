"""A canary is in every place where a secret can be. No log, repr, traceback or output has it, even at level DEBUG."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_integration.attempt import Work
from statemgr import JobConfig, StateManager
from statemgr.blobs import open_blob_store
from statemgr.cli.main import cli
from statemgr.errors import StatemgrError
from statemgr.kafka import clients as kafka_clients
from statemgr.kafka.errors import ClientErrors, translated
from statemgr.local.machine import SystemClock
from statemgr.ports import list_blobs
from tests.commits import TASK, write
from tests.jobs import job_mapping, with_changes
from tests.servers import KafkaServer, S3Server

pytestmark = pytest.mark.integration
CANARY = "canary-7f3b91d2c4"
SASL = ("kafka.sasl.username", "kafka.sasl.password", "kafka.ssl.key.password")
S3 = ("blob.store.s3.access.key", "blob.store.s3.secret.key", "blob.store.s3.session.token")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect texts to search. At the end, add what any library logged, at any level."""
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    texts: list[str] = []
    yield texts
    everything = [*texts, caplog.text]
    assert not [text[max(text.find(CANARY) - 300, 0) :][:400] for text in everything if CANARY in text]


def tell(error: BaseException) -> str:
    """Return everything that an error says."""
    told = "".join(traceback.format_exception(error)) + repr(error)
    return told + (error.to_json() if isinstance(error, StatemgrError) else "")


def given(keys: tuple[str, ...], how: str, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Return the canary under some keys, literally or behind references."""
    values = {}
    for number, key in enumerate(keys):
        monkeypatch.setenv(f"TEST_CANARY_{number}", f"{CANARY}-{number}")
        values[key] = f"{CANARY}-{number}" if how == "literal" else f"${{env:TEST_CANARY_{number}}}"
    return values


@pytest.mark.parametrize("how", ["literal", "reference"])
def test_of_the_blob_store(
    how: str, kafka: KafkaServer, s3: S3Server, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 30: every request carries keys and a session token, but not even botocore's debug log contains them."""
    mapping = job_mapping(kafka, tmp_path, s3=s3, backup=("blob-store",)) | given(S3, how, monkeypatch)
    config = JobConfig.from_mapping(mapping | {"blob.store.retry.policy.max.retries": 0})
    blobs = open_blob_store(config, SystemClock())
    for call in (
        lambda: blobs.put("a/b", b"x", ttl_days=30),
        lambda: list(list_blobs(blobs, "a")),
        lambda: blobs.stat("a/b"),
        lambda: blobs.delete_many(["a/b"]),
        blobs.administration.probe,
        blobs.administration.time_ms,
    ):
        try:
            said.append(repr(call()))
        except StatemgrError as error:
            said.append(tell(error))
    blobs.close()
    said += [repr(blobs), repr(vars(blobs)), repr(config), f"{config}", repr(vars(config)) if how != "literal" else ""]


def test_of_a_blob_store_that_takes_them(
    s3: S3Server, kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULT 30: the keys of a working server are in no log of a commit and a restore."""
    caplog.set_level(logging.DEBUG)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, s3=s3, backup=("blob-store",)))
    for _ in range(2):
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            write(task, {b"a": b"1"})
            task.commit({"orders-0": 1})
            assert s3.secret_key not in repr(manager) + repr(vars(manager)) + repr(task) + repr(vars(task))
    assert "Making request" in caplog.text, "the SDK did log"
    assert s3.secret_key not in caplog.text
    assert s3.access_key not in caplog.text


@pytest.mark.parametrize("how", ["literal", "reference"])
def test_of_kafka(
    how: str, kafka: KafkaServer, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 30: SASL's user and password are not in librdkafka's debug log, and a refused setting shows no secret."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path) | given(SASL, how, monkeypatch))
    sasl = with_changes(
        config, kafka__security__protocol="SASL_PLAINTEXT", kafka__sasl__mechanism="PLAIN", kafka__debug="all"
    )
    admin = kafka_clients.admin(sasl, ClientErrors())
    for _ in range(5):
        admin.poll(0.2)
    said += [repr(config), json.dumps(config.masked()), repr(config.stores)]
    monkeypatch.setenv("TEST_CANARY", CANARY)
    for key in ("kafka.debug", "kafka.compression.codec", "kafka.bootstrap.servers"):
        refused = JobConfig.from_mapping({**config.to_mapping(), key: "${env:TEST_CANARY}"})
        with pytest.raises(StatemgrError) as caught:
            _ask(refused)
        said.append(tell(caught.value))


def _ask(config: JobConfig) -> None:
    errors = ClientErrors()
    admin = kafka_clients.admin(config, errors)
    with translated("asking", errors):
        admin.list_topics(timeout=1.0)


def test_of_what_travels_to_workers(
    kafka: KafkaServer, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 30: the work of a micro-batch carries literal secrets, and its repr does not show them."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path) | given(SASL + S3, "literal", monkeypatch))
    others = {field.name: None for field in fields(Work) if field.name != "config"}
    work = Work(config=json.dumps(config.to_mapping()), **others)  # type: ignore[arg-type]
    assert CANARY in work.config
    said += [repr(work), f"{work}"]


@pytest.mark.parametrize("how", ["literal", pytest.param("reference", marks=pytest.mark.long)])
def test_of_the_command_line(
    how: str, kafka: KafkaServer, s3: S3Server, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 30: no command that reports shows a secret, with or without --debug and --json, even after a typing
    error."""
    mapping = job_mapping(kafka, tmp_path, s3=s3, backup=("blob-store",)) | given(S3, how, monkeypatch)
    path = tmp_path / "job.toml"
    path.write_text("".join(f'"{key}" = {json.dumps(value)}\n' for key, value in mapping.items()))
    settings = ["--config", str(path), "--set", "blob.store.retry.policy.max.retries=0"]
    commands = [
        ["config", "show"], ["config", "show", "--all", "--json"], ["config", "check"], ["doctor"],
        ["doctor", "--json"], ["checkpoints", "list"], ["snapshots", "list"], ["gc"], ["topics", "check"],
        ["config", "check", "--set", f"blob.store.s3.endpoint=ftp://x:{CANARY}@y"],
    ]  # fmt: skip
    for command in commands:
        for debug in ([], ["--debug"]):
            result = CliRunner().invoke(cli, [*debug, *command, *settings])
            assert result.exception is None or isinstance(result.exception, SystemExit), command
            said.append(result.output)
