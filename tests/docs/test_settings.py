"""The production readers accept the TOML, JSON and YAML blocks of the pages."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import fastavro
import pytest

from statemgr import JobConfig
from tests.docs.blocks import ROOT, Block, blocks, every_block
from tests.plug_ins import install

#: Contents of the files that blocks name with ``${file:…}``.
_FILES = {"schemas/total.json": '[{"type": "record", "name": "Total", "fields": [{"name": "amount", "type": "long"}]}]'}


@pytest.mark.parametrize("block", every_block("toml"), ids=str)
def test_every_toml_block_is_configuration(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has valid keys and values for `job.toml`, or `pyproject.toml` tables with existing entry point groups.

    The backend of examples/plug_ins is installed.
    """
    found = tomllib.loads(block.text)
    if "project" in found or "build-system" in found:
        groups = found["project"].get("entry-points", {})
        code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "statemgr").rglob("*.py"))
        assert {group for group in groups if f'"{group}"' not in code} == set(), "statemgr reads no such entry points"
        return
    for name in re.findall(r"\$\{file:([^}]+)\}", block.text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(_FILES[name], encoding="utf-8")
    for name in re.findall(r"\$\{env:([^}]+)\}", block.text):
        monkeypatch.setenv(name, "value")
    points = "[statemgr.state_backends]\nshared-directory = shared_directory:SharedDirectory\n"
    install(ROOT / "examples" / "plug_ins" / "shared_directory.py", points, tmp_path / "site", monkeypatch)
    monkeypatch.chdir(tmp_path)
    given = block.text if "job" in found else f"{block.text}\n[job]\nname = 'orders'\n"
    (tmp_path / "job.toml").write_text(given, encoding="utf-8")
    config = JobConfig.from_file("job.toml")
    assert config.job_name


@pytest.mark.parametrize("block", every_block("json"), ids=str)
def test_every_json_block_is_json(block: Block) -> None:
    """Every JSON block is valid JSON, and fastavro parses every schema."""
    found = json.loads(block.text)
    for schema in found if isinstance(found, list) else [found]:
        if isinstance(schema, dict) and schema.get("type") == "record":
            fastavro.parse_schema(schema)


def test_both_ways_to_write_a_key_mean_the_same() -> None:
    """docs/configuration.md: a list in a table and a quoted key with commas give the same setting."""
    first, second = (tomllib.loads(text) for text in blocks("docs/configuration.md", "## Writing keys", "toml"))
    base = {"job.name": "orders", "stores.totals.type": "rocksdb", "blob.store.uri": "memory://orders"}
    stores = [JobConfig.from_mapping({**base, **mapping}).stores["totals"] for mapping in (first, second)]
    assert stores[0].backup_factories == stores[1].backup_factories == ("kafka-changelog", "blob-store")
