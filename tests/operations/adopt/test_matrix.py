"""Applications in many shapes, run by the real Kafka Streams: each is adopted exactly, or refused by name.

Oracles: what the application itself says of its stores, and a recount of the rows in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kafka_jobs import wait_until
from tests.old_jobs import await_empty, topics_of
from tests.peers.adopted import New
from tests.peers.recount import Content, differences, known, recount
from tests.peers.shapes import SHAPES, Shape
from tests.peers.streams import Job, Streams, some_rows
from tests.servers import KafkaServer

pytestmark = pytest.mark.timeout(300)
#: Shapes that the long tests have, too.
_LONG = ("count, stopped with unread input", "two groupBy of one stream, optimised")
#: Rows that an application reads which is stopped before the end of its input.
EARLY = 60


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Streams]]:
    """The JVM that runs the applications, in a list, because a test that kills it starts another."""
    running = [Streams(tmp_path_factory.mktemp("streams"))]
    yield running
    running[0].close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in _LONG else pytest.mark.heavy) for name in SHAPES]
)
def test_a_shape_is_adopted_exactly_or_refused(
    kafka: KafkaServer, tmp_path: Path, streams: list[Streams], name: str
) -> None:
    """E25: the new job has what the application had, key by key. It goes on, is rolled back, and is given another
    number of tasks. A refusal names the store and the reason, and nothing is written."""
    shape = SHAPES[name]
    job = Job(kafka, shape.steps, shape.settings)
    had = run(job, shape, streams, tmp_path)
    new = adopt(job, shape, had, tmp_path)
    if new is not None:
        new.check()


def run(job: Job, shape: Shape, streams: list[Streams], directory: Path) -> dict[str, Content]:
    """Run the application as the shape says. Return what its stores had."""
    topics = {step["topic"]: None for step in shape.steps if "topic" in step}
    job.send(some_rows(topics, 1))
    had = job.run(streams[0])
    assert all(had.values()), "a store is empty"
    if shape.expired:
        live, had = had, recount(job.named, job.rows)
        assert all(live[store].items() < had[store].items() for store in had)
    elif known(shape.steps):
        assert not differences(had, recount(job.named, job.rows))
    rows = some_rows(topics, 2)
    if shape.ending == "early":
        job.send(rows)
        had = job.run(streams[0], EARLY)
    if shape.ending == "killed":
        job.send(rows)
        # its transactions end after 10 s
        job.run(streams[0], len(rows), hold=True, **{"commit.interval.ms": "9000"})
        streams[0].kill()
        streams[0] = Streams(directory)
        await_empty(job.kafka, job.name)
        wait_until(lambda: "a transaction is open" not in (job.adopter(directory).refusal("new") or ""), 60)
    if shape.ending == "aborted":
        job.send_and_abort(rows)
        job.send(rows)
        job.send_and_abort(rows, later=True)
        had = job.run(streams[0])
        assert not differences(had, recount(job.named, job.rows))
    return had


def adopt(job: Job, shape: Shape, had: Mapping[str, Content], directory: Path) -> New | None:
    """Adopt the job as the shape says. Return the new job, or None if it is refused with all options."""
    adopter, name = job.adopter(directory), f"{job.name}-new"
    options = [option.format(job=job.name) for option in shape.options]
    if shape.refused is not None:
        store, why = shape.refused
        before = topics_of(job.kafka, job.name)
        refused = adopter.refusal(name) or ""
        assert store in refused
        assert why in refused
        assert topics_of(job.kafka, job.name) == before
        if not options:
            return None
    config = adopter.init(name, *options, "--set", "task.checkpoint.retained=10", "--force")
    names = adopter.json(*options)["old_names"]
    adopter.run("--write", *options)
    adopted = {store: had[store] for store in (names.get(store, store) for store in config.stores)}
    assert had.keys() - adopted.keys() == set(shape.left)
    return New(adopter, job, adopted, names)
