"""Draws how costs grow, with matplotlib (the extra ``bench``). Writes one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from statemgr.errors import PrerequisiteMissing
from statemgr_tools.bench.sweeps import Picture

_INCHES = (5.0, 3.6)
_COLUMNS = 2


def check_available() -> None:
    """Call this before the measurements. Raises: PrerequisiteMissing."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise PrerequisiteMissing(
            "plots need matplotlib, which is not installed", hint="pip install 'statemgr[bench]'"
        ) from error


def draw(pictures: Sequence[Picture], target: Path) -> None:
    """Draw all pictures to one file. Its suffix selects the format (``.svg``, ``.png``)."""
    from matplotlib.figure import Figure

    rows = -(-len(pictures) // _COLUMNS)
    figure = Figure(figsize=(_INCHES[0] * _COLUMNS, _INCHES[1] * rows), layout="constrained")
    for place, picture in enumerate(pictures, 1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        for curve in picture.curves:
            axes.plot([x for x, _ in curve.points], [y for _, y in curve.points], marker="o", label=curve.label)
        if picture.logarithmic:
            axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(picture.title, fontsize="medium")
        axes.set_xlabel(picture.x)
        axes.set_ylabel("seconds")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    # without a date, so that equal numbers give equal files
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
