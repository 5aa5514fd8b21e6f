"""Finds out of which kind a store is, from its changelog's name, settings and records. Writes nothing.

Names and settings are not enough, because users may choose both. So the records are read, too, from the first on, as
long as all of them look like one of the kinds. One record that does not is a proof against a kind. Nearly always the
first batch has it. What is not certain, the user confirms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from statemgr.errors import InvalidError, StatemgrError
from statemgr.model.commit import Change
from statemgr.operations.adopt.changelogs import refused
from statemgr.operations.adopt.copying import changes
from statemgr.operations.adopt.found import OldJob, OldStore, Proof, Request
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import Hint, Kind, OldRecord

#: Changes of a store that people are shown.
_SAMPLES = 3


def proved(old: OldTopics, request: Request, found: OldJob, store: OldStore) -> Proof:
    """Find out what a store is.

    Raises: InvalidError if it may be of a kind that cannot be adopted, or of several, and nobody has confirmed one;
        UnavailableError, CorruptRecord.
    """
    topic, kinds = store.topic.name, request.origin.kinds
    own = old.own_settings(topic) if len(kinds) > 1 else {}
    hint = request.origin.hint(topic, store.topic.config, own)
    wanted = request.confirmed.get(store.name)
    if wanted and wanted not in kinds:
        raise InvalidError(
            f"{request.origin.title} has no stores of the kind {wanted!r}",
            hint=f"confirm one of {', '.join(kinds)} with `statemgr adopt --confirm STORE=KIND`",
            store=store.name,
        )
    try:
        seen = _Seen({kind.name: kind for kind in kinds.values() if kind.looks is not None})
        seen.read(old, store)
        if wanted:
            kind, why = _confirmed(kinds[wanted], hint, seen)
        else:
            kind, why = _certain(next(iter(kinds.values())), hint, seen, is_confirmed=store.name in request.confirmed)
        samples = tuple(islice(seen.changes(kind, found), _SAMPLES))
    except _Doubt as doubt:
        raise _uncertain(request, store, hint, seen, str(doubt)) from None
    except StatemgrError as error:
        raise error.with_where(topic=topic, store=store.name) from None
    if kind.refused:
        raise refused(store.name, topic, why, [kind])
    newest = tuple(seen.newest_ms.get((kind.name, task)) for task in range(found.tasks))
    return Proof(kind, why, samples, newest, _retention_ms(kind, store.topic.config, own))


def kind_notes(found: OldJob) -> Iterator[str]:
    """What people should know about stores that are not plain."""
    for name, store in found.stores.items():
        kind = store.proof.kind
        if store.proof.why:
            yield f"store {name} has {kind.title}: {store.proof.why}"
        if kind.left_behind:
            yield f"store {name}: the new job does not get {kind.left_behind}"


class _Doubt(Exception):
    """Says why it is not certain what a store is."""


@dataclass
class _Seen:
    """What the records of a changelog look like.

    Attributes:
        possible: the kinds that every record can be of.
        shown: those that at least one record shows.
        against: kind → the offset of the first record that cannot be of it.
        first: a task and its first records.
        newest_ms: possible kind with times, task → the newest time of an entry.
    """

    possible: dict[str, Kind]
    shown: set[str] = field(default_factory=set)
    against: dict[str, int] = field(default_factory=dict)
    first: tuple[int, Sequence[OldRecord]] = (0, ())
    newest_ms: dict[tuple[str, int], int] = field(default_factory=dict)

    def read(self, old: OldTopics, store: OldStore) -> None:
        """Read until no kind is possible, and there are samples."""
        for task, partition in enumerate(store.partitions):
            start = old.first(store.topic, partition.number, partition.bounds.start)
            for batch in old.records(store.topic.name, partition.number, start, partition.end):
                self.first = self.first if self.first[1] else (task, batch)
                self._look(batch)
                if not self.possible:
                    return
                for name, kind in self.possible.items():
                    if kind.time_ms is not None:
                        self.newest_ms[name, task] = max(self.newest_ms.get((name, task), 0), *map(kind.time_ms, batch))

    def _look(self, batch: Sequence[OldRecord]) -> None:
        for name, kind in list(self.possible.items()):
            assert kind.looks is not None
            told = [*map(kind.looks, batch)]
            if False in told:
                del self.possible[name]
                self.against[name] = batch[told.index(False)].offset
            elif True in told:
                self.shown.add(name)

    def likely(self) -> list[str]:
        """The kinds that the records speak for."""
        return [name for name in self.possible if name in self.shown]

    def changes(self, kind: Kind, found: OldJob) -> Iterator[Change]:
        """Some changes, as a new store of this kind has them."""
        task, records = self.first
        made = changes(records, kind.decoding(found.committed(task)))
        return (change for change in made if change[1] is not None)


def _confirmed(kind: Kind, hint: Hint | None, seen: _Seen) -> tuple[Kind, str]:
    """Raises: InvalidError if it cannot be of that kind."""
    if hint is not None and hint.certain and kind.name not in hint.kinds:
        raise InvalidError(
            f"the store cannot have {kind.title}: {hint.why}",
            hint="name the changelogs to adopt with `statemgr adopt --changelog STORE=TOPIC`, without this one",
        )
    if kind.name in seen.against:
        raise InvalidError(
            f"the store was confirmed to have {kind.title}, but this record is none",
            hint="confirm another kind with `statemgr adopt --confirm STORE=KIND`",
            offset=seen.against[kind.name],
        )
    return kind, "this was confirmed"


def _certain(plain: Kind, hint: Hint | None, seen: _Seen, *, is_confirmed: bool) -> tuple[Kind, str]:
    """``is_confirmed``: without a kind, so that the store is plain if it can be. Raises: _Doubt."""
    likely = seen.likely()
    if hint is None and not likely:
        return plain, ""
    if hint is None and len(likely) == 1 and seen.possible[likely[0]].is_named:
        return seen.possible[likely[0]], ""
    if hint is None and all(seen.possible[name].is_named for name in likely):
        titles = " and ".join(seen.possible[name].title for name in likely)
        raise _Doubt(f"it has {titles}, which are {len(likely)} stores: give the topic to each with `--changelog`")
    if is_confirmed and (hint is None or not hint.certain):
        return plain, ""
    if hint is None:
        raise _Doubt(f"every record looks like one of {' or '.join(seen.possible[name].title for name in likely)}")
    found = [name for name in likely if name in hint.kinds]
    if hint.certain and len(found) == 1:
        return seen.possible[found[0]], f"{hint.why}, and every record looks like one of them"
    raise _Doubt(hint.why)


def _uncertain(request: Request, store: OldStore, hint: Hint | None, seen: _Seen, why: str) -> InvalidError:
    """The error for a store that the user has to confirm."""
    kinds = request.origin.kinds
    names = [*dict.fromkeys([*seen.likely(), *(hint.kinds if hint is not None else ())])]
    if hint is None or not hint.certain:
        names.append(next(iter(kinds)))
    able = [name for name in names if not kinds[name].refused and name not in seen.against]
    shown = "; ".join(f"{key[:40]!r} = {(value or b'')[:40]!r}" for key, value, *_ in seen.first[1][:_SAMPLES])
    confirm = " or ".join(f"`statemgr adopt --confirm {store.name}={name}`" for name in able)
    titles = " or ".join(kinds[name].title for name in names)
    cannot = "".join(
        f"; {kinds[name].title} cannot be adopted: {kinds[name].refused}" for name in names if kinds[name].refused
    )
    return InvalidError(
        f"it is not certain that the changelog has {titles}: {why}. It has, for example, {shown or 'no records'}"
        + cannot,
        hint="name the changelogs to adopt with `statemgr adopt --changelog STORE=TOPIC`, without this one"
        + (f"; or look at its records, and confirm what they are: {confirm}" if able else ""),
        topic=store.topic.name,
        store=store.name,
    )


def _retention_ms(kind: Kind, settings: Mapping[str, str], own: Mapping[str, str]) -> int | None:
    """How long the changelog keeps entries of a kind with times."""
    is_set = "delete" in settings["cleanup.policy"] or "retention.ms" in own
    found = int(settings.get("retention.ms", -1)) if kind.time_ms is not None and is_set else -1
    return found if found > 0 else None
