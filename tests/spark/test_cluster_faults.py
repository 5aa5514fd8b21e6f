"""State and output stay exact when executors with their own disks die, straggle or lose files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statemgr.phases import Phase
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS
from tests.servers import KafkaServer
from tests.spark.cluster import Cluster, Standalone
from tests.spark.conftest import Pipeline, make_pipeline

pytestmark = pytest.mark.long

#: The kind of commit, the factory that restores it, and the phases that only attempts of this kind have.
KINDS = {
    "segments": (SEGMENTS, "blob-store", [Phase.APPLY_SEGMENTS, Phase.PUT_SEGMENTS, Phase.LOCAL_COPY]),
    "snapshots": (SNAPSHOTS, "blob-store", [
        Phase.GET_INDEX, Phase.FETCH, Phase.VERIFY, Phase.SWAP, Phase.OPEN, Phase.FLUSH, Phase.CHECKPOINT_DIR,
        Phase.DIFF, Phase.UPLOAD, Phase.PUT_INDEX, Phase.PREPARED,
    ]),
    "changelog": (SNAPSHOTS, "kafka-changelog", [Phase.REPLAY]),
}  # fmt: skip
CASES = [pytest.param(kind, phase, id=f"{kind}-{phase}") for kind, (_, _, phases) in KINDS.items() for phase in phases]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start two executors with one core each. The tests share the session."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def jobs(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pipeline]:
    """Return a factory that makes one job of each kind."""
    made: dict[str, Pipeline] = {}

    def job(kind: str) -> Pipeline:
        if kind not in made:
            commits, factory, _ = KINDS[kind]
            directory = tmp_path_factory.mktemp(kind)
            made[kind] = make_pipeline(None, kafka, directory, tasks=4, kind=commits, restore=[factory])
        return made[kind]

    return job


def exact(job: Pipeline) -> None:
    """Check that state and output equal the input, in both backends."""
    assert job.outputs.counts() == job.produced
    for factory in DUAL:
        assert job.state(factory) == job.produced


@pytest.mark.parametrize(("kind", "phase"), CASES)
def test_an_executor_is_killed_in_an_attempt(
    cluster: Cluster, jobs: Callable[[str], Pipeline], tmp_path: Path, kind: str, phase: Phase
) -> None:
    """An executor dies with its disk at this phase. Another starts with an empty disk, and the result stays exact."""
    job = jobs(kind)
    if not job.produced:
        job.produce(80)
        cluster.run(job, ["tests.spark.conftest:count"], per_batch=20)
    job.produce(40)

    cluster.run(job, ["tests.spark.faults:KilledIn", str(tmp_path), phase], disk=str(phase))

    seen = sorted(one.name for one in tmp_path.iterdir())
    assert f"killed-{phase}" in seen, " ".join(seen)
    exact(job)


@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_shuffle_files_are_lost_in_a_batch(cluster: Cluster, kafka: KafkaServer, tmp_path: Path, adaptive: str) -> None:
    """If shuffle files vanish after some tasks, Spark reads the input again for the others, with and without AQE."""
    job = make_pipeline(None, kafka, tmp_path, tasks=6)
    for number in (1, 2):
        notes = tmp_path / f"notes-{number}"
        notes.mkdir()
        job.produce(120)
        cluster.run(
            job,
            ["tests.spark.faults:LosingShuffle", str(tmp_path), str(cluster.disks)],
            notes=str(notes),
            conf={"spark.sql.adaptive.enabled": adaptive},
        )
        assert (tmp_path / f"{number}-lost").exists()
        runs = len(list(notes.iterdir()))
        assert runs > 3, f"{runs} runs of the tasks that read the topic's 3 partitions"
    exact(job)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Standalone]:
    """Start workers on two hosts."""
    made = Standalone(tmp_path / "standalone")
    yield made
    made.close()


@pytest.mark.heavy
def test_executors_come_and_go_with_the_load(two_hosts: Standalone, kafka: KafkaServer, tmp_path: Path) -> None:
    """Dynamic allocation: an idle query releases all executors, and later ones start with empty disks."""
    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.timeout": "10s",
        "spark.dynamicAllocation.executorIdleTimeout": "10s",
        "spark.dynamicAllocation.schedulerBacklogTimeout": "1s",
        "spark.dynamicAllocation.maxExecutors": "2",
    }
    seen = tmp_path / "seen"
    seen.mkdir()
    cluster = Cluster(tmp_path / "driver", two_hosts.master, settings)
    try:
        job = make_pipeline(None, kafka, tmp_path, tasks=4, restore=["blob-store"])
        executors: set[str] = set()
        for number in range(2):
            job.produce(80)
            busy = ["tests.spark.faults:Busy", str(seen)]
            first, *_ = cluster.run(job, busy, per_batch=40, disk=f"state-{number}")["reports"]
            exact(job)
            used = {one.name for one in seen.iterdir()} - executors
            assert used, "Spark used an executor of the run before"
            executors |= used
            factories = {one["factory"] for task in first["tasks"] for one in task["restored"]}
            assert factories == ({"blob-store"} if number else {"empty"})
            gone = cluster.ask({"kind": "executors", "wanted": 0, "timeout": 300})
            assert gone == {"executors": 0}
        assert len(executors) > 2, "a busy query had one executor at a time"
    finally:
        cluster.close()


@pytest.mark.heavy
def test_speculative_attempts_and_a_straggler(two_hosts: Standalone, kafka: KafkaServer, tmp_path: Path) -> None:
    """When Spark starts a straggler a second time, exactly one of the two attempts is published.

    Either the second attempt wins, or both have prepared their commits before either returns. Workers are not reused.
    """
    settings = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.minTaskRuntime": "10ms",
        "spark.python.worker.reuse": "false",
    }
    cluster = Cluster(tmp_path / "driver", two_hosts.master, settings)
    try:
        job = make_pipeline(None, kafka, tmp_path, tasks=4)
        for both in (False, True, False, True):
            job.produce(80)
            cluster.run(job, ["tests.spark.faults:Straggling", str(tmp_path), both])
            exact(job)
        assert {f"{sequence}-fast" for sequence in (1, 2, 3, 4)} <= {one.name for one in tmp_path.iterdir()}
    finally:
        cluster.close()
