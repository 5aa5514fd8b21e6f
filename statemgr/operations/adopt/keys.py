"""Compares the newest keys of an old job's stores with those of its input. Writes nothing.

- A store that an old job fills from a topic of its own (a repartition) has other keys than the input: a new job that
  goes on with the input does not find them.
- The keys show how the producers of the input choose a partition, which a rescale has to know.
- The source topic of a table may be the table's changelog, so that no changelog has its keys and values
  (``topology.optimization=all``). A store without a changelog leaves no state either.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from statemgr.errors import InvalidError
from statemgr.model.keys.partitioners import message_hashes, message_keys_of
from statemgr.operations.adopt.changelogs import listed
from statemgr.operations.adopt.copying import changes
from statemgr.operations.adopt.found import OldJob, Request
from statemgr.operations.adopt.old_topics import OldTopics

#: Offsets at the end of a partition that are read, and in how many partitions of a topic.
_OFFSETS = 1000
_TASKS = 4
#: Topics belong together if they share one key of so many.
_SHARED = 10
#: So many bits must agree before a partitioner counts as found.
_CERTAIN_BITS = 20
#: (task, key) → the hash of the newest value.
_Newest = dict[tuple[int, bytes], int]
#: Partitioner → the same, with the keys of messages that it finds in the keys of a store.
_ByForm = Mapping[str, _Newest]


def compared(
    old: OldTopics, request: Request, found: OldJob, internal: Collection[str]
) -> tuple[list[str], str | None]:
    """Check that the stores have the keys of the input, and that each table has a store.

    Args:
        internal: topics that the old job wrote for itself and the new job does not read.

    Returns: what the user should know; and how the producers of the input choose a partition, if the keys show it
        (:data:`statemgr.model.keys.partitioners.PRODUCERS`).

    Raises: InvalidError if a store or a table has not, and nobody has confirmed it; UnavailableError, AccessDenied.
    """
    samples = _Samples(old, found)
    inputs = {topic: samples.of_input(topic) for topic in found.input_topics}
    stores = {name: samples.of_store(name) for name in found.stores}
    if internal and any(inputs.values()):
        for name, forms in stores.items():
            if (
                any(forms.values())
                and name not in request.confirmed
                and not any(_any_shares(forms, of) for of in inputs.values())
            ):
                raise _other_keys(name, found, internal)
    notes = list(_input_notes(old, request, found, inputs, stores))
    fit = _producers(found, inputs, stores)
    if len(fit) == 1:
        notes.append(f"the keys of the stores are in the tasks that the partitioner {fit[0]} chooses")
    elif not fit:
        notes.append(
            "no known partitioner put the keys of the stores into their tasks: `statemgr rescale` will refuse the job"
        )
    return notes, fit[0] if len(fit) == 1 else None


def _input_notes(
    old: OldTopics, request: Request, found: OldJob, inputs: Mapping[str, _Newest], stores: Mapping[str, _ByForm]
) -> Iterator[str]:
    """Raises: as :func:`compared`."""
    tables = {store.topic.name for store in found.stores.values()}
    settings = old.describe(found.input_topics, with_settings=request.origin.tables_without_changelog)
    for topic, newest in inputs.items():
        if topic in tables or topic in request.confirmed or not newest:
            continue
        is_table = request.origin.tables_without_changelog and "compact" in settings[topic].config["cleanup.policy"]
        samples = [of for forms in stores.values() for of in forms.values()]
        if is_table and not any(_share(newest.items(), of.items()) for of in samples):
            raise _no_store(topic, found)
        if not any(_share(newest, of) for of in samples):
            yield (
                f"no store has the newest keys of {topic}, and its rows before the adopted offsets are not read again: "
                "if the old job kept state of them without a changelog, give earlier offsets with --offset"
            )


@dataclass(frozen=True)
class _Samples:
    """Reads the newest records of the old job's topics."""

    old: OldTopics
    found: OldJob

    def of_input(self, topic: str) -> _Newest:
        """Before the adopted offsets."""
        newest: _Newest = {}
        for task in range(min(self.found.tasks, _TASKS)):
            one = self.found.inputs.get(f"{topic}-{task}")
            if one is not None:
                newest |= self._newest(topic, task, task, one.offset)
        return newest

    def of_store(self, name: str) -> _ByForm:
        """With the keys of messages, by each partitioner that finds one in every key."""
        store, newest = self.found.stores[name], dict[tuple[int, bytes], int]()
        for task, partition in enumerate(store.partitions[:_TASKS]):
            start = max(partition.bounds.start, partition.end - _OFFSETS)
            start = self.old.first(store.topic, partition.number, start)
            decoder = store.proof.kind.decoding(self.found.committed(task))
            for batch in self.old.records(store.topic.name, partition.number, start, partition.end):
                newest |= {(task, key): hash(value) for key, value in changes(batch, decoder)}
        keys, found = [key for _, key in newest], {}
        for producers in self.found.origin.producers:
            with suppress(InvalidError):
                of_messages = message_keys_of(producers, store.proof.kind.key_serde)(keys)
                tasks = (task for task, _ in newest)
                found[producers] = dict(zip(zip(tasks, of_messages, strict=True), newest.values(), strict=True))
        return found

    def _newest(self, topic: str, task: int, partition: int, end: int) -> _Newest:
        start = max(self.old.bounds(topic, partition).start, end - _OFFSETS)
        return {
            (task, key): hash(value)
            for batch in self.old.pairs(topic, partition, start, end)
            for key, value in batch
            if key is not None
        }


def _producers(found: OldJob, inputs: Mapping[str, _Newest], stores: Mapping[str, _ByForm]) -> Sequence[str]:
    """Which partitioners put the keys into their tasks, if there are enough keys to tell. One of several that choose
    the same for each of these keys stands for them.
    """
    filled = [forms for forms in stores.values() if any(forms.values())]
    if sum(min(map(len, forms.values())) for forms in filled) * math.log2(found.tasks) < _CERTAIN_BITS:
        return found.origin.producers
    fit: dict[tuple[Sequence[int], ...], str] = {}
    for name in found.origin.producers:
        hashes, chosen = message_hashes(name), []
        for forms in filled:
            newest, shared = forms.get(name), [of for of in inputs.values() if _any_shares(forms, of)]
            if newest is None or (shared and not any(_share(newest, of) for of in shared)):
                break  # another one finds keys of the input in this store
            numbers = tuple(hashes([key for _, key in newest]))
            if any(number % found.tasks != task for number, (task, _) in zip(numbers, newest, strict=True)):
                break
            chosen.append(numbers)
        else:
            fit.setdefault(tuple(chosen), name)
    return list(fit.values())


def _any_shares(forms: _ByForm, newest: _Newest) -> bool:
    return any(_share(newest, of) for of in forms.values())


def _share(one: Collection[object], other: Collection[object]) -> bool:
    both = set(one) & set(other)
    return bool(both) and len(both) * _SHARED >= min(len(one), len(other))


def _other_keys(store: str, found: OldJob, internal: Collection[str]) -> InvalidError:
    return InvalidError(
        f"the store has other keys than the input in the same partitions: the old job filled it from "
        f"{listed(internal)}. A new job that reads {listed(found.input_topics)} does not find them",
        hint="write the rows to a topic with the keys of the store, and name it in task.inputs and its offsets with "
        "`statemgr adopt --offset`; or, if the new job looks up keys of its own, confirm it: `statemgr adopt --confirm "
        f"{store}`",
        topic=found.stores[store].topic.name,
        store=store,
    )


def _no_store(topic: str, found: OldJob) -> InvalidError:
    options = " ".join(f"--changelog {name}={store.topic.name}" for name, store in found.stores.items())
    return InvalidError(
        "the old job has read this topic, and no changelog has its keys and values: if the topic is the source of a "
        "table, it is the changelog of the table, too (topology.optimization=all)",
        hint=f"adopt it as a store, next to the others: `statemgr adopt {options} --changelog TABLE={topic}`; or, if "
        f"it is no table, confirm that: `statemgr adopt --confirm {topic}`",
        topic=topic,
    )
