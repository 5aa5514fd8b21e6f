"""Plug-ins that are wrong: each fault is a typed error that names the plug-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from statemgr.blobs import open_raw_blob_store
from statemgr.cli.main import _others, cli
from statemgr.config import JobConfig
from statemgr.errors import ConfigError, PrerequisiteMissing, UnavailableError
from statemgr.wiring import open_services
from tests.blob_faults import ManualClock
from tests.plug_ins import install

#: Name of a function or class → what the error about it says, as a blob store (``SCHEME`` is the name) and as a state
#: backend.
FAULTS = {
    "gives_none": "gave None instead of a",
    "raises": "failed: KeyError: 'setting'",
    "no_arguments": "failed: TypeError: no_arguments",
    "gives_text": "gave a str without",
    "gives_a_class": "gave <class 'dict'> instead of a",
    "a_number": "failed: TypeError: 'int' object is not callable",
}
MODULE = """
from statemgr.errors import UnavailableError

a_number = 1

def gives_none(*_): return None
def raises(*_): raise KeyError("setting")
def no_arguments(): return None
def gives_text(*_): return "text"
def gives_a_class(*_): return dict
def unavailable(*_): raise UnavailableError("try again")

class Managers:
    def __init__(self, services): pass
    def backup_manager(self): return None
    def restore_manager(self): raise KeyError("setting")
    def close(self): pass
"""
BROKEN = "import statemgr\nraise RuntimeError('at import')\n"
LACKING = "import nothing_at_all\n"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install one package for each module, with an entry point of each kind for everything in it."""
    names = [*FAULTS, "unavailable", "Managers", "absent"]
    modules = {"faulty": (MODULE, names), "broken": (BROKEN, ["broken"]), "lacking": (LACKING, ["lacking"])}
    for module, (text, of_module) in modules.items():
        (tmp_path / f"{module}.py").write_text(text)
        points = "".join(f"{name.replace('_', '-').lower()} = {module}:{name}\n" for name in of_module)
        groups = ("blob_stores", "state_backends", "commands")
        entries = "".join(f"[statemgr.{group}]\n{points}\n" for group in groups)
        install(tmp_path / f"{module}.py", entries, tmp_path / "site" / module, monkeypatch)
    _others.cache_clear()
    yield
    _others.cache_clear()


def opened(name: str) -> object:
    """Open the blob store of a name."""
    config = JobConfig.from_mapping({"job.name": "orders", "blob.store.uri": f"{name.replace('_', '-').lower()}://x"})
    return open_raw_blob_store(config, ManualClock())


def backed_up(name: str, directory: Path, *, restore: bool = False) -> object:
    """Return a manager of the state backend of a name."""
    mapping = {"job.name": "orders", "state.dir": str(directory / "state")}
    services = open_services(JobConfig.from_mapping(mapping))
    try:
        factory = name.replace("_", "-").lower()
        return services.restore_manager(factory) if restore else services.backup_manager(factory)
    finally:
        services.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_plug_in_is_named(tmp_path: Path, name: str) -> None:
    """J2.20: an entry point that gives None or something else, raises, or has another signature is a ConfigError that
    names it, for blob stores and state backends."""
    with pytest.raises(ConfigError) as caught:
        opened(name)
    assert f"the blob store for {name.replace('_', '-')}:// URIs (faulty:{name} of the package faulty)" in str(
        caught.value
    )
    assert FAULTS[name] in caught.value.message
    assert "docs/extending.md" in str(caught.value.hint)
    with pytest.raises(ConfigError) as caught:
        backed_up(name, tmp_path)
    assert f"the state backend '{name.replace('_', '-')}' (faulty:{name})" in caught.value.message
    assert FAULTS[name] in caught.value.message


def test_wrong_managers_of_a_backend_are_named(tmp_path: Path) -> None:
    """J2.20: a backend whose managers are missing, or raise."""
    with pytest.raises(ConfigError, match=r"'managers' \(faulty:Managers\) gave None instead of a BackupManager"):
        backed_up("Managers", tmp_path)
    with pytest.raises(ConfigError, match=r"'managers' \(faulty:Managers\) failed: KeyError: 'setting'"):
        backed_up("Managers", tmp_path, restore=True)


def test_a_plug_in_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """J2.20: a module that raises, one that needs another package, and one without the named object."""
    for use in (opened, lambda name: backed_up(name, tmp_path)):
        with pytest.raises(ConfigError, match="failed: RuntimeError: at import"):
            use("broken")
        with pytest.raises(PrerequisiteMissing, match="needs nothing_at_all"):
            use("lacking")
        with pytest.raises(ConfigError, match="absent"):
            use("absent")


def test_errors_of_statemgr_pass() -> None:
    """J2.20: a plug-in that raises one of statemgr's errors has said what is wrong."""
    with pytest.raises(UnavailableError, match=r"^try again$"):
        opened("unavailable")


def test_wrong_commands_are_named() -> None:
    """J2.20: a command that cannot be loaded, or is none, is named, and does not hide the others in `--help`."""
    runner = CliRunner()
    for name, said in {
        "gives-none": "the command 'gives-none' (faulty:gives_none) gave a function instead of a Command",
        "a-number": "the command 'a-number' (faulty:a_number) gave a int instead of a Command",
        "broken": "the command 'broken' (broken:broken) failed: RuntimeError: at import",
        "absent": "the command 'absent' (faulty:absent) failed: AttributeError",
    }.items():
        result = runner.invoke(cli, [name])
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.split())
    listed = runner.invoke(cli, ["--help"])
    assert listed.exit_code == 0
    assert "checkpoints" in listed.output
    assert "a-number" in listed.output
