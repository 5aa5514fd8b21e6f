"""Writes the new stores of a rescale to the new changelogs. Each function runs in a process of its own, and can be
repeated: it fences the earlier tries first, on all machines, and only then looks at what the partition has.

Memory is bounded by a transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from statemgr.backends.changelog.backup import deletes_of
from statemgr.backends.changelog.integrity import extended
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.ids import transactional_id
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.model.commit import Change
from statemgr.operations.rescale.plan import overtaken
from statemgr.operations.rescale.work import batches, read_copy
from statemgr.ports import TopicInfo
from statemgr.services import Services

#: Records and bytes of one transaction.
_MOST_RECORDS, _MOST_BYTES = 100_000, 64 * 1024 * 1024


def fill_changelog(services: Services, store: str, info: TopicInfo, task: int, directory: Path) -> ChangelogMarker:
    """Write a new store to its partition of the new changelog, after a delete of each key that is there already.

    Returns: the marker at its end. Raises: FencedError, RetryableError, OutcomeUnknownError; then it can be repeated.
        FencedError also if the changelog is that of the current layout: another rescale was faster.
    """
    with fenced_partition(services, store, info, task) as partition:
        with closing(CheckpointTopic(services.config, services.clock)) as log:
            markers = [record.current.marker(KAFKA_CHANGELOG, store) for record in log.read().values()]
        if any(isinstance(marker, ChangelogMarker) and marker.topic == info.name for marker in markers):
            raise overtaken(services.config)
        return partition.fill(directory)


@contextmanager
def fenced_partition(services: Services, store: str, info: TopicInfo, task: int) -> Iterator[NewPartition]:
    """A partition of a new changelog, after every earlier try to write to it is fenced."""
    config = services.config
    name = transactional_id(config.job_name, config.job_id, "rescale", store, str(task))
    with closing(TransactionalPublisher(config, name, services.clock)) as publisher:
        publisher.fence()
        yield NewPartition(services, store, info, task, publisher)


@dataclass(frozen=True)
class NewPartition:
    """A partition of a new changelog to which nobody else writes. Raises: as :func:`fill_changelog`."""

    services: Services
    store: str
    info: TopicInfo
    number: int
    publisher: TransactionalPublisher

    def fill(self, directory: Path) -> ChangelogMarker:
        """As :func:`fill_changelog`."""
        services, topic = self.services, self.info.name
        start, end = services.changelog().bounds(topic, self.number)
        begin = end
        marker = ChangelogMarker(topic, self.info.topic_id, self.number, end, begin)
        if end > start:
            marker = self.send(marker, deletes_of(services, topic, self.number, start, end))
        with read_copy(services, directory) as copy:
            return self.send(marker, batches(services, self.store, copy, None, None))

    def send(self, marker: ChangelogMarker, source: Iterable[Sequence[Change]]) -> ChangelogMarker:
        """Send changes after a marker, in transactions. Returns: the marker after them."""
        for some in _transactions(source):
            with self.publisher.transaction() as transaction:
                transaction.send_changes(self.info.name, self.number, some)
                marker = extended(marker, transaction.flush()[self.info.name, self.number])
        return marker


def _transactions(batches: Iterable[Sequence[Change]]) -> Iterator[list[Change]]:
    """The changes of each transaction."""
    some: list[Change] = []
    size = 0
    for batch in batches:
        some += batch
        size += sum(len(key) + len(value or b"") for key, value in batch)
        if len(some) >= _MOST_RECORDS or size >= _MOST_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
