"""Looks at the topics that an old job wrote for itself, such as those of a repartition. Writes nothing.

Rows in such a topic that the old job has not read yet have left its input, and are in no store. A new job that does not
read the topic would lose them.
"""

from __future__ import annotations

from collections.abc import Mapping

from statemgr.errors import InvalidError
from statemgr.ids import source_topic
from statemgr.operations.adopt.changelogs import of_others, running
from statemgr.operations.adopt.found import Request
from statemgr.operations.adopt.old_topics import OldTopics


def internal_topics(old: OldTopics, request: Request, offsets: Mapping[str, int]) -> dict[str, int]:
    """The topics that the old job wrote for itself and the new job does not read → their numbers of partitions.

    Args:
        offsets: source partition → next offset, of all topics that the old job reads.

    Raises: UnavailableError, AccessDenied.
    """
    if request.job is None:
        return {}
    read = {str(source_topic(source)) for source in offsets}
    names = [name for name in {*old.names(), *read} if request.origin.is_internal(name, request.job)]
    others = of_others(old, request, [name for name in names if name not in read])
    found = old.describe(set(names) - others - set(request.inputs))
    return {name: info.partitions for name, info in sorted(found.items())}


def refuse_waiting(old: OldTopics, internal: Mapping[str, int], offsets: Mapping[str, int]) -> None:
    """Check that the old job has read every topic that it wrote for itself to its end.

    Raises: InvalidError if rows wait, or a transaction is open; UnavailableError, AccessDenied.
    """
    for topic, partitions in internal.items():
        for partition in range(partitions):
            bounds = old.bounds(topic, partition)
            if bounds.stable < bounds.end:
                raise running(f"a transaction is open in its topic {topic}")
            # the marks of transactions are no rows
            start = max(offsets.get(f"{topic}-{partition}", 0), bounds.start)
            waiting = sum(map(len, old.pairs(topic, partition, start, bounds.stable)))
            if waiting:
                raise InvalidError(
                    f"{waiting} rows wait in a topic that the old job wrote for itself, from offset {start}: they have "
                    "left its input, and are in no store yet",
                    hint="start the old job without new input, and stop it when it has read the topic to its end; or "
                    "let the new job read the topic, too: add it to task.inputs. If another job writes it, say where "
                    f"it ends: `statemgr adopt --offset {topic}-{partition}={bounds.end}`",
                    topic=topic,
                    partition=partition,
                )
