"""``make release``: what it refuses, and that a new environment can install what it uploads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from statemgr import __version__
from tests.package_index import package_index

ROOT = Path(__file__).parents[2]
_SOURCES = ("statemgr", "statemgr_tools", "spark_integration", "schemas", "docs", "scripts")
_FILES = ("README.md", "CHANGELOG.md", "LICENSE", "CONTRIBUTING.md", "Makefile", "constraints.txt", "pyproject.toml",
          "mkdocs.yml", "docker-compose.yml", ".gitignore")  # fmt: skip
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def _git(tree: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


def _release(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "scripts" / "release.py"), *arguments]
    return subprocess.run(
        command, cwd=tree, check=False, capture_output=True, text=True, env={**os.environ, **environment}
    )


def _checkout(tree: Path, changelog: str) -> Path:
    """Return a checkout of this tree's sources with another changelog."""
    tree.mkdir()
    for name in _SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, tree / name)
    (tree / "CHANGELOG.md").write_text(changelog)
    _git(tree, "init", "-q")
    _git(tree, "add", "-A")
    _git(tree, "commit", "-q", "-m", "a release")
    return tree


def test_a_release_without_a_section_in_the_changelog_is_refused(tmp_path: Path) -> None:
    """Nothing is built until the tree is clean and the changelog has a dated section with entries."""
    tree = tmp_path / "tree"
    (tree / "statemgr").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", tree / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".gitignore", tree)
    shutil.copy(ROOT / "pyproject.toml", tree)
    shutil.copy(ROOT / "statemgr" / "version.py", tree / "statemgr")
    changelog = tree / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [Unreleased]\n\n- Something.\n")
    _git(tree, "init", "-q")
    assert "the tree is not clean" in _release(tree).stderr
    _git(tree, "add", "-A")
    _git(tree, "commit", "-q", "-m", "unreleased")
    refused = _release(tree)
    assert refused.returncode == 1
    assert f"no entries below `## [{__version__}] - YYYY-MM-DD`" in refused.stderr
    assert not (tree / "dist").exists()


@pytest.mark.long
def test_a_fresh_environment_installs_what_was_released(tmp_path: Path) -> None:
    """pip installs the release from a local index with its dependencies, and the command runs."""
    tree = _checkout(tmp_path / "tree", f"# Changelog\n\n## [{__version__}] - 2026-01-31\n\n- The first release.\n")
    with package_index() as index:
        tried = ("--python", sys.executable, "--extras", "s3")  # the other ones take minutes
        made = _release(tree, "--index", index.upload_url, *tried, TWINE_USERNAME="tests", TWINE_PASSWORD="tests")
        assert made.returncode == 0, made.stdout + made.stderr
        assert made.stdout.count("restored from blob-store") == 2 * 3, "wheel and sdist run the demo"
        assert re.search(r"\d+ of \d+ packages were checked|Nothing was checked for known vuln", made.stdout)
        sbom = json.loads((tree / "dist" / __version__ / f"statemgr-{__version__}.cdx.json").read_text())
        assert sbom["bomFormat"] == "CycloneDX"
        parts = {part["name"]: part for part in sbom["components"]}
        assert {"rocksdict", "confluent-kafka", "boto3"} <= set(parts)
        assert [name for name, part in parts.items() if not part.get("licenses")] == []
        assert f"Version {__version__} is uploaded" in made.stdout
        assert sorted(index.files) == [f"statemgr-{__version__}-py3-none-any.whl", f"statemgr-{__version__}.tar.gz"]
        fresh = tmp_path / "fresh"
        subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
        report = tmp_path / "report.json"
        pip = [
            str(fresh / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", "--report", str(report),
            "--extra-index-url", index.simple_url, "-c", str(ROOT / "constraints.txt"), f"statemgr=={__version__}",
        ]  # fmt: skip
        subprocess.run(pip, cwd=tmp_path, check=True)
    installed = json.loads(report.read_text())["install"]
    (own,) = [one for one in installed if one["metadata"]["name"] == "statemgr"]
    assert own["download_info"]["url"].startswith(index.simple_url.removesuffix("simple/"))
    command = subprocess.run(
        [str(fresh / "bin" / "statemgr"), "--version"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert __version__ in command.stdout
