"""What a check found. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from statemgr.errors import StatemgrError


class Status(StrEnum):
    """How bad it is: only a problem makes the exit status 1."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. ``fix`` is what to do or to run."""

    check: str
    status: Status
    detail: str
    fix: str | None = None


@contextmanager
def guarded(check: str, findings: list[Finding], *, fix: str | None = None) -> Iterator[None]:
    """Turn a typed error inside the block into a problem; its hint is the fix, unless another is given."""
    try:
        yield
    except StatemgrError as error:
        where = ", ".join(f"{name}={value}" for name, value in error.where.items() if name != "key")
        detail = f"{type(error).__name__}: {error.message}" + (f" [{where}]" if where else "")
        findings.append(Finding(check=check, status=Status.PROBLEM, detail=detail, fix=fix or error.hint))
