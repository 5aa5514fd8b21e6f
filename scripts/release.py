"""Makes a release: checks the tree and the changelog, builds sdist and wheel, checks them, and uploads them.

``scripts/release.py [--index URL]``. Steps:

1. the tree is a clean checkout, and no tag of this version names another commit
2. pyproject.toml and ``statemgr.__version__`` agree, and CHANGELOG.md has a dated section of this version
3. build the sdist, and the wheel from the sdist, into ``dist/<version>``
4. check that both show a valid description on the index (``twine check --strict``)
5. with an index: upload both. twine takes user and password from TWINE_USERNAME and TWINE_PASSWORD

Nothing is uploaded unless everything before it succeeded. docs/releasing.md has the policy.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: ``## [1.2.3] - 2026-11-23``, and what follows until the next section.
_SECTION = r"^## \[{version}\] - (\d{{4}}-\d{{2}}-\d{{2}})\n(.*?)(?=^## \[|\Z)"


class Refused(Exception):
    """The release is not made: why, and what to do."""


def main() -> int:
    """Returns: the exit status; 1 if the release is refused."""
    parser = argparse.ArgumentParser(description="Make a release. docs/releasing.md explains it.")
    parser.add_argument("--index", metavar="URL", help="upload to this index; without it, build and check only")
    index = parser.parse_args().index
    try:
        check_tree()
        version = checked_version()
        files = build(ROOT / "dist" / version)
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        if index:
            run(sys.executable, "-m", "twine", "upload", "--disable-progress-bar", "--repository-url", index, *files)
    except Refused as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    if not index:
        print(
            f"Version {version} is in dist/{version}. To upload it: make release INDEX=https://upload.pypi.org/legacy/"
        )
        return 0
    print(f"Version {version} is uploaded. Tag it: git tag -a v{version} -m {version} && git push origin v{version}")
    return 0


def check_tree() -> None:
    """Step 1. Raises: Refused."""
    changed = git("status", "--porcelain").splitlines()
    if changed:
        raise Refused(f"the tree is not clean: commit or remove {', '.join(line[3:] for line in changed[:5])}")


def checked_version() -> str:
    """Steps 1 and 2. Returns: the version. Raises: Refused."""
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    written = re.search(r'^__version__ = "(.+)"$', (ROOT / "statemgr" / "version.py").read_text(), re.MULTILINE)
    if written is None or written[1] != version:
        raise Refused(f"pyproject.toml has version {version}, and statemgr/version.py has {written and written[1]}")
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise Refused(f"{version} is not a version such as 1.2.3 or 1.2.3rc1")
    pattern = _SECTION.format(version=re.escape(version))
    section = re.search(pattern, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL)
    if section is None or not section[2].strip():
        raise Refused(
            f"CHANGELOG.md has no entries below `## [{version}] - YYYY-MM-DD`: rename [Unreleased], and begin a new one"
        )
    tag = git("tag", "--list", f"v{version}").strip()
    if tag and git("rev-parse", f"{tag}^{{commit}}") != git("rev-parse", "HEAD"):
        raise Refused(f"the tag {tag} names another commit: raise the version")
    return version


def build(target: Path) -> list[str]:
    """Step 3. Returns: the paths of sdist and wheel. Raises: Refused."""
    shutil.rmtree(target, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT))
    files = sorted(str(path) for path in target.iterdir())
    if [path.rpartition(".")[2] for path in files] != ["whl", "gz"]:
        raise Refused(f"the build made {', '.join(files)} instead of a wheel and an sdist")
    return files


def run(*command: str) -> None:
    """Run a command, and show what it prints. Raises: Refused if it fails."""
    result = subprocess.run(command, cwd=ROOT, check=False)
    if result.returncode:
        raise Refused(f"`{' '.join(_short(command))}` failed with status {result.returncode}")


def git(*arguments: str) -> str:
    """The output of git. Raises: Refused."""
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        raise Refused("git is not installed, so nobody can tell which sources a release has") from None
    if result.returncode:
        raise Refused(f"this is not a checkout of git: {result.stderr.strip()}")
    return result.stdout


def _short(command: Sequence[str]) -> list[str]:
    return [Path(command[0]).name, *command[1:4]]


if __name__ == "__main__":
    sys.exit(main())
