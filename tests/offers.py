"""Helpers for the tests of `statemgr materialize`: a job in its stages, the command, and the offers on the topic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from statemgr import JobConfig
from statemgr.cli.main import cli
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock
from statemgr.model.jobs.offers import Offer, OfferKey
from tests.jobs import DUAL, SEGMENTS, job_mapping, with_changes
from tests.servers import KafkaServer, S3Server

CHANGELOG, BLOBS = "kafka-changelog", "blob-store"


def stage_one(kafka: KafkaServer, directory: Path, *, s3: S3Server | None = None, **more: Any) -> JobConfig:
    """Return a job that has only changelogs so far, and a blob store to migrate to."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, backup=[CHANGELOG], kind=SEGMENTS, s3=s3, **more))


def stage_two(config: JobConfig) -> JobConfig:
    """Return the same job in dual commit."""
    return with_changes(config, task__backup__factories=list(DUAL))


def write_file(config: JobConfig, directory: Path) -> Path:
    """Write the job's configuration to a file."""
    path = directory / "job.toml"
    path.write_text("\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in config.to_mapping().items()))
    return path


def run(config: JobConfig, directory: Path, *arguments: str) -> Result:
    """Run `statemgr materialize` on a job."""
    path = str(write_file(config, directory))
    return CliRunner().invoke(cli, ["materialize", "--config", path, *arguments], catch_exceptions=False)


def materialize(config: JobConfig, directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return what `statemgr materialize` reports for each task and store."""
    result = run(config, directory, "--json", "--parallel", "1", *arguments)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def offers(config: JobConfig) -> Mapping[OfferKey, Offer]:
    """Return the offers on the topic, including expired ones."""
    with closing(CheckpointTopic(config, SystemClock())) as log:
        log.read()
        return log.offers()
