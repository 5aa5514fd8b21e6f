"""Kinds of stores of other stream processors: what their records look like, and what they become. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from statemgr.model.commit import Change
from statemgr.model.expiry import expiry_bytes


class OldRecord(NamedTuple):
    """One record of an old job's changelog, as Kafka has it. There are millions."""

    key: bytes
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    offset: int
    timestamp_ms: int = 0


class Skip(Enum):
    """Why a record of the old changelog is no change of the state."""

    BOOKKEEPING = "bookkeeping of the old job"
    UNCOMMITTED = "made from input that the old job did not commit"
    EXPIRED = "expired"
    OLDER = "an older version of a value"


class Unproved(NamedTuple):
    """A change that may have been made from input that the old job did not commit: the record does not say."""

    key: bytes
    value: bytes | None


Decoded = Change | Unproved | Skip
#: Whether a record can be one of some kind of store; None if it does not tell.
Looks = Callable[[OldRecord], bool | None]
#: Takes the records of one partition of a changelog, in their order. Raises: InvalidError if one is of another kind.
Decoder = Callable[[OldRecord], Decoded]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of store.

    Attributes:
        name: what people confirm: ``--confirm STORE=NAME``.
        title: what a store of this kind has, for messages.
        looks: whether a record can be one of this kind; None if every record can.
        refused: why such a store cannot be adopted: the end of a sentence about it; empty if it can.
        decoder: makes the decoder of one partition, from the topics that the old job has read → the next offset in the
            partition of the same number; None if the records are plain keys and values already.
        with_expiry: the same for a store with a time to live, if the records have an expiry of their own: its values
            begin with it.
        is_named: whether one record that shows the kind proves it.
        remembers: whether a decoder has to take the records of a partition from the first on.
        key_serde: the serde of the new store's keys; ``bytes`` if the application chooses it.
        time_ms: the time of an entry, from which its retention counts; None if entries are kept for ever. Such a
            changelog may have lost its oldest records.
        left_behind: what of such a store the new job does not get; empty if it gets everything.
    """

    name: str
    title: str
    looks: Looks | None = None
    refused: str = ""
    decoder: Callable[[Mapping[str, int]], Decoder] | None = None
    with_expiry: Callable[[Mapping[str, int]], Decoder] | None = None
    is_named: bool = False
    remembers: bool = False
    key_serde: str = "bytes"
    time_ms: Callable[[OldRecord], int] | None = None
    left_behind: str = ""

    def decoding(self, committed: Mapping[str, int]) -> Decoder | None:
        """The decoder of one partition; None if the records are plain keys and values already."""
        return None if self.decoder is None else self.decoder(committed)


#: The key and the value of each record are those of the store.
PLAIN = Kind(name="plain", title="plain keys and values")
ONLY_PLAIN: Mapping[str, Kind] = {PLAIN.name: PLAIN}


class Hint(NamedTuple):
    """What the name and the settings of a changelog say about its kind.

    Attributes:
        kinds: the names of the kinds that it can be of.
        why: the end of a sentence about the changelog.
        certain: whether it can be of no other kind. Names and settings that users choose only make others unlikely.
    """

    kinds: Sequence[str]
    why: str
    certain: bool = False


def kafka_deletes(settings: Mapping[str, str]) -> Hint | None:
    """What it says about a changelog if Kafka deletes old keys by itself: it is of no kind that keeps its entries."""
    if "delete" not in settings.get("cleanup.policy", ""):
        return None
    policy = settings["cleanup.policy"]
    return Hint((), f"its cleanup.policy is {policy}, so that Kafka deletes old keys by itself", certain=True)


def expiring(decoder: Decoder, time_ms: Callable[[OldRecord], int], *, life_ms: int, now_ms: int) -> Decoder:
    """A decoder whose values begin with their expiry (:mod:`statemgr.model.expiry`).

    Args:
        life_ms: how long an entry lives after its time.
        now_ms: what has expired by then is left out.
    """

    def decode(record: OldRecord) -> Decoded:
        made = decoder(record)
        if isinstance(made, Skip) or made[1] is None:
            return made
        expiry_ms = time_ms(record) + life_ms
        return Skip.EXPIRED if expiry_ms <= now_ms else (made[0], expiry_bytes(expiry_ms) + made[1])

    return decode
