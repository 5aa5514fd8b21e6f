"""Layouts that a rescale has replaced, in records of their own on the checkpoint topic. Pure.

A layout's number of tasks and its partitioner are in every checkpoint. Its *generation* is in the keys of its records,
and the newest generation is current. The records of a retired generation stay on the topic until garbage collection
deletes them together with the record here. Until then its state is kept, and the job can go back to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from statemgr.model.checkpoint import Layout
from statemgr.model.codecs.generic import Codec
from statemgr.model.codecs.records import Place
from statemgr.model.codecs.special_types import SHAPES

_KEY = Codec("retired_layout_key.v1", dict, SHAPES)
_VALUE = Codec("retired_layout.v1", dict, SHAPES)


@dataclass(frozen=True, slots=True)
class RetiredLayout:
    """A layout that is no longer current. ``retired_ms``: since when, in epoch milliseconds."""

    job_name: str
    job_id: str
    layout: Layout
    retired_ms: int

    @property
    def key(self) -> bytes:
        """The bytes of its key on the topic."""
        return _KEY.encode(
            {"job_name": self.job_name, "job_id": self.job_id, "layout_generation": self.layout.generation}
        )

    @property
    def value(self) -> bytes:
        """The bytes of its value."""
        layout = self.layout
        return _VALUE.encode({"tasks": layout.tasks, "partitioner": layout.partitioner, "retired_ms": self.retired_ms})


def is_retired_layout(key: bytes) -> bool:
    """Whether a record of the checkpoint topic is about a retired layout."""
    return key.startswith(_KEY.header)


def decode_retired_layout(key: bytes, value: bytes | None, place: Place) -> RetiredLayout:
    """The layout in a record; it has no tasks if the record is a delete. Raises: CorruptRecord."""
    refuse = place.refuser("retired layout")
    at = _KEY.decode(key, refuse)
    found: dict[str, Any] = (
        {"tasks": 0, "partitioner": "", "retired_ms": 0} if value is None else _VALUE.decode(value, refuse)
    )
    if at["layout_generation"] < 0 or found["tasks"] < 0:
        raise refuse("a number in it is negative")
    layout = Layout(at["layout_generation"], found["tasks"], found["partitioner"])
    return RetiredLayout(at["job_name"], at["job_id"], layout, found["retired_ms"])
