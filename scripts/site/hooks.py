"""Hooks of MkDocs: the pages of docs/ stay as GitHub renders them, and become a site.

- The changelog and CONTRIBUTING.md become pages. The site has a first page of its own in place of the README.
- Links to files of the repository that are no pages lead to GitHub.
- The pages of the reference are generated from the code (:mod:`reference`).
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: E402

#: Files outside of docs/ that are pages, and their names on the site.
_OUTSIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, name in _OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_with_links(text, ".", config.extra["repository"])))
    shim = str(ROOT / "scripts" / "site" / "iframe-worker.js")
    files.append(File.generated(config, "javascripts/iframe-worker.js", abs_src_path=shim))
    for name, text in reference.pages(config.extra["repository"]).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page of docs/ that leave docs/ to GitHub."""
    if page.file.generated_by is not None:
        return markdown
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    return _with_links(markdown, folder, config.extra["repository"])


def _with_links(text: str, folder: str, repository: str) -> str:
    """The text with the links of a page in ``folder`` of the repository as the site needs them."""

    def lead(match: re.Match[str]) -> str:
        target, _, heading = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        here = "docs" if folder == "." else folder
        if path in _OUTSIDE:
            target = posixpath.relpath(posixpath.join("docs", _OUTSIDE[path]), here)
        elif path.startswith("docs/"):
            target = posixpath.relpath(path, here)
        else:
            target = f"{repository.rstrip('/')}/blob/main/{path}"
        return f"{match[1]}{target}{'#' + heading if heading else ''}{match[3]}"

    parts = _FENCE.split(text)
    return "".join(part if number % 2 else _LINK.sub(lead, part) for number, part in enumerate(parts))
