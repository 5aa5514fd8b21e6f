"""Shell commands on the pages, in blocks and in sentences."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr.cli.main import cli
from tests.docs.blocks import ROOT, Block, blocks, every_block, every_quote
from tests.docs.commands import CHECKED, commands, problem

_SOURCES = [
    *(ROOT / "tests").glob("*.py"),
    *(ROOT / "statemgr").rglob("*.py"),
    *(ROOT / "deploy").rglob("*.yaml"),  # their job.toml names variables of its own
    ROOT / "Makefile",
]


@pytest.mark.parametrize("block", every_block("sh", "console"), ids=str)
def test_every_command_of_a_block_can_be_typed(block: Block) -> None:
    """The real command line parses every `statemgr` command. Make targets, modules, extras and files exist."""
    session = block.language == "console"
    assert block.text.startswith("$ ") == session, "`console` has prompts and output, and `sh` only commands"
    found = [f"{shlex.join(words)}: {wrong}" for words in commands(block.text) if (wrong := problem(words))]
    assert not found, "\n".join(found)


_ALONE = [
    shlex.join(words)
    for block in every_block("sh", "console")
    for words in commands(block.text)
    if words[:2] in (["statemgr", "plan-capacity"], ["statemgr", "config"]) and "--simulate" not in words
]


@pytest.mark.parametrize("command", sorted({line for line in _ALONE if "sqlite" not in line}))
def test_commands_that_need_no_server_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a directory with the README's job.toml. Other tests run the simulation and the SQLite plug-in."""
    (settings,) = blocks("README.md", "## Ten lines", "toml")
    (tmp_path / "job.toml").write_text(settings, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, shlex.split(command)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.stdout


def test_every_command_in_a_sentence_exists() -> None:
    """Commands in sentences and tables exist. Arguments may be missing, and … stands for what the reader fills in."""
    wrong = []
    for quote in every_quote():
        words = shlex.split(quote.text) if quote.text.startswith(CHECKED) else []
        if len(words) > 1 and words[0] in CHECKED and (why := problem(words, whole=False)):
            wrong.append(f"{quote.page}:{quote.line}: `{quote.text}`: {why}")
    assert not wrong, "\n".join(wrong)


def test_every_variable_of_the_environment_exists() -> None:
    """The code or the tests read every variable whose name begins with STATEMGR_."""
    known = "\n".join(path.read_text(encoding="utf-8") for path in _SOURCES)
    named = {name for block in every_block("sh") for name in re.findall(r"\bSTATEMGR_\w+", block.text)}
    assert {name for name in named if name not in known} == set()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("statemgr topics fix", "No such command"),
        ("statemgr gc --force", "No such option"),
        ("statemgr rescale --tasks many", "Invalid value"),
        ("statemgr snapshots diff --task 0", "Missing argument"),
        ("make tea", "no target"),
        ("make bench PEER=DIR", "no variable"),
        ("python -m statemanager", "no module"),
        ("python nowhere.py", "no file"),
        ("pip install 'statemgr[kafka]'", "no extras"),
        ("terraform apply", "no test checks"),
    ],
)
def test_a_command_that_is_wrong_is_found(command: str, why: str) -> None:
    """The tests above report each kind of mistake."""
    assert why in (problem(shlex.split(command)) or "")
