"""``restore-partial``: all files but one are already local, and a new process takes over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from statemgr_tools.bench.backups import backup_of
from statemgr_tools.bench.fresh import in_fresh_process
from statemgr_tools.bench.measure import Sample, interleaved
from statemgr_tools.bench.memory import fresh_place
from statemgr_tools.bench.registry import case
from statemgr_tools.bench.result import Line, Target, compared
from statemgr_tools.bench.session import GIBIBYTE, Session
from statemgr_tools.bench.states import state_of

#: The allowed share of the time of a full restore, in addition to hashing the local files.
_SHARE_OF_FULL = 0.1


@case("restore-partial")
def restore_partial(session: Session) -> Iterator[Line]:
    """1 GiB with all files but one on the machine: the bytes that a restore fetches, and its time."""
    state = state_of(session, session.bytes(GIBIBYTE))
    backup = backup_of(session, state, s3=True)

    def measure(number: int) -> Sample:
        with fresh_place(session, "partial", state.bytes) as (place, held):
            arguments = backup.arguments(place)
            full = in_fresh_process("statemgr_tools.bench.operations:restore", **arguments, held=str(held))
            missing = _smallest_table(place)
            hashed = in_fresh_process("statemgr_tools.bench.operations:hash_files", directory=str(missing.parent))
            missing.unlink()
            partial = in_fresh_process("statemgr_tools.bench.operations:restore", **arguments)
        return {
            "seconds": partial["seconds"],
            "bound": hashed["seconds"] + _SHARE_OF_FULL * full["seconds"],
            "bytes": partial["bytes_fetched"],
            "of": full["bytes_fetched"],
        }

    found = interleaved({"all files but one": measure}, session.rounds, session.report)["all files but one"]
    ours, full = found.median("bytes") / 1e6, found.median("of") / 1e6
    yield compared("restore-partial", ours, "MB fetched", "full restore", full, Target("at most", 0.05))
    bound = f"hashing the local files + {_SHARE_OF_FULL:.0%} of a full restore"
    yield compared("restore-partial", found.median(), "s", bound, found.median("bound"), Target("at most", 1))


def _smallest_table(directory: Path) -> Path:
    """Return the restored file that is removed."""
    tables = [path for path in directory.rglob("*.sst") if "committed" in path.parts]
    return min(tables, key=lambda path: path.stat().st_size)
