"""One-shot permissions that wait on the checkpoint topic for the next opening of a task ↔ bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statemgr.errors import InvalidError
from statemgr.ids import task_index
from statemgr.model.codecs.schemas import shipped_schemas
from statemgr.model.codecs.wire import MARK, decode, encode, refuser
from statemgr.model.permissions import PERMISSIONS, Permissions

_KEY = "permit_key.v1"
_VALUE = "permit.v1"


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
        fields = {"job_name": self.job_name, "job_id": self.job_id, "task": self.task, "token": self.token}
        return encode(_KEY, fields)

    @property
    def value(self) -> bytes:
        """The bytes of its value."""
        return encode(_VALUE, {"permissions": list(self.permissions.names), "given_ms": self.given_ms})


def is_permit(key: bytes) -> bool:
    """Whether a record of the checkpoint topic is a permission."""
    return key.startswith(MARK + shipped_schemas().fingerprint(_KEY))


def decode_permit(key: bytes, value: bytes | None, topic: str, partition: int, offset: int) -> Permit:
    """The permission of a record; one without any permission where it was deleted. Raises: CorruptRecord."""
    refuse = refuser("permission", topic, partition, offset)
    at = decode(_KEY, key, refuse)
    found: dict[str, Any] = {"permissions": [], "given_ms": 0}
    if value is not None:
        found = decode(_VALUE, value, refuse)
    unknown = sorted(set(found["permissions"]) - set(PERMISSIONS))
    if unknown:
        raise refuse(f"the permission {unknown[0]!r} is unknown (is newer software about?)")
    try:
        task_index(at["task"])
    except InvalidError as error:
        raise refuse(error.message) from error
    return Permit(
        **at, permissions=Permissions(**dict.fromkeys(found["permissions"], True)), given_ms=found["given_ms"]
    )
