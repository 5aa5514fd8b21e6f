from __future__ import annotations

import email
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from scripts.pythons import VERSIONS
from statemgr.cli import main
from statemgr.config import factories

# one worker, because each would set up the fixtures of this module
pytestmark = pytest.mark.xdist_group("packaging")
ROOT = Path(__file__).parents[2]
_SHOW = (
    "import json, pathlib, statemgr; from statemgr.model.codecs.schemas import load_schema_files; "
    "print(json.dumps([statemgr.__file__, {k: v.decode() for k, v in load_schema_files().items()}]))"
)


def _run(*command: str, cwd: Path, pythonpath: Path | None = None) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    run = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _schemas() -> dict[str, str]:
    return {file.stem: file.read_text() for file in sorted((ROOT / "schemas").glob("*.avsc"))}


def _build(kind: str, target: Path) -> Path:
    code = f"import hatchling.build, sys; hatchling.build.{kind}(sys.argv[1])"
    _run(sys.executable, "-c", f"import os; os.chdir({str(ROOT)!r}); {code}", str(target), cwd=target)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it would be published."""
    return _build("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed wheel, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        str(target),
    ]
    _run(*pip, str(wheel), cwd=wheel.parent)
    return target


def test_the_installed_wheel_loads_every_schema(installed: Path, tmp_path: Path) -> None:
    """The installed package has every file of schemas/ byte for byte, outside the source tree."""
    where, schemas = json.loads(_run(sys.executable, "-P", "-c", _SHOW, cwd=tmp_path, pythonpath=installed))
    assert Path(where).is_relative_to(installed)
    assert schemas == _schemas()
    assert schemas, "there are schemas"


def test_the_wheel_brings_three_packages_and_no_more(installed: Path) -> None:
    """The wheel has no top-level `schemas` and no tests. The runtime and the integration have type information."""
    packages = {path.name for path in installed.iterdir() if path.is_dir() and not path.name.endswith(".dist-info")}
    assert packages - {"bin"} == {"statemgr", "statemgr_tools", "spark_integration"}
    assert (installed / "statemgr" / "py.typed").is_file()
    assert (installed / "statemgr_tools" / "ui" / "style.css").is_file()
    assert (installed / "spark_integration" / "py.typed").is_file()


def test_the_installed_wheel_explains_errors_and_faults(installed: Path, tmp_path: Path) -> None:
    """Pages come with the package, so that `statemgr explain` needs neither the source tree nor a network."""
    titles = {
        "UnavailableError": "## UnavailableError",
        "broker gone": "## Broker gone",
        "docs/security.md": "# Threat model",
    }
    for topic, title in titles.items():
        command = [sys.executable, "-P", "-m", "statemgr", "explain", *topic.split()]
        assert _run(*command, cwd=tmp_path, pythonpath=installed).startswith(f"{title}\n")
    pages = {path.name for path in (installed / "statemgr" / "_docs").rglob("*")}
    assert pages == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_an_editable_install_loads_the_schemas_of_the_source_tree(tmp_path: Path) -> None:
    """An editable install refers to the sources and has no copy of the schemas that could become stale."""
    editable = _build("build_editable", tmp_path)
    with zipfile.ZipFile(editable) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (path_file,) = names
        assert path_file.endswith(".pth")
        source = Path(archive.read(path_file).decode().strip())
    where, schemas = json.loads(_run(sys.executable, "-P", "-c", _SHOW, cwd=tmp_path, pythonpath=source))
    assert Path(where).is_relative_to(ROOT)
    assert schemas == _schemas()


def test_every_name_of_an_object_leads_to_it() -> None:
    """The script, the commands, the backends and the blob stores exist where the tables say."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    commands = (target for target, _ in main._built_in().values())
    targets = [*scripts.values(), *commands, *factories.BUILT_IN.values(), *factories.BLOB_STORES.values()]
    code = (
        "import importlib, sys\n"
        "for target in sys.argv[1:]:\n"
        "    module, _, name = target.partition(':')\n"
        "    getattr(importlib.import_module(module), name)\n"
    )
    _run(sys.executable, "-c", code, *targets, cwd=ROOT)


def test_the_metadata_of_the_wheel(wheel: Path) -> None:
    """The metadata has name, licence, versions, addresses and extras, with PySpark below its next minor version."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        assert any(path.endswith("licenses/LICENSE") for path in archive.namelist())
    assert (metadata["Name"], metadata["License-Expression"]) == ("statemgr", "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    extras = {
        "spark", "s3", "gcs", "azure", "otel", "schema-registry", "transactions", "demo", "dev", "docs", "bench",
        "test",
    }  # fmt: skip
    assert set(metadata.get_all("Provides-Extra")) == extras
    addresses = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert set(addresses) == {"Source", "Issues", "Changelog"}
    page = str(metadata.get_payload())
    assert page.startswith("# statemgr\n")
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert f"{addresses['Source']}/blob/main/docs/quickstart.md" in links
    assert f"lag and age]({addresses['Source']}/raw/main/docs/images/ui.png)" in page
    assert [link for link in links if not link.startswith(("https://", "#"))] == [], "they lead nowhere on an index"
    requirements = metadata.get_all("Requires-Dist")
    assert "pyspark<4.3,>=4.2; extra == 'spark'" in requirements


def test_statemgr_needs_no_spark_to_be_imported(tmp_path: Path) -> None:
    """Importing the public API loads neither PySpark nor pandas."""
    code = "import statemgr, statemgr.engine, sys; print([m for m in ('pyspark', 'pandas') if m in sys.modules])"
    assert _run(sys.executable, "-c", code, cwd=tmp_path, pythonpath=ROOT).strip() == "[]"


_SLOW_TO_LOAD = {
    "boto3", "botocore", "concurrent.futures", "confluent_kafka", "fastavro", "http.client", "matplotlib", "numpy",
    "pandas", "platformdirs", "prometheus_client", "psutil", "pyarrow", "pyspark", "rich", "rocksdict", "tenacity",
    "tomlkit", "zstandard",
}  # fmt: skip


@pytest.mark.parametrize("names", [[""], sorted(main._built_in())], ids=["statemgr", "commands"])
def test_help_loads_nothing_that_is_slow(names: list[str], tmp_path: Path) -> None:
    """``statemgr --help`` and the ``--help`` of each command are quick, because they load no slow libraries."""
    code = (
        "import contextlib, sys, statemgr.cli.main\n"
        "for name in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        statemgr.cli.main.cli.main([*filter(None, [name]), '--help'])\n"
        "print('loaded:', *sorted(sys.modules))"
    )
    *shown, last = _run(sys.executable, "-c", code, *names, cwd=tmp_path, pythonpath=ROOT).splitlines()
    for name in names:
        usage = " ".join(["Usage: statemgr", *filter(None, [name]), "["])
        assert any(line.startswith(usage) for line in shown), usage
    loaded = set(last.split()[1:])
    assert loaded & _SLOW_TO_LOAD == set()
    # only a list of all commands needs the names of other packages' commands
    assert ("importlib.metadata" in loaded) == ("" in names)
    if "" in names:
        assert not {"statemgr.config", "statemgr.ports"} & loaded


def test_constraints_name_exact_versions_without_addresses() -> None:
    """Every line is name==version, and the file has every dependency of the project."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    names = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert all(line.count("==") == 1 and "@" not in line and "/" not in line for line in lines)
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [
        *project["dependencies"],
        *(r for group in project["optional-dependencies"].values() for r in group),
    ]
    needed = {r.split("[")[0].split(">")[0].split("=")[0].lower() for r in wanted}
    assert needed - {"statemgr"} <= names


_ROW = re.compile(
    r"^\| (?:[a-z0-9-, ]+ \| )?(?P<name>[a-z0-9-]+) \| `(?P<versions>[^`]+)` \| (?P<licence>[^|]+) \|", re.MULTILINE
)
_USERS = ("spark", "s3", "gcs", "azure", "schema-registry", "otel", "transactions")


def test_the_page_has_every_dependency_with_its_versions_and_licence() -> None:
    """docs/dependencies.md agrees with pyproject.toml, and with what the packages say about their licence."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in _USERS for one in extras[extra])]
    split = {re.fullmatch(r"([a-z0-9-]+)(.*)", one) for one in wanted}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = {row["name"]: row for row in _ROW.finditer(page)}
    assert {name: row["versions"] for name, row in rows.items()} == {found[1]: found[2] for found in split if found}
    for name, row in rows.items():
        about = importlib.metadata.metadata(name)
        told = about.get("License-Expression") or " ".join(
            [about.get("License") or "", *(one for one in about.get_all("Classifier") or () if "License" in one)]
        )
        assert row["licence"].split(" AND ")[0].split("-")[0] in told.replace("Python Software Foundation", "PSF"), name


def test_the_classifiers_name_the_pythons_of_the_smoke_tests() -> None:
    """Each Python of the classifiers is tested by `make test-pythons`, beginning with the oldest that pip accepts."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    assert named == [version for version in VERSIONS if version in named]
    assert f">={named[0]}" == project["requires-python"] == f">={VERSIONS[0]}"
