"""The checker of histories accepts right ones, and rejects each kind of wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.clusters.checker import Commit, History, Read

A = Commit(
    name="a", task="t", base=None, inputs=["0"], reads={"k": None}, writes={"k": "1"}, outputs=["k=1"],
    began=1, ended=2, outcome="ok",
)  # fmt: skip
B = Commit(
    name="b", task="t", base="a", inputs=["1"], reads={"k": "1"}, writes={"k": "2"}, outputs=["k=2"],
    began=3, ended=4, outcome="ok",
)  # fmt: skip
#: stands where B does, and its client was killed
LOST = replace(B, name="lost", ended=9, outcome="unknown", outputs=["k=2 again"])
END = Read(task="t", found="b", content={"k": "2"}, began=10, ended=11)


def history(*commits: Commit, reads: list[Read] | None = None, outputs: tuple[str, ...] = ("k=1", "k=2")) -> History:
    """A history whose input is 0 and 1."""
    found = [END] if reads is None else reads
    return History(commits=list(commits), reads=found, inputs={"t": ["0", "1"]}, outputs={"t": outputs})


def test_right_histories() -> None:
    """Also with a commit whose client died, one that failed, and reads while commits were in progress."""
    failed = replace(LOST, name="failed", outcome="fail")
    during = Read(task="t", found="a", content={"k": "1"}, began=3.5, ended=5)
    assert history(A, B, LOST, failed, reads=[during, END]).problems() == []
    unknown = replace(B, outcome="unknown")
    assert history(A, unknown).problems() == []  # it was published nevertheless
    assert History(reads=[Read(task="t", found=None, content={}, began=1, ended=2)]).problems() == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        pytest.param(
            history(A, replace(B, reads={"k": None}, writes={"k": "1"}), reads=[replace(END, content={"k": "1"})]),
            "lost update: b has read k = None on a, where it was 1", id="lost update",
        ),
        pytest.param(
            history(A, B, reads=[replace(END, content={"k": "1"})]), "k = 1 instead of 2", id="a write is lost"
        ),
        pytest.param(history(A, replace(B, inputs=["0", "1"])), "input 0 was processed 2 times", id="doubled input"),
        pytest.param(history(A, replace(B, inputs=[])), "input 1 was skipped", id="skipped input"),
        pytest.param(history(A, replace(B, inputs=["1", "7"])), "input 7 was made up", id="made up input"),
        pytest.param(
            history(replace(A, inputs=["1"]), replace(B, inputs=["0"])), "in another order", id="input in another order"
        ),
        pytest.param(
            history(A, B, reads=[replace(END, found="a", content={"k": "1"}, began=5, ended=6), END]),
            "a read of a is stale: it began after b was known", id="stale read",
        ),
        pytest.param(
            history(A, B, reads=[replace(END, began=4.5, ended=5), replace(END, found="a", content={"k": "1"})]),
            "b was acknowledged and is lost", id="acknowledged commit is lost",
        ),
        pytest.param(
            history(replace(A, began=5, ended=6), B), "a is stale: it began after b was known", id="wrong order in time"
        ),
        pytest.param(
            history(A, B, LOST, outputs=("k=1", "k=2", "k=2 again")), "output without a commit: k=2 again",
            id="output without commit",
        ),
        pytest.param(history(A, B, outputs=("k=1", "k=1", "k=2")), "output without a commit: k=1", id="doubled output"),
        pytest.param(history(A, B, outputs=("k=1",)), "output is missing: k=2", id="missing output"),
        pytest.param(
            history(A, B, replace(LOST, outcome="ok")), "lost took effect next to b: both stand on a", id="two owners"
        ),
        pytest.param(
            history(A, B, LOST, reads=[replace(END, found="lost"), replace(END, began=20, ended=21)]),
            "lost took effect next to b: both stand on a", id="two owners, seen by a reader",
        ),
        pytest.param(history(A, replace(B, outcome="fail")), "b failed and took effect", id="failed and took effect"),
        pytest.param(history(A), "somebody has seen b, which nobody has committed", id="made up"),
        pytest.param(history(A, B, B), "two commits have the name b", id="a name that is used twice"),
    ],
)  # fmt: skip
def test_wrong_histories(wrong: History, problem: str) -> None:
    """Each contradiction is told."""
    assert any(problem in told for told in wrong.problems()), wrong.problems()


def test_many_contradictions_are_told_in_part() -> None:
    """A history of many wrong commits gives a short answer."""
    lost = [replace(A, name=f"a{number}", inputs=[]) for number in range(1000)]
    assert 20 < len(history(A, B, *lost).problems()) < 30
