"""The page about migrations says what comes of adopting each shape of an application that the tests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.quix import QUIX
from tests.peers.samza_shapes import SAMZA
from tests.peers.shapes import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


OUTCOMES = {
    "Kafka Streams": {name: shape.outcome for name, shape in SHAPES.items()},
    "Quix Streams": {name: shape.outcome for name, shape in QUIX.items()},
    "Samza": {name: shape.outcome for name, shape in SAMZA.items()},
}


@pytest.mark.parametrize("heading", OUTCOMES)
def test_every_shape_has_its_outcome(heading: str) -> None:
    """The table of each origin has the declared outcomes, in their order."""
    _, _, after = PAGE.read_text().partition(f"\n| shape of {heading} | outcome |\n|---|---|\n")
    assert after.partition("\n\n")[0].rstrip() == "\n".join(
        f"| {name} | {said} |" for name, said in OUTCOMES[heading].items()
    )
