"""Random applications of the real Kafka Streams: each is adopted exactly, or refused for a reason that it has.

``STATEMGR_TEST_TOPOLOGIES`` is their number (10), and ``STATEMGR_TEST_SEED`` the first seed (0).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.old_jobs import topics_of
from tests.peers.adopted import New
from tests.peers.random_shapes import random_rows, random_shape
from tests.peers.recount import differences, known, recount
from tests.peers.shapes import Shape
from tests.peers.streams import AGGREGATES, TABLES, Job, Step, Streams
from tests.servers import KafkaServer

TOPOLOGIES = int(os.environ.get("STATEMGR_TEST_TOPOLOGIES", "10"))
SEED = int(os.environ.get("STATEMGR_TEST_SEED", "0"))
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]
#: Ends of names that stores of other kinds have, unless the application chose them.
_LIKE_OTHERS = ("-subscription-store",)


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    """The JVM that runs the applications."""
    running = Streams(tmp_path_factory.mktemp("streams"))
    yield running
    running.close()


@pytest.mark.parametrize("seed", range(SEED, SEED + TOPOLOGIES))
def test_a_random_topology_is_adopted_exactly_or_refused(
    kafka: KafkaServer, tmp_path: Path, streams: Streams, seed: int
) -> None:
    """The new job has what the application had, and goes on. Or the command names a store that is not plain, has other
    keys than the input, or is named like one that is not plain, or a topic with rows that wait; and adopts the rest."""
    shape = random_shape(seed)
    print(shape)
    job = Job(kafka, shape.steps, shape.settings)
    topics = sorted({step["topic"] for step in shape.steps if "topic" in step})
    begin = int(time.time() * 1000) - 3_600_000
    job.send(random_rows(seed, topics, begin))
    stop = Random(seed).randint(1, len(job.rows)) if shape.ending == "early" else 0
    had = job.run(streams, stop)
    if stop == 0 and known(shape.steps):
        assert not differences(had, recount(job.named, job.rows))
    adopter, name = job.adopter(tmp_path), f"{job.name}-new"
    before = topics_of(kafka, job.name)
    options: list[str] = []
    sure = [step for step in job.named if is_sure(step)]
    while refused := adopter.refusal(name, *options):
        assert topics_of(kafka, job.name) == before
        if " rows wait in a topic " in refused:
            had = job.run(streams)
        elif missing := re.search(r"has no offset of (\S+)-(\d+),", refused):
            options += ["--offset", f"{missing[1]}-{missing[2]}=0"]
        else:
            odd = [step for step in job.named if is_odd(step, shape)]
            assert "--changelog" not in options, refused
            assert any(word in refused for step in odd for word in words(step)), f"{refused}\n{odd}"
            if not sure:
                return
            options += [of for step in sure for of in ("--changelog", f"{step['as']}={changelog(job, step, shape)}")]
            options += [of for step in sure if is_odd(step, shape) for of in ("--confirm", step["as"] + kind(step))]
    config = adopter.init(name, *options, "--set", "task.checkpoint.retained=10", "--force")
    named = "--changelog" in options
    names = {step["as"]: step["store"] for step in sure} if named else {}
    names |= adopter.json(*options)["old_names"]
    adopter.run("--write", *options)
    adopted = {store: had[store] for store in (names.get(store, store) for store in config.stores)}
    assert named or adopted.keys() == had.keys()
    New(adopter, job, adopted, names).check()


def changelog(job: Job, step: Step, shape: Shape) -> str:
    """Return the changelog of the store of a step."""
    if step["op"] == "table" and "topology.optimization" in shape.settings:
        return str(step["topic"])
    return f"{job.name}-{step['store']}-changelog"


def kind(step: Step) -> str:
    """Return how the kind of the store of a step is confirmed."""
    return "=windows" if "size" in step else "=sessions" if "gap" in step else ""


def is_sure(step: Step) -> bool:
    """Whether the store of a step can be adopted alone, at most with a confirmation of its keys."""
    kinds = AGGREGATES | TABLES | {"filter", "processor", "join"}
    return (
        step["op"] in kinds and step.get("kind") != "stream-stream" and not {"size", "gap", "versioned"} & step.keys()
    )


def is_odd(step: Step, shape: Shape) -> bool:
    """Whether a step is a reason to refuse the application."""
    names = [f"{step.get('store')}", f"{step.get('name')}"]
    return (
        step["op"] == "suppress"
        or step.get("kind") == "foreign-key"
        or bool({"outer", "versioned", "by"} & step.keys())
        or any(name.endswith(_LIKE_OTHERS) for name in names)
        or (step["op"] == "table" and "topology.optimization" in shape.settings)
    )


def words(step: Step) -> list[str]:
    """What names a step."""
    own = {"suppress": "KTABLE-SUPPRESS", "foreign-key": "KTABLE-FK", "stream-stream": "KSTREAM-"}
    found = [step.get(key) for key in ("store", "name", "topic")] + [own.get(step["op"]), own.get(step.get("kind", ""))]
    return [str(word) for word in found if word]
