"""The simulation of ``statemgr plan-capacity --simulate``."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from statemgr_tools.sizing.resources import PUBLISH_S, Resources
from statemgr_tools.sizing.simulation import Services, simulate
from statemgr_tools.sizing.workload import Workload
from tests.docs.blocks import blocks

FAST = Services(brokers=3, transactions_per_s=1e6, topic_per_s=1e6, store_per_s=1e6)
SMALL = Workload(tasks=60, processes=6, keys=6e6, changes_per_s=6e4, put_s=0.05)
PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"


def test_without_queues_a_commit_takes_its_own_time() -> None:
    """If everything is fast, the median is the latency of a PUT and of a publish, and what the link needs."""
    found = simulate(Resources(replace(SMALL, bandwidth=1e12)), FAST, together=False)
    assert found.p50_s == pytest.approx(SMALL.put_s + PUBLISH_S, rel=0.1)
    assert found.commits == pytest.approx(SMALL.tasks * 3, abs=SMALL.tasks)
    assert all(stage.busy < 0.01 for stage in found.stages)


def test_a_queue_of_all_tasks_is_as_long_as_all_their_work() -> None:
    """If all processes commit together, the last commit waits for the publishes of all others."""
    slow = replace(FAST, topic_per_s=20)
    found = simulate(Resources(SMALL), slow, together=True)
    assert found.limit.name == "leader of the checkpoint topic"
    assert found.limit.busy == pytest.approx(60 / 60 / 20)
    assert found.longest_s == pytest.approx(60 / 20, rel=0.2)


def test_a_stage_that_is_too_slow_falls_behind() -> None:
    """Above 100% load, the waits grow from interval to interval."""
    found = simulate(Resources(SMALL), replace(FAST, topic_per_s=0.5), together=False)
    assert found.limit.busy == pytest.approx(2)
    assert found.longest_s > SMALL.commit_s


def test_the_same_job_has_the_same_outcome() -> None:
    """The seed is fixed."""
    assert simulate(Resources(SMALL), FAST, together=False) == simulate(Resources(SMALL), FAST, together=False)


@pytest.mark.parametrize("more", [(), ("--backup", "kafka-changelog"), ("--snapshot", "1 commit"), ("--changes", "0")])
def test_every_kind_of_job_can_be_simulated(more: tuple[str, ...]) -> None:
    """Even jobs without blobs, segments or changes have finite results."""
    asked = ("--state", "1GB", "--changes", "1k", "--tasks", "20", "--simulate")
    result = CliRunner().invoke(cli, ["plan-capacity", *asked, *more, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    for outcome in json.loads(result.stdout)["simulation"].values():
        assert all(math.isfinite(value) for stage in outcome["stages"] for key, value in stage.items() if key != "name")


def test_the_walk_shows_what_the_command_prints() -> None:
    """The simulation of 10,000 tasks in docs/sizing.md is what its command prints."""
    (command,) = blocks("docs/sizing.md", "## 10,000 tasks and 1 PB", "sh")
    _, printed = blocks("docs/sizing.md", "## 10,000 tasks and 1 PB", "text")

    def words(text: str) -> list[Any]:
        return [line.split() for line in text.splitlines() if line.strip()]

    result = CliRunner().invoke(cli, shlex.split(command)[1:], catch_exceptions=False)
    shown = words(result.stdout)
    assert all(line in shown for line in words(printed))
