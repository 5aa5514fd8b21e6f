"""Changes keys of a configuration file and keeps everything else in it: comments, order, spelling. Writes the file."""

from __future__ import annotations

import codecs
import difflib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.container import OutOfOrderTableProxy
from tomlkit.exceptions import TOMLKitError

from statemgr.config import JobConfig
from statemgr.config.loading import our_key, read_toml
from statemgr.errors import ConfigError
from statemgr.local.durable import sync, write_file
from statemgr.os_errors import Fault, translated

_CRLF = "\r\n"
_HINTS = {Fault.REFUSED: "run the command as the owner of the file, with write rights in its directory"}
#: A new value: a list of factories, a text or a number.
Changed = Sequence[str] | str | int


class TomlEdit:
    """The new text of a configuration file, in which some keys have other values.

    Raises: ConfigError if the file cannot be read, or cannot be changed without changing something else.
    """

    def __init__(self, path: Path, changes: Mapping[str, Changed]) -> None:
        self.path = path
        self.changes = changes
        before = JobConfig.from_mapping(read_toml(path))
        self._bytes = path.read_bytes()
        self.old = self._bytes.decode("utf-8-sig").replace(_CRLF, "\n")
        try:
            self.new = _changed(self.old, changes)
            found = tomlkit.parse(self.new).unwrap()
        except (TOMLKitError, TypeError, ValueError) as error:
            raise self._refused(changes) from error
        after = JobConfig.from_mapping(found)
        if after.to_mapping() != {**before.to_mapping(), **{key: _plain(value) for key, value in changes.items()}}:
            raise self._refused(changes)

    def diff(self) -> str:
        """A unified diff; empty if the file stays as it is. It has only the lines that change, because a line next to
        them may have a secret."""
        old, new = self.old.splitlines(keepends=True), self.new.splitlines(keepends=True)
        return "".join(difflib.unified_diff(old, new, str(self.path), f"{self.path} (new)", n=0))

    def write(self, before: str) -> Path:
        """Save the old file under another name, then replace it by rename. Owner, mode, line ends and a byte order mark
        stay.

        Args:
            before: what the old file was before, for its new name.

        Returns: where the old file is now.
        Raises: DiskFull, AccessDenied.
        """
        saved_as = self.path.with_name(f"{self.path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S}.{before}")
        with translated("the configuration file cannot be replaced", self.path, hints=_HINTS):
            if self.path.read_bytes() != self._bytes:
                raise ConfigError("the configuration file was changed meanwhile", hint="run the command again")
            target = self.path.resolve()  # replace the file that a link points to, and keep the link
            like = target.stat()
            for path, content in ((saved_as, self._bytes), (target, self._new_bytes())):
                write_file(path, content, like=like)
            sync(target.parent)
        return saved_as

    def _new_bytes(self) -> bytes:
        text = self.new.replace("\n", _CRLF) if _CRLF.encode() in self._bytes else self.new
        return (codecs.BOM_UTF8 if self._bytes.startswith(codecs.BOM_UTF8) else b"") + text.encode()

    def _refused(self, changes: Mapping[str, Changed]) -> ConfigError:
        lines = "; ".join(line_of(key, value) for key, value in changes.items())
        return ConfigError(f"{self.path} cannot be changed by this command", hint=f"change it by hand: {lines}")


def line_of(key: str, value: Changed) -> str:
    """A line of a configuration file."""
    return f"{key} = {tomlkit.item(_plain(value)).as_string()}"


def _plain(value: Changed) -> str | int | list[str]:
    return value if isinstance(value, str | int) else list(value)


def _changed(text: str, changes: Mapping[str, Changed]) -> str:
    document = tomlkit.parse(text)
    first = ""
    for key, changed in changes.items():
        value = _plain(changed)
        places = list(_places(document, "", key))
        for table, name in places:
            if table[name] != value:  # as it is written, perhaps over several lines with comments
                table[name] = value
        if not places and not _added(document, key.split("."), value):
            first += f'"{key}" = {tomlkit.item(value).as_string()}\n'
    return first + tomlkit.dumps(document)


def _added(document: Any, words: list[str], value: str | int | list[str]) -> bool:
    """Add a key to the table of the job, the task or the store. Returns: False if the file has no single such table."""
    parent = document
    for word in words[:-2]:
        parent = parent.get(word)
        if not isinstance(parent, dict):
            return False
    inner = parent.get(words[-2])
    if isinstance(inner, dict):
        inner[words[-1]] = value
    elif isinstance(parent, OutOfOrderTableProxy):
        return False  # its parts are in several places of the file, and none of them is the one to add to
    else:
        parent.append(tomlkit.key(words[-2:]), tomlkit.item(value))
    return True


def _places(table: Any, prefix: str, wanted: str) -> Iterator[tuple[Any, str]]:
    for name, value in table.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if our_key(path) == wanted and not isinstance(value, dict):
            yield table, name
        elif isinstance(value, dict):
            yield from _places(value, path, wanted)
