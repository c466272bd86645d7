"""The version of the software: said by the command, written into manifests, part of no key."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from flows.cli import main
from schemas import manifest
from schemas.version import VERSION
from storage.layout import MANIFEST
from tests.toy import build_toy, parquet_bytes, write_raw

ROOT = Path(__file__).parents[1]


def stored_parquet(lake: Path) -> dict[str, bytes]:
    """Every Parquet file by its path, which has the key of its piece or version."""
    return {str(path.relative_to(lake)): path.read_bytes() for path in lake.rglob("*.parquet")}


def test_the_command_says_it(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"novelty {VERSION}\n"


def test_every_manifest_has_it_and_no_key_depends_on_it(tmp_path, monkeypatch):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    monkeypatch.setattr(manifest, "VERSION", "99.0")
    build_toy(tmp_path / "newer", tmp_path / "raw")
    for lake, version in (("lake", VERSION), ("newer", "99.0")):
        written = [*(tmp_path / lake).rglob(MANIFEST), *(tmp_path / lake).rglob("builds/*.json")]
        assert len(written) > 8
        assert {json.loads(path.read_text())["software"] for path in written} == {version}
    older, newer = (stored_parquet(tmp_path / lake) for lake in ("lake", "newer"))
    assert older == newer and len(older) > 8


def test_another_version_finds_nothing_to_do(tmp_path, monkeypatch):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    before = parquet_bytes(tmp_path / "lake")
    monkeypatch.setattr(manifest, "VERSION", "99.0")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    assert parquet_bytes(tmp_path / "lake") == before


def test_a_manifest_without_a_version_is_read():
    old = manifest.BuildRecord(benchmark="toy", settings={}, sources=[])
    data = old.model_dump_json(exclude={"software", "sha256"}).encode()
    assert manifest.BuildRecord.unsealed(data).software is None


def test_the_package_takes_its_version_and_licence_from_the_repository():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "schemas.version.VERSION"
    }
    for name in project["project"]["license-files"]:
        assert (ROOT / name).is_file()
    assert "GNU General Public License" in (ROOT / "NOTICE").read_text()
    assert f"## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_pre_commit_runs_what_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in hooks:
        tool = hook["entry"].removeprefix(".venv/bin/").split()[0]
        assert f"$(BIN)/{tool}" in lint
