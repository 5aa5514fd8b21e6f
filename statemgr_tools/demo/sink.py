"""The demo's output: Parquet in a directory for each sequence number, which exists whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAME = "sequence="


def deliver(rows: DataFrame, sequence: int, directory: Path) -> None:
    """Write the rows to a temporary directory and rename it, unless this sequence or a newer one exists already.

    So a repeated sequence changes nothing, and a driver that was suspended cannot replace its successor's output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if sequence <= newest(directory):
        return
    temporary = tempfile.mkdtemp(prefix=".sequence-", dir=directory)
    rows.write.mode("overwrite").parquet(temporary)
    Path(temporary).rename(directory / f"{_NAME}{sequence:08d}")


def newest(directory: Path) -> int:
    """The newest sequence in the output, or 0."""
    return max((int(path.name.removeprefix(_NAME)) for path in directory.glob(f"{_NAME}*")), default=0)
