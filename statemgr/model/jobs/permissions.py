"""One-shot permissions: what one opening may do although it could lose state. Pure.

A caller passes them, or a :class:`Permit` waits on the checkpoint topic for the next opening of a task. A permit can
also reserve a task for ``statemgr adopt``: then nobody else may open it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypedDict, cast

from statemgr.errors import InvalidError
from statemgr.ids import task_index
from statemgr.model.codecs.generic import Codec
from statemgr.model.codecs.records import Place
from statemgr.model.codecs.special_types import SHAPES

_KEY = Codec("permit_key.v1", dict, SHAPES)
_VALUE = Codec("permit.v1", dict, SHAPES)


class PermissionFlags(TypedDict, total=False):
    """The permissions as keyword arguments of ``open_task``, ``acquire`` and ``run``."""

    allow_empty_start: bool
    allow_new_stores: bool
    allow_removed_stores: bool
    allow_skipped_input: bool
    allow_skipped_output: bool
    allow_serde_change: bool
    overwrite_changelog: bool
    allow_repeated_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What one opening is permitted. A configuration file cannot permit any of it.

    Attributes:
        allow_empty_start: start empty although something shows that there was state.
        allow_new_stores: start stores empty if the checkpoint does not list them.
        allow_removed_stores: drop stores that the checkpoint lists.
        allow_skipped_input: continue although an input topic was deleted and created again. A consumer loop also starts
            where the input begins if the checkpoint's offset is gone, and a query on Spark may leave out a topic.
        allow_skipped_output: a query on Spark does not deliver the rows of its last batch again, whose blobs are lost.
        allow_serde_change: continue with other serdes than those that wrote the checkpoint's keys and values.
        overwrite_changelog: delete records of a changelog that no checkpoint of the job explains.
        allow_repeated_input: begin at the offsets of an adoption although the old job has gone on since.
    """

    allow_empty_start: bool = False
    allow_new_stores: bool = False
    allow_removed_stores: bool = False
    allow_skipped_input: bool = False
    allow_skipped_output: bool = False
    allow_serde_change: bool = False
    overwrite_changelog: bool = False
    allow_repeated_input: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those that are given."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name))

    @property
    def flags(self) -> PermissionFlags:
        """Those that are given, as keyword arguments."""
        return cast("PermissionFlags", dict.fromkeys(self.names, True))

    def __or__(self, other: Permissions) -> Permissions:
        """What either permits."""
        return Permissions(**dict.fromkeys((*self.names, *other.names), True))


#: Nothing that could lose state.
NO_PERMISSIONS = Permissions()
#: Every permission there is, by name.
PERMISSIONS = tuple(f.name for f in fields(Permissions))
#: Stands in a permit in place of permissions: only ``statemgr adopt`` may open the task.
_ADOPTION = "adoption"


@dataclass(frozen=True, slots=True)
class Permit:
    """Permissions for the next opening of a task, in a record with its own key. ``given_ms``: epoch milliseconds.

    ``adoption``: it permits nothing. An adoption has begun, and until it publishes, only it may open the task.
    ``unknown``: words of newer software, which is the only one that may open the task.
    """

    job_name: str
    job_id: str
    task: str
    token: str
    permissions: Permissions
    given_ms: int
    adoption: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What its record says."""
        return (_ADOPTION,) if self.adoption else (*self.permissions.names, *self.unknown)

    @property
    def key(self) -> bytes:
        """The bytes of its key on the topic."""
        return _KEY.encode(
            {"job_name": self.job_name, "job_id": self.job_id, "task": self.task, "token": self.token}, task=self.task
        )

    @property
    def value(self) -> bytes:
        return _VALUE.encode({"permissions": self.names, "given_ms": self.given_ms}, task=self.task)


def is_permit(key: bytes) -> bool:
    """Whether a record of the checkpoint topic is a permit."""
    return key.startswith(_KEY.header)


def decode_permit(key: bytes, value: bytes | None, place: Place) -> Permit:
    """The permit in a record. It permits nothing if the record is a delete. Raises: CorruptRecord."""
    refuse = place.refuser("permission")
    at = _KEY.decode(key, refuse)
    found: dict[str, Any] = {"permissions": [], "given_ms": 0} if value is None else _VALUE.decode(value, refuse)
    adoption = found["permissions"] == [_ADOPTION]
    names = set() if adoption else set(found["permissions"])
    unknown = tuple(sorted(names.difference(PERMISSIONS)))
    try:
        task_index(at["task"])
    except InvalidError as error:
        raise refuse(error.message) from error
    permissions = Permissions(**dict.fromkeys(names.intersection(PERMISSIONS), True))
    return Permit(**at, permissions=permissions, given_ms=found["given_ms"], adoption=adoption, unknown=unknown)
