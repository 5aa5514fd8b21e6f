"""``python -m tests.compatibility``: write the corpus of the present version."""

from __future__ import annotations

import subprocess
import sys

from statemgr import __version__
from tests.compatibility.corpus import DIRECTORY
from tests.compatibility.jobs import write_jobs
from tests.compatibility.records import write_records

if __name__ == "__main__":
    if subprocess.check_output(["git", "tag", "--list", f"v{__version__}"]):
        sys.exit(f"{__version__} is released, and what it wrote never changes: raise the version first")
    directory = DIRECTORY / __version__
    directory.mkdir(exist_ok=True)
    for file in directory.iterdir():
        file.unlink()
    write_jobs(directory)
    write_records(directory / "records")
    for file in sorted(directory.iterdir()):
        print(f"{file.stat().st_size:8,}  {file.name}")
