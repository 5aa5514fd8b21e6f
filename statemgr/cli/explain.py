"""``statemgr explain``: prints what the installed documentation says about a kind of error, or about a fault of a job.

The pages come with the package, so that nothing here needs a network.
"""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from posixpath import normpath

import click

from statemgr import errors
from statemgr.errors import InvalidError, MissingError, StatemgrError

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
#: A link to a file of the repository that is no page.
_NO_PAGE = re.compile(r"\]\(((?:\.\./|\w+/|\w+\.svg)[^)\s]*)\)")


@click.command("explain")
@click.argument("topic", nargs=-1)
def command(topic: tuple[str, ...]) -> None:
    """Explain a kind of error (`UnavailableError`), a fault of a job (`broker gone`), a topic of operations (`a poison
    message`) or a configuration key (`task.commit.ms`).

    Also prints a whole page, such as one that a hint names (`docs/security.md`). Without TOPIC, list all
    topics but the keys.
    """
    found = {**sections("errors"), **sections("runbook"), **sections("operations")}
    if not topic:
        click.echo("\n".join([*found, *(f"docs/{name}.md" for name in pages())]))
        return
    asked = anchor(" ".join(topic)).removeprefix("docs/").removesuffix(".md")
    known = {**{name: page(name) for name in pages()}, **{anchor(title): text for title, text in found.items()}}
    if asked not in known and (row := _row_of(" ".join(topic))):
        known[asked] = row
    if asked not in known:
        near = get_close_matches(asked, known, n=1)
        raise InvalidError(
            f"there is no page about {' '.join(topic)!r}",
            hint=f"did you mean `statemgr explain {near[0]}`?" if near else "`statemgr explain` lists what there is",
        )
    _print(known[asked])


def see(error: StatemgrError) -> str:
    """Return where an error's kind is explained: the published site that the package's metadata names, or a command."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    site = documentation()
    return f"{site.rstrip('/')}/errors#{anchor(kind)}" if site else f"statemgr explain {kind}"


def documentation() -> str | None:
    """Return the address of the published documentation. None if the metadata of the package names none."""
    return _address("Documentation")


def _address(name: str) -> str | None:
    from importlib import metadata

    try:
        addresses = metadata.metadata("statemgr").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    return dict(text.split(", ", 1) for text in addresses).get(name)


@cache
def pages() -> dict[str, Path]:
    """Return the pages by name: those that come with the package, or all in the source tree."""
    package = Path(str(resources.files("statemgr")))
    place = package / "_docs" if (package / "_docs").is_dir() else package.parent / "docs"
    return {path.stem: path for path in sorted(place.glob("*.md"))}


@cache
def page(name: str) -> str:
    """Return the text of a page; its links to what is no page lead to the repository.

    Raises: MissingError if the package was not installed as a whole.
    """
    if name not in pages():
        raise MissingError(f"the page {name}.md is not installed", hint="install statemgr again")
    text, repository = pages()[name].read_text(encoding="utf-8"), _address("Source")
    if repository is None:
        return text
    return _NO_PAGE.sub(lambda link: f"]({repository}/blob/main/{normpath(f'docs/{link[1]}')})", text)


def sections(name: str) -> dict[str, str]:
    """Return title → text, with the title, of each section of a page."""
    text = page(name)
    starts = [*_HEADING.finditer(text)]
    ends = [*(found.start() for found in starts[1:]), len(text)]
    return {found[1]: text[found.start() : end].strip() for found, end in zip(starts, ends, strict=True)}


def _row_of(name: str) -> str | None:
    """The row of a configuration key in the table of keys; None if there is no such key."""
    from statemgr.config.keys import find

    if (key := find(name)) is None:
        return None
    row = next(line for line in page("configuration").splitlines() if line.startswith(f"| `{key.pattern}` |"))
    return f"| key | value | default | meaning |\n|---|---|---|---|\n{row}"


def anchor(title: str) -> str:
    """Return the anchor of a section, as it is in links: ``broker-gone``."""
    return title.strip().lower().replace(" ", "-")


def _print(text: str) -> None:
    """Print Markdown: laid out on a terminal, as it is elsewhere."""
    if sys.stdout is None or not sys.stdout.isatty():
        click.echo(text)
        return
    from rich.markdown import Markdown

    from statemgr.terminal.output import console

    console().print(Markdown(text))
