"""One-shot permissions: what one opening may do although it could lose state. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypedDict


class PermissionFlags(TypedDict, total=False):
    """The permissions as keyword arguments of ``open_task``, ``acquire`` and ``run``."""

    allow_empty_start: bool
    allow_new_stores: bool
    allow_removed_stores: bool
    allow_skipped_input: bool
    allow_serde_change: bool
    overwrite_changelog: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What one opening is permitted. None of these stands in a configuration file.

    Attributes:
        allow_empty_start: start empty where something says that there was state.
        allow_new_stores: start stores empty that the checkpoint does not list.
        allow_removed_stores: drop stores that the checkpoint lists.
        allow_skipped_input: go on although an input topic was deleted and created again; in a consumer loop also begin
            where the input begins if the checkpoint's offset is gone.
        allow_serde_change: go on with other serdes than those that the checkpoint's keys and values were written with.
        overwrite_changelog: delete what a changelog holds that no checkpoint of the job explains.
    """

    allow_empty_start: bool = False
    allow_new_stores: bool = False
    allow_removed_stores: bool = False
    allow_skipped_input: bool = False
    allow_serde_change: bool = False
    overwrite_changelog: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are given."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name))

    def __or__(self, other: Permissions) -> Permissions:
        """What either permits."""
        return Permissions(**dict.fromkeys((*self.names, *other.names), True))


#: Nothing that could lose state.
NO_PERMISSIONS = Permissions()
#: Every permission there is, by name.
PERMISSIONS = tuple(f.name for f in fields(Permissions))
