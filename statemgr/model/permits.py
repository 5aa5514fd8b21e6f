"""One-shot permissions that wait on the checkpoint topic for the next opening of a task ↔ bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statemgr.errors import InvalidError
from statemgr.ids import task_index
from statemgr.model.codecs.checkpoints import Place
from statemgr.model.codecs.generic import Codec
from statemgr.model.codecs.shapes import SHAPES
from statemgr.model.permissions import PERMISSIONS, Permissions

_KEY = Codec("permit_key.v1", dict, SHAPES)
_VALUE = Codec("permit.v1", dict, SHAPES)


@dataclass(frozen=True, slots=True)
class Permit:
    """What the next opening of a task is permitted, under a key of its own. ``given_ms``: epoch milliseconds."""

    job_name: str
    job_id: str
    task: str
    token: str
    permissions: Permissions
    given_ms: int

    @property
    def key(self) -> bytes:
        """The bytes of its key on the topic."""
        return _KEY.encode(
            {"job_name": self.job_name, "job_id": self.job_id, "task": self.task, "token": self.token}, task=self.task
        )

    @property
    def value(self) -> bytes:
        """The bytes of its value."""
        return _VALUE.encode({"permissions": self.permissions.names, "given_ms": self.given_ms}, task=self.task)


def is_permit(key: bytes) -> bool:
    """Whether a record of the checkpoint topic is a permission."""
    return key.startswith(_KEY.header)


def decode_permit(key: bytes, value: bytes | None, place: Place) -> Permit:
    """The permission of a record; one without any permission where it was deleted. Raises: CorruptRecord."""
    refuse = place.refuser("permission")
    at = _KEY.decode(key, refuse)
    found: dict[str, Any] = {"permissions": [], "given_ms": 0} if value is None else _VALUE.decode(value, refuse)
    unknown = sorted(set(found["permissions"]) - set(PERMISSIONS))
    if unknown:
        raise refuse(f"the permission {unknown[0]!r} is unknown (is newer software about?)")
    try:
        task_index(at["task"])
    except InvalidError as error:
        raise refuse(error.message) from error
    permissions = Permissions(**dict.fromkeys(found["permissions"], True))
    return Permit(**at, permissions=permissions, given_ms=found["given_ms"])
