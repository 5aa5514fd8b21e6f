"""The problems of a job, at the top of its page, and the runbook, which says what to do about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from statemgr.cli.explain import anchor, page
from statemgr.health.problems import Problem, may_follow
from statemgr.operations.top.command import seconds
from statemgr.terminal.output import moment
from statemgr_tools.ui.checks import DEEPER
from statemgr_tools.ui.markup import Child, Markup, prose, table, tag
from statemgr_tools.ui.model import JobView, Look

_NOTHING = (
    "Nothing, by what this page reads: the brokers, the checkpoint topic, the input, the blob store, the disks of this "
    "machine, and the processes that --metrics names."
)
_DEEPER = (
    "Look deeper asks about every blob, and runs statemgr doctor on this machine. Doctor writes a temporary topic, a "
    "blob and a file, and removes them."
)


def wrong(view: JobView, look: Look) -> Child:
    """Show the list of problems, causes first, each with a link to its section of the runbook."""
    rows = [
        (
            tag("a", one.fault.title, href=f"/runbook#{one.fault.value}"),
            one.part,
            prose(one.detail + (" This may follow from a problem above." if may_follow(one, look.problems) else "")),
        )
        for one in look.problems
    ]
    headers = ("fault", "part at fault", "what was seen")
    return [tag("h2", "What is wrong"), _waiting(look), table("Problems", headers, rows, _NOTHING), _deeper(view)]


def _waiting(look: Look) -> Child:
    if look.error is None and look.waiting_s is None:
        return None
    shown = "" if look.overview is None else f" The tasks below are from {moment(look.overview.taken_ms)}."
    if look.error is None and look.waiting_s is not None:
        return tag("p", f"Reading the checkpoint topic for {seconds(look.waiting_s)} so far.{shown}", role="status")
    return tag("p", f"The checkpoint topic cannot be read.{shown}", role="status")


def _deeper(view: JobView) -> Child:
    kinds = deeper_checks(view)
    running = [kind for kind in kinds if kind in view.runs and view.runs[kind].ended_ms is None]
    if running:
        return tag("p", f"Looking deeper. These checks still run: {', '.join(running)}.", role="status")
    ended = [view.runs[kind].ended_ms for kind in kinds if kind in view.runs]
    last = f" It last ended at {moment(max(filter(None, ended)))}." if any(ended) else ""
    hidden = tag("input", type="hidden", name="kind", value="deeper")
    return [
        tag("form", hidden, tag("button", "Look deeper"), method="post", action="run"),
        tag("p", _DEEPER + last, class_="soft"),
    ]


def deeper_checks(view: JobView) -> Sequence[str]:
    """Show the checks that the button starts."""
    return DEEPER if view.config.blob_uri is not None else [kind for kind in DEEPER if kind == "doctor"]


def names(problems: Sequence[Problem]) -> str:
    """Return the faults, each once."""
    return ", ".join(dict.fromkeys(one.fault.title for one in problems))


# --- the runbook -----------------------------------------------------------------------------------------------------


@cache
def runbook() -> Markup:
    """Return the page ``docs/runbook.md``. A link to another page becomes the command that prints it.

    Raises: MissingError.
    """
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(page("runbook").partition("\n")[2])  # the page has its own title
    for number, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", anchor(tokens[number + 1].content))
        elif token.type == "inline":
            target = "#"
            for child in token.children or ():
                if child.type == "link_open":
                    target = str(child.attrGet("href"))
                if child.type in ("link_open", "link_close") and not target.startswith("#"):
                    command = f" (statemgr explain docs/{target.partition('#')[0]})"
                    child.content = command if child.type == "link_close" else ""
                    child.type, child.tag, child.attrs = "text", "", {}
    return Markup(parser.renderer.render(tokens, parser.options, {}))
