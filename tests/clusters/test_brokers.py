"""Three brokers: replicas are lost and come back, leaders move, brokers restart in turn, elections are unclean.

Clients write down what they do, and in the end their history must be right (:mod:`tests.clusters.checker`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from confluent_kafka import ElectionType, KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic

from statemgr import JobConfig, StateManager
from statemgr.errors import MissingState, OutcomeUnknownError, RetryableError, StatemgrError, UnavailableError
from statemgr.kafka.topics import TopicSpec, changelog_topic_specs, checkpoint_topic_spec
from statemgr.phases import Phase
from statemgr.ports import BackupLost
from tests.clusters.brokers import PEERS, Cluster, running_cluster
from tests.clusters.recording import TaskClient, read_in_the_end, recorded
from tests.commits import failing, write
from tests.jobs import DUAL, contents, elsewhere, job_mapping
from tests.kafka_jobs import wait_until

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers that the tests of this module share. Each test leaves all of them running."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def replicated(cluster: Cluster, directory: Path, **more: object) -> JobConfig:
    """A job whose topics have three replicas."""
    mapping = {"task__commit__timeout__ms": 15_000, "task__checkpoint__replication__factor": 3}
    return JobConfig.from_mapping(job_mapping(cluster.server(), directory, **mapping | more))  # type: ignore[arg-type]


def own_topics(config: JobConfig) -> tuple[str, str]:
    """The checkpoint topic and the changelog."""
    return config.checkpoint_topic, config.stores["totals"].changelog_topic


def commits(client: TaskClient, count: int, deadline_s: float = 120.0) -> None:
    """Commit until this many were acknowledged. Errors must be ones that may pass."""
    done = [0]

    def another() -> bool:
        done[0] += client.commit()
        return done[0] >= count

    wait_until(another, deadline_s)
    unexpected = [error for error in client.errors if error.exit_status not in (1, 3)]
    assert unexpected == []


@contextmanager
def under_load(client: TaskClient) -> Iterator[None]:
    """Commit all the time while the block runs."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            client.commit()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(120)
    assert not thread.is_alive(), "it hangs"


def check(config: JobConfig, directory: Path) -> None:
    """Read everything from both backends. The history must be right."""
    read_in_the_end(config, directory, directory / "log", DUAL)
    history = recorded([directory / "log"])
    assert history.problems() == []
    assert any(commit.outcome == "ok" for commit in history.commits)


def test_two_replicas_are_lost_and_come_back(cluster: Cluster, tmp_path: Path) -> None:
    """FAULT 16: below min.insync.replicas commits are refused and may be tried again, and then everything goes on."""
    config = replicated(cluster, tmp_path, task__commit__timeout__ms=6000)
    client = TaskClient(config, tmp_path / "log")
    commits(client, 2)
    leader = cluster.leader(config.checkpoint_topic)
    followers = [broker for broker in cluster.brokers if broker.node != leader]
    for broker in followers:
        broker.process.suspend()  # a controller that is dead would take the quorum away, too
    try:
        assert not client.commit()
        assert client.errors[-1].exit_status == 3, client.errors
    finally:
        for broker in followers:
            broker.process.resume()
    commits(client, 3)
    client.close()
    cluster.settled(*own_topics(config))
    check(config, tmp_path)


def test_leaders_move_under_load(cluster: Cluster, tmp_path: Path) -> None:
    """Each partition is moved to another leader again and again, while a task commits all the time."""
    config = replicated(cluster, tmp_path)
    client = TaskClient(config, tmp_path / "log")
    commits(client, 1)
    moved = 0
    with under_load(client):
        for turn in range(6):
            broker = cluster.brokers[turn % 3]
            led = {topic: cluster.leader(topic) for topic in own_topics(config)}
            if broker.node not in led.values():
                continue
            broker.restart()  # a controlled shutdown moves all of its leaders
            moved += any(cluster.leader(topic) != was for topic, was in led.items())
            wait_until(lambda: cluster.in_sync(config.checkpoint_topic) == 3)
    assert moved
    commits(client, 1)
    client.close()
    check(config, tmp_path)


def test_brokers_are_killed_in_turn(cluster: Cluster, tmp_path: Path) -> None:
    """A rolling restart without good manners: each broker is killed, and started again, under load."""
    config = replicated(cluster, tmp_path)
    client = TaskClient(config, tmp_path / "log")
    commits(client, 1)
    with under_load(client):
        for broker in cluster.brokers:
            broker.kill()
            broker.start()
            cluster.settled(*own_topics(config))
    commits(client, 1)
    client.close()
    check(config, tmp_path)


@pytest.mark.parametrize("way", ["up", "down", None])
def test_a_leader_is_cut_off_from_the_other_brokers(
    cluster: Cluster, tmp_path: Path, way: Literal["up", "down"] | None
) -> None:
    """In one direction or both: the leader of the checkpoint topic cannot be followed, then the others take over, or
    commits wait until it is back."""
    config = replicated(cluster, tmp_path)
    client = TaskClient(config, tmp_path / "log")
    commits(client, 1)
    leader = cluster.brokers[cluster.leader(config.checkpoint_topic) - 1]
    with under_load(client):
        leader.proxies[PEERS].cut(*[way] if way else [])
        time.sleep(8)  # replicas leave the set of those in sync after 3 s, and the broker's session ends after 3 s
        leader.proxies[PEERS].heal()
        cluster.settled(*own_topics(config))
    commits(client, 1)
    client.close()
    check(config, tmp_path)


def test_an_unclean_election_under_an_owner_is_noticed(cluster: Cluster, tmp_path: Path) -> None:
    """The only replica with the newest checkpoints is lost, and somebody elects one without them: the owner says so
    instead of writing over them."""
    blobs = ["blob-store"]
    config = replicated(
        cluster,
        tmp_path,
        task__backup__factories=blobs,
        task__restore__factories=blobs,
        task__checkpoint__replication__factor=2,
    )
    make_on_two(cluster, checkpoint_topic_spec(config))
    first = cluster.brokers[0]
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.commit({"orders-0": 1})

        def commit(number: int) -> None:
            task.store("totals").put(b"number", b"%d" % number)
            wait_until(lambda: retried(partial(task.commit, {"orders-0": number})))

        lose_newest(cluster, config.checkpoint_topic, commit)
        task.store("totals").put(b"number", b"last")
        with pytest.raises(MissingState, match="lost its newest records"):
            wait_until(lambda: retried(partial(task.commit, {"orders-0": 6})))
    first.start()
    cluster.settled("__transaction_state")


def test_an_unclean_election_of_a_changelog_is_noticed(cluster: Cluster, tmp_path: Path) -> None:
    """A changelog loses its newest records while its owner lives, and a commit that fails takes their offsets: the
    owner notices it and writes the whole state again."""
    changelogs = ["kafka-changelog"]
    config = replicated(
        cluster,
        tmp_path,
        task__backup__factories=changelogs,
        task__restore__factories=changelogs,
        task__checkpoint__replication__factor=2,
    )
    (changelog,) = changelog_topic_specs(config)
    make_on_two(cluster, changelog)
    make_on_two(cluster, checkpoint_topic_spec(config), [3, 1])
    first = cluster.brokers[0]
    state: dict[int, dict[bytes, bytes | None]] = {}
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.commit({"orders-0": 1})

        def commit(number: int) -> None:
            write(task, state.setdefault(number, {b"%d" % number: b"value"}))
            wait_until(lambda: retried(partial(task.commit, {"orders-0": number})))

        lose_newest(cluster, changelog.name, commit)
        write(task, state.setdefault(6, {b"more %d" % number: b"value" for number in range(50)}))
        with failing(Phase.SEND_CHECKPOINT):  # the changelog has its records
            wait_until(lambda: fails_with(UnavailableError, "told to", partial(task.commit, {"orders-0": 6})))
        lost = "the newest record of the checkpoint is gone"
        wait_until(lambda: fails_with(BackupLost, lost, partial(task.commit, {"orders-0": 6})))
        wait_until(lambda: retried(partial(task.commit, {"orders-0": 6})))
    first.start()
    cluster.settled("__transaction_state")
    whole = {key: value for items in state.values() for key, value in items.items()}
    assert contents(elsewhere(config, tmp_path / "elsewhere", changelogs))[0] == {"totals": whole}


def make_on_two(cluster: Cluster, spec: TopicSpec, nodes: Sequence[int] = (1, 2)) -> None:
    """Create a topic that two brokers have, and that one of them may lead alone."""
    settings = {**spec.config, "min.insync.replicas": "1"}
    admin, made = cluster.admin(), NewTopic(spec.name, 1, replica_assignment=[list(nodes)], config=settings)
    admin.create_topics([made])[spec.name].result(30)
    wait_until(lambda: spec.name in admin.list_topics(timeout=60).topics)


def lose_newest(cluster: Cluster, topic: str, commit: Callable[[int], None]) -> None:
    """Let the first broker alone have four commits, kill it, and elect the second one, which lacks them."""
    first, second, _ = cluster.brokers
    second.kill()
    wait_until(lambda: cluster.in_sync(topic) == 1)
    for number in range(2, 6):
        commit(number)
    first.kill()
    second.start()
    wait_until(lambda: cluster.leader(topic) == -1)
    wait_until(lambda: elected(cluster, TopicPartition(topic, 0), second.node))


def elected(cluster: Cluster, place: TopicPartition, node: int) -> bool:
    """Ask for an unclean election, as an administrator would. Returns: whether the node leads."""
    admin = cluster.admin()
    with suppress(KafkaException, TimeoutError):
        admin.elect_leaders(ElectionType.UNCLEAN, [place]).result(10)
    return cluster.leader(place.topic) == node


def retried(commit: Callable[[], object]) -> bool:
    """Whether a commit was made. Raises: what is not worth another try."""
    try:
        commit()
    except (RetryableError, OutcomeUnknownError):
        return False
    return True


def fails_with(kind: type[StatemgrError], text: str, commit: Callable[[], object]) -> bool:
    """Whether a commit fails with an error, and not with another one that may pass."""
    try:
        commit()
    except (RetryableError, OutcomeUnknownError) as error:
        return isinstance(error, kind) and text in error.message
    raise AssertionError("it was published")
