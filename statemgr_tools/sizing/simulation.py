"""A discrete simulation of a job's commits. It shows what they wait for and which part is busiest. Pure; a fixed seed.

Each process commits its tasks together, every ``commit_s``. A commit passes these stages. Each one is a queue, in the
order of arrival, in front of one or more servers:

1. the process's link to the blob store, which background snapshots share
2. the blob store's requests per second, then the latency of the PUT; commits whose segments are inline skip 1 and 2
3. the transaction coordinator: a broker, which the task's transactional ID chooses
4. the leader of the checkpoint topic's only partition
5. after the publish, the removal of the TTL by the request threads of the process

A commit ends with stage 4. Stage 5 must keep up, but no commit waits for it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from statemgr_tools.sizing.resources import PUBLISH_S, Resources

#: Number of simulated intervals, after one that does not count.
_INTERVALS = 3
_SEED = 1
#: The 99.9th percentile of a PUT's latency divided by the median (FLIP-158's table: 3.2 s and 459 ms), and its position
#: in a normal distribution.
_TAIL, _SIGMAS = 3.2 / 0.459, 3.09


@dataclass(frozen=True, kw_only=True)
class Services:
    """The capacity of the parts that all processes share.

    Attributes:
        brokers: the number of brokers that coordinate transactions.
        transactions_per_s: publishes that one broker coordinates.
        topic_per_s: publishes that the leader of one partition accepts.
        store_per_s: PUTs and tag requests that the blob store accepts from the job.
    """

    brokers: int
    transactions_per_s: float
    topic_per_s: float
    store_per_s: float


@dataclass(frozen=True)
class Stage:
    """The load of a stage (above 1 it does not keep up), and the seconds that commits waited for it."""

    name: str
    busy: float
    waited_p50_s: float
    waited_p99_s: float


@dataclass(frozen=True)
class Outcome:
    """The simulated commits: their number, the seconds from their start to their checkpoint, and the stages."""

    commits: int
    p50_s: float
    p99_s: float
    longest_s: float
    stages: Sequence[Stage]

    @property
    def limit(self) -> Stage:
        """The busiest stage."""
        return max(self.stages, key=lambda stage: stage.busy)


class _Servers:
    """Servers behind one queue. Arrivals come in the order of their time."""

    def __init__(self, number: int = 1) -> None:
        self._free = [0.0] * number
        self.waits: list[float] = []

    def serve(self, arrival: float, seconds: float) -> float:
        """Serve one arrival. Returns: the time when the work is done."""
        start = max(arrival, heapq.heappop(self._free))
        heapq.heappush(self._free, start + seconds)
        self.waits.append(start - arrival)
        return start + seconds


@dataclass(slots=True)
class _Commit:
    """A commit in progress: its start, its arrival at the present stage, its task, and whether it has a blob."""

    now: float
    start: float
    task: int
    stored: bool


def simulate(plan: Resources, services: Services, *, together: bool) -> Outcome:
    """Simulate some intervals.

    Args:
        together: all processes commit at the same time, as after a common restart. Otherwise, their times differ.
    """
    given, commits, chance = plan.given, plan.commits, random.Random(_SEED)
    under_way = _begun(plan, chance, together=together)
    with_blob = [commit for commit in under_way if commit.stored]

    def queue(passing: list[_Commit], servers: Sequence[_Servers], seconds: float) -> list[_Servers]:
        """Let commits pass the servers of their task in the order of their arrival."""
        for commit in sorted(passing, key=lambda commit: commit.now):
            commit.now = servers[commit.task % len(servers)].serve(commit.now, seconds)
        return list(servers)

    links = queue(with_blob, [_Servers() for _ in range(given.processes)], _sending_s(plan))  # 1
    store = queue(with_blob, [_Servers()], _request_s(plan, services) / commits.sharing)  # 2
    for commit in with_blob:
        commit.now += chance.lognormvariate(math.log(given.put_s), math.log(_TAIL) / _SIGMAS) if given.put_s else 0.0
    brokers = queue(under_way, [_Servers() for _ in range(services.brokers)], 1 / services.transactions_per_s)  # 3
    topic = queue(under_way, [_Servers()], 1 / services.topic_per_s)  # 4
    took = sorted(c.now + PUBLISH_S - c.start for c in under_way if c.start >= given.commit_s)
    untags = [_Servers(given.parallelism) for _ in range(given.processes)]
    queue(with_blob, untags, given.put_s)  # 5
    rate = commits.commits_per_s
    stages = [
        _stage("link of a process", commits.uploaded_per_s / given.processes / given.bandwidth, links),
        _stage("requests of the blob store", (commits.puts_per_s + commits.untags_per_s) / services.store_per_s, store),
        _stage("transaction coordinators", rate / services.brokers / services.transactions_per_s, brokers),
        _stage("leader of the checkpoint topic", rate / services.topic_per_s, topic),
        _stage(
            "request threads of a process",
            commits.untags_per_s / given.processes * given.put_s / given.parallelism,
            untags,
        ),
    ]
    return Outcome(len(took), _at(took, 0.5), _at(took, 0.99), _at(took, 1.0), stages)


def _begun(plan: Resources, chance: random.Random, *, together: bool) -> list[_Commit]:
    """Return the commits of all intervals. The first interval does not count."""
    given, commits = plan.given, plan.commits
    phases = [0.0 if together else chance.uniform(0, given.commit_s) for _ in range(given.processes)]
    stored = float(commits.every_commit) or commits.chain.blobs / commits.commits_between
    found = []
    for task in range(given.tasks):
        for number in range(1 + _INTERVALS):
            if chance.random() < commits.active:
                start = phases[task % given.processes] + number * given.commit_s
                found.append(_Commit(start, start, task, given.blobs and chance.random() < stored))
    return found


def _sending_s(plan: Resources) -> float:
    """Return the seconds that a commit's blob takes on the link, next to background snapshots."""
    given, commits = plan.given, plan.commits
    if commits.every_commit:
        return commits.snapshot_bytes * given.stores / given.bandwidth
    others = (commits.uploaded_per_s - commits.segments_per_s) / given.processes
    size = commits.chain.bytes / max(commits.chain.blobs, 1) * given.stores
    return size / max(given.bandwidth - others, 0.01 * given.bandwidth)


def _request_s(plan: Resources, services: Services) -> float:
    """Return the seconds that the blob store needs for a commit's PUT, next to snapshots and the removal of TTLs."""
    commits = plan.commits
    requests = commits.puts_per_s + commits.untags_per_s
    first = commits.commits_with_blob_per_s / commits.sharing
    return 1 / max(services.store_per_s - (requests - first), 0.01 * services.store_per_s)


def _stage(name: str, busy: float, servers: Iterable[_Servers]) -> Stage:
    waits = sorted(wait for one in servers for wait in one.waits)
    return Stage(name, busy, _at(waits, 0.5), _at(waits, 0.99))


def _at(values: Sequence[float], part: float) -> float:
    return values[min(int(part * len(values)), len(values) - 1)] if values else 0.0
