"""Makes a release: checks the tree and the changelog, builds sdist and wheel, tries them, and uploads them.

``scripts/release.py [--index URL] [--python PATH ...] [--extras LIST]``. Steps:

1. the tree is a clean checkout, and no tag of this version names another commit
2. pyproject.toml and ``statemgr.__version__`` agree, and CHANGELOG.md has a dated section of this version
3. build the sdist, and the wheel from the sdist, into ``dist/<version>``. A second build, from a clone, has the same
   bytes
4. check that both show a valid description on the index (``twine check --strict``), and that they contain the files of
   the commit and no others
5. install each in a clean environment of each Python, without constraints as users do, and run ``statemgr demo --tiny``
   there, which kills and restores a service nine times
6. write the SBOM of an environment with all extras that users install (CycloneDX, ``dist/<version>/*.cdx.json``), and
   look its packages up in the index's database of vulnerabilities
7. with an index: upload sdist and wheel. twine takes user and password from TWINE_USERNAME and TWINE_PASSWORD

Nothing is uploaded unless everything before it succeeded. docs/releasing.md has the policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pythons import interpreters

ROOT = Path(__file__).parents[1]
#: What users install; the other extras are for work on statemgr.
EXTRAS = "spark,s3,gcs,azure,schema-registry,otel,transactions"
_PACKAGES = ("statemgr/", "statemgr_tools/", "spark_integration/")
#: Files of the wheel that come from elsewhere in the tree: prefix there → prefix here.
_MOVED = {"statemgr/_schemas/": "schemas/", "statemgr/_docs/": "docs/"}
#: Tools that only a release needs. uv runs each in an environment of its own.
_SBOM, _AUDIT = "cyclonedx-bom>=7.5,<8", "pip-audit>=2.9,<3"
#: ``## [1.2.3] - 2026-11-23``, and what follows until the next section.
_SECTION = r"^## \[{version}\] - (\d{{4}}-\d{{2}}-\d{{2}})\n(.*?)(?=^## \[|\Z)"


class Refused(Exception):
    """The release is not made: why, and what to do."""


def main() -> int:
    """Returns: the exit status; 1 if the release is refused."""
    parser = argparse.ArgumentParser(description="Make a release. docs/releasing.md explains it.")
    parser.add_argument("--index", metavar="URL", help="upload to this index; without it, build and check only")
    parser.add_argument(
        "--python", metavar="PATH", action="append", help="try it on this interpreter; default: all that are here"
    )
    parser.add_argument("--extras", default=EXTRAS, help=f"extras of the SBOM; default: {EXTRAS}")
    given = parser.parse_args()
    index = given.index
    try:
        check_tree()
        version = checked_version()
        files = build(ROOT / "dist" / version)
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        check_contents(*files)
        pythons = given.python or list(map(str, interpreters().values()))
        for python in pythons:
            for file in files:
                try_out(python, file)
        list_packages(pythons[0], files[0], given.extras, ROOT / "dist" / version / f"statemgr-{version}.cdx.json")
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
    """Step 3. Returns: the paths of wheel and sdist. Raises: Refused."""
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="statemgr-release-") as directory:
        clone, again = Path(directory) / "clone", Path(directory) / "again"
        run("git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone))
        _build(ROOT, target)
        _build(clone, again)
        files = sorted(target.iterdir(), key=lambda path: path.suffix != ".whl")
        if [path.suffix for path in files] != [".whl", ".gz"]:
            raise Refused(f"the build made {', '.join(map(str, files))} instead of a wheel and an sdist")
        for path in files:
            if path.read_bytes() != (again / path.name).read_bytes():
                raise Refused(f"a clone of this commit makes another {path.name}: a file that git ignores is in it")
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    return [str(path) for path in files]


def _build(tree: Path, target: Path) -> None:
    """Build with the time of the commit, so that the same commit has the same bytes."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()}
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(tree))
    run(*command, environment=environment)


def check_contents(wheel: str, sdist: str) -> None:
    """Step 4. Raises: Refused."""
    committed = set(git("ls-files").splitlines())
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    for here, there in _MOVED.items():
        packed = {there + name.removeprefix(here) if name.startswith(here) else name for name in packed}
    wanted = {
        name for name in committed if name.startswith((*_PACKAGES, "schemas/")) or re.match(r"docs/[^/]+\.md", name)
    }
    if packed != wanted:
        raise Refused(f"the wheel has other files than the commit: {', '.join(sorted(packed ^ wanted)[:5])}")
    with tarfile.open(sdist) as tar:
        files = {one.name.partition("/")[2] for one in tar.getmembers() if one.isfile()}
    if strange := files - committed - {"PKG-INFO"}:
        raise Refused(f"the sdist has files that are not committed: {', '.join(sorted(strange)[:5])}")
    if missing := wanted - files:
        raise Refused(f"the sdist lacks {', '.join(sorted(missing)[:5])}")


def try_out(python: str, file: str) -> None:
    """Step 5. Raises: Refused."""
    with tempfile.TemporaryDirectory(prefix="statemgr-release-") as directory:
        made = _environment(directory, python, file)
        print(f"{Path(file).name} on {python}", flush=True)
        run(str(made.parent / "statemgr"), "demo", "--tiny", cwd=directory)


def list_packages(python: str, wheel: str, extras: str, sbom: Path) -> None:
    """Step 6. Raises: Refused if a package has a known vulnerability."""
    with tempfile.TemporaryDirectory(prefix="statemgr-release-") as directory:
        made = _environment(directory, python, f"statemgr[{extras}] @ {Path(wheel).as_uri()}")
        run(
            *_tool(_SBOM, "cyclonedx-py"), "environment", "--output-reproducible",
            "--pyproject", str(ROOT / "pyproject.toml"), "-o", str(sbom), str(made),
        )  # fmt: skip
        place = subprocess.check_output(
            [made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        command = [*_tool(_AUDIT, "pip-audit"), "--progress-spinner", "off", "-f", "json", "--path", place.strip()]
        audit = subprocess.run(command, check=False, capture_output=True, text=True)
    print(f"The SBOM is {sbom.relative_to(ROOT)}")
    try:
        packages = json.loads(audit.stdout)["dependencies"]
    except ValueError:
        packages = []
    known = [one for one in packages if "vulns" in one]
    if not known:
        print("Nothing was checked for known vulnerabilities: the index has no database of them, or is out of reach")
        return
    print(f"{len(known)} of {len(packages)} packages were checked for known vulnerabilities")
    if found := [f"{one['name']} {one['version']}: {flaw['id']}" for one in known for flaw in one["vulns"]]:
        raise Refused(f"known vulnerabilities: {'; '.join(found)}. Raise the lower bounds, or wait for corrections")


def _environment(directory: str, python: str, requirement: str) -> Path:
    """Make a clean environment with the requirement. Returns: its interpreter. Raises: Refused."""
    made = Path(directory) / "environment"
    run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", python, str(made))
    run(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(made), requirement)
    return made / "bin" / "python"


def _tool(requirement: str, command: str) -> list[str]:
    return [sys.executable, "-m", "uv", "tool", "run", "--quiet", "--from", requirement, command]


def run(*command: str, cwd: str | Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
    """Run a command, and show what it prints. Raises: Refused if it fails."""
    result = subprocess.run(command, cwd=cwd, env=environment, check=False)
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
    return [Path(command[0]).name, *command[1:6]]


if __name__ == "__main__":
    sys.exit(main())
