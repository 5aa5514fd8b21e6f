"""The options of the data sources, checked before anything is read. Every error names the option."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from statemgr import JobConfig
from statemgr.errors import ConfigError, InvalidError, StatemgrError
from statemgr.ids import CheckpointId, task_index, task_name


@dataclass(frozen=True)
class Options:
    """The options that a query set for the source ``source``. ``names`` are the options that the source has."""

    source: str
    names: Sequence[str]
    given: Mapping[str, str]

    @classmethod
    def of(cls, source: str, names: Sequence[str], given: Mapping[str, str]) -> Options:
        """Read Spark's options, whose names have any case. Raises: InvalidError for an unknown option."""
        known = {name.lower(): name for name in names}
        found = {}
        for name, value in given.items():
            if name.lower() not in known:
                near = get_close_matches(name.lower(), known, n=1)
                meant = f"did you mean {known[near[0]]}? " if near else ""
                raise InvalidError(
                    f"the source {source} has no option {name!r}",
                    hint=f"{meant}it has {', '.join(names)}",
                    option=name,
                )
            found[known[name.lower()]] = value.strip()
        return cls(source, names, found)

    def config(self, store: str | None = None) -> JobConfig:
        """Return the job from the file or JSON object in ``config``. With ``store``, it restores only from ``backend``.

        Raises: InvalidError, ConfigError.
        """
        given = self.given.get("config")
        if not given:
            raise InvalidError(
                f"the source {self.source} needs the job's configuration",
                hint="set it to the path of the job's TOML file, or to the mapping as JSON",
                option="config",
            )
        backend = self.given.get("backend")
        overrides = {f"stores.{store}.restore.factories": [backend]} if backend and store else {}
        try:
            if not given.startswith("{"):
                return JobConfig.from_file(given, overrides)
            return JobConfig.from_mapping(json.loads(given), overrides)
        except json.JSONDecodeError as error:
            raise InvalidError(
                f"the configuration is not JSON: {error}",
                hint="set it to the path of the job's TOML file, or to the mapping as JSON",
                option="config",
            ) from None
        except ConfigError as error:
            raise error.with_where(option="backend" if backend and backend in str(error) else "config") from None

    def store(self, config: JobConfig, default: str | None = None) -> str:
        """Return the store to read: ``store``, else ``default``, else the only one. Raises: InvalidError."""
        given = self.given.get("store") or default
        if given is None and len(config.stores) == 1:
            return next(iter(config.stores))
        if given is None:
            raise InvalidError(
                "the job has several stores", hint=f"set .option('store', …) to {_any(config.stores)}", option="store"
            )
        if given not in config.stores:
            raise unknown("store", given, config.stores, "the job has no store")
        return given

    def tasks(self, config: JobConfig) -> tuple[str, ...]:
        """Return the tasks in ``task``: names or numbers, separated by commas; all if not set. Raises: InvalidError."""
        names = [part.strip() for part in self.given.get("task", "").split(",") if part.strip()]
        tasks = [task_name(int(name)) if name.isdecimal() and len(name) < 10 else name for name in names]
        for task in tasks:
            try:
                there = task_index(task) < config.tasks
            except InvalidError:
                there = False
            if not there:
                raise unknown("task", task, [task_name(i) for i in range(config.tasks)], "the job has no task")
        return tuple(tasks)

    def checkpoint(self, name: str) -> str | None:
        """Return a checkpoint's ID, or None if the option is not set. Raises: InvalidError."""
        given = self.given.get(name)
        try:
            return None if not given else str(CheckpointId.parse(given))
        except StatemgrError as error:
            raise error.with_where(option=name) from None

    def flag(self, name: str) -> bool:
        """Return an option that is ``true`` or ``false``. Raises: InvalidError."""
        given = self.given.get(name, "false").lower()
        if given not in ("true", "false"):
            raise InvalidError(f"{given!r} is neither true nor false", hint="use true or false", option=name)
        return given == "true"


def unknown(option: str, given: str, known: Iterable[str], message: str) -> InvalidError:
    """Return the error for an unknown name, with the nearest known name."""
    names = list(known)
    near = get_close_matches(given, names, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return InvalidError(f"{message} {given!r}", hint=f"{meant}choose {_any(names)}", option=option)


def _any(names: Iterable[str], most: int = 10) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f", … ({len(listed)} in all)" if len(listed) > most else "") or "none"
