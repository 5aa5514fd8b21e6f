"""The two houses: the core knows no operation, and an operation knows no other one.

Each test takes one operation out of a copy of the tree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from statemgr.operations import commands

ROOT = Path(__file__).parents[2]
OPERATIONS = sorted(path.parent.name for path in (ROOT / "statemgr" / "operations").glob("*/__init__.py"))
_LOOK = """
import importlib, json, pkgutil, statemgr, statemgr.cli.main, statemgr.manager
loaded = [name for name in sys.modules if name.startswith("statemgr.operations.")]
for module in pkgutil.walk_packages(statemgr.__path__, "statemgr."):
    if not module.name.startswith(("statemgr.cli.example", "statemgr.testing.conformance", "statemgr.__main__")):
        importlib.import_module(module.name)
print(json.dumps([sorted(loaded), sorted(statemgr.cli.main.cli.list_commands(None))]))
"""


def without(operation: str, directory: Path) -> Path:
    """Copy what tests need into a directory, without one operation and its tests."""
    copied = ("statemgr", "statemgr_tools", "spark_integration", "tests")
    for name in copied:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name not in copied and not path.name.startswith("."):
            (directory / path.name).symlink_to(path)
    shutil.rmtree(directory / "statemgr" / "operations" / operation)
    shutil.rmtree(directory / "tests" / "operations" / operation, ignore_errors=True)
    _leave_out_its_users(directory, operation)
    return directory


def _leave_out_its_users(directory: Path, operation: str) -> None:
    """Delete tests that use the operation too, and those that import such a test."""
    sources = {path: path.read_text() for path in (directory / "tests").rglob("*.py") if path.name != "conftest.py"}
    gone = [re.compile(rf"^(from|import) (statemgr|tests)\.operations\.{operation}\b", re.MULTILINE)]
    for imports in gone:
        for path in [path for path, text in sources.items() if imports.search(text)]:
            del sources[path]
            path.unlink()
            parent, name = ".".join(path.relative_to(directory).parent.parts), path.stem
            gone.append(re.compile(rf"^from {parent}(\.{name} import| import (.*, )?{name})\b", re.MULTILINE))


def run(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy."""
    environment = os.environ | {"PYTHONPATH": str(directory)}
    return subprocess.run([sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=() if name == "rescale" else pytest.mark.long) for name in OPERATIONS]
)
def test_the_rest_works_without_an_operation(operation: str, tmp_path: Path) -> None:
    """Every other module can be imported, and the commands are gone that the operation had."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "statemgr", tree / "statemgr", ignore=shutil.ignore_patterns(operation))
    looked = run(tree, "-c", f"import sys\n{_LOOK}")
    assert looked.returncode == 0, looked.stderr
    gone = {name for name, (place, _) in commands().items() if place.startswith(f"statemgr.operations.{operation}.")}
    assert gone
    loaded, found = json.loads(looked.stdout.splitlines()[-1])
    assert set(commands()) - set(found) == gone
    assert loaded == [], "the state manager loads no operation"


@pytest.mark.heavy
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_tests_of_the_rest_pass_without_an_operation(operation: str, tmp_path: Path) -> None:
    """The tests of the core and of the other operations pass that need no server."""
    tree = without(operation, tmp_path / "tree")
    others = [f"tests/operations/{name}" for name in OPERATIONS if name != operation]
    places = ["tests/core/unit", "tests/core/property", *(place for place in others if (tree / place).exists())]
    chosen = "not long and not heavy and not integration and not crash"
    tested = run(tree, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", chosen, *places)
    assert tested.returncode == 0, tested.stdout[-3000:]
