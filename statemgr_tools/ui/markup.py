"""Builds HTML from Python calls. Every value is escaped, unless this module made it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"input", "link", "meta", "rect", "line"})
Child = object


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def tag(element: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element. ``class_`` and ``aria_label`` mean ``class`` and ``aria-label``; None omits an attribute."""
    found = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if element in _VOID:
        return Markup(f"<{element}{found}>" if element not in ("rect", "line") else f"<{element}{found}/>")
    return Markup(f"<{element}{found}>{join(children)}</{element}>")


def join(children: Iterable[Child]) -> Markup:
    """Join children. None is left out, and a list stands for its items."""
    return Markup("".join(_child(child) for child in children))


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple):
        return join(child)
    return escape(str(child))


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f' {name}=""' if value is True else f' {name}="{escape(str(value))}"'


def page(title: str, navigation: Child, body: Child, refresh_s: int | None = None) -> bytes:
    """Return a complete document. ``refresh_s``: the browser reloads it after this many seconds."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="refresh", content=refresh_s) if refresh_s else None,
        tag("title", f"{title} · statemgr"),
        tag("link", rel="stylesheet", href="/style.css"),
    ]
    content = [
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag("header", tag("a", "statemgr", href="/", class_="brand"), navigation, tag("a", "Runbook", href="/runbook")),
        tag("main", tag("h1", title), body, id="main"),
        tag("footer", "This page only reads: it fences no owner, and changes nothing of the job."),
    ]
    document = "<!doctype html>" + tag("html", tag("head", *head), tag("body", *content), lang="en")
    return document.encode("utf-8", "xmlcharrefreplace")  # a lone surrogate has no bytes


def table(caption: str, headers: Iterable[str], rows: Iterable[Iterable[Child]], empty: str) -> Markup:
    """Return a table that scrolls sideways on a narrow screen, even by keyboard; or ``empty`` without rows."""
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    if not body:
        return tag("p", empty)
    head = tag("thead", tag("tr", *(tag("th", header, scope="col") for header in headers)))
    inside = tag("table", tag("caption", caption), head, tag("tbody", *body))
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Return names and values as cards."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs))


def prose(text: Child) -> Child:
    """Return a sentence with its parts between backticks, which are commands, keys or names, as code."""
    if isinstance(text, Markup) or not isinstance(text, str):
        return text
    parts = text.split("`")
    return [tag("code", part) if number % 2 and number < len(parts) - 1 else part for number, part in enumerate(parts)]


def alert(lines: Iterable[Child]) -> Markup | None:
    """Return a list of problems, or None if there are none."""
    items = [tag("li", prose(line)) for line in lines]
    return tag("ul", *items, class_="alert", role="status") if items else None
