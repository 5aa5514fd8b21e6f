"""An extension of griffe: docstrings with Sphinx's roles and literal blocks, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")


#: A section whose text begins on the line of its name.
_INLINE = re.compile(r"^(Raises|Returns|Yields): +(\S.*(?:\n +\S.*)*)", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """``:func:`f``` becomes code, ``::`` before a block becomes ``:``, and sections of one paragraph stay so."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = re.sub(r"^::\n", "", re.sub(r"(\w)::\n", r"\1:\n", text), flags=re.MULTILINE)
            obj.docstring.value = _INLINE.sub(lambda m: f"**{m[1]}:** {' '.join(m[2].split())}", text)
