"""A hook of hatchling: the README for the page of the package index, where relative links lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link or a picture (``!``) whose target is a file of the repository.
_RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)")


class ReadmeOfTheIndex(MetadataHookInterface):
    """Leads links and pictures to the address ``Source`` of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field ``readme``."""
        source = metadata["urls"]["Source"]

        def lead(link: re.Match[str]) -> str:
            return f"{link[1]}{link[2]}({source}/{'raw' if link[1] else 'blob'}/main/{link[3]})"

        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _RELATIVE.sub(lead, text)}
