"""Operations: what people do to a job, next to it or while it is stopped. One folder for each.

A folder has everything about its operation: its steps, what it keeps, its command and its report. It stands on the
core, and on nothing of another operation: a tree without one of the folders works, and has the other commands.
``COMMANDS`` of a folder maps the name of a command to its place in the folder and its short help, so that ``--help``
loads no command.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules


def commands() -> dict[str, tuple[str, str]]:
    """Name → (module and attribute, short help), of all folders that are there."""
    return {
        name: (f"{found.name}.{place}", short_help)
        for found in iter_modules(__path__, f"{__name__}.")
        for name, (place, short_help) in import_module(found.name).COMMANDS.items()
    }
