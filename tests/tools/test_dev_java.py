from __future__ import annotations

from pathlib import Path

import pytest

from statemgr.errors import PrerequisiteMissing
from statemgr.terminal.find_java import find_java


def _java(home: Path, script: str) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "25-ea" 2025-09-16', 25),
    ],
)
def test_a_good_java_is_found_by_its_banner(tmp_path: Path, banner: str, version: int) -> None:
    """The version comes from the banner on standard error, in the forms that vendors print."""
    program = _java(tmp_path, f"echo '{banner}' >&2")
    java = find_java({"JAVA_HOME": str(tmp_path), "PATH": ""})
    assert (java.program, java.version) == (program, version)


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2", "16"])
def test_an_old_java_is_refused_by_its_number(tmp_path: Path, version: str) -> None:
    """The error names the version that is needed."""
    _java(tmp_path, f"echo 'openjdk version \"{version}\"' >&2")
    with pytest.raises(PrerequisiteMissing, match="too old: version 17 or newer"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": ""})


@pytest.mark.parametrize(
    "script",
    [
        "echo 'The operation couldn’t be completed. Unable to locate a Java Runtime.' >&2; exit 1",
        "exit 0",
        "echo 'openjdk version \"17\"' >&2; exit 3",
    ],
)
def test_a_stub_is_no_java(tmp_path: Path, script: str) -> None:
    """A program called java that runs no Java, such as the stub on macOS, is refused."""
    _java(tmp_path, script)
    with pytest.raises(PrerequisiteMissing, match="does not run"):
        find_java({"PATH": str(tmp_path / "bin") + ":/bin"})


def test_java_home_goes_before_the_path(tmp_path: Path) -> None:
    """An old Java in JAVA_HOME is an error, even if PATH has a newer one."""
    _java(tmp_path / "old", "echo 'openjdk version \"11\"' >&2")
    _java(tmp_path / "new", "echo 'openjdk version \"17\"' >&2")
    path = str(tmp_path / "new" / "bin")
    assert find_java({"PATH": path}).version == 17
    with pytest.raises(PrerequisiteMissing):
        find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": path})


def test_no_java_at_all_says_what_to_install(tmp_path: Path) -> None:
    """One line says what to install, even if JAVA_HOME has no java."""
    for environment in ({"PATH": str(tmp_path)}, {"PATH": "", "JAVA_HOME": str(tmp_path)}):
        with pytest.raises(PrerequisiteMissing, match="openjdk-17") as raised:
            find_java(environment)
        assert "\n" not in str(raised.value)
