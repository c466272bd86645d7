"""Where a lake may stand."""

from pathlib import Path

import pytest

from flows.cli import main
from schemas.errors import ConfigError
from storage.layout import lake_root


@pytest.mark.parametrize("name", ["all*", "what?", "one[a]", "number#1"])
def test_a_path_that_duckdb_takes_for_a_pattern_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert main(["status", "--lake", str(folder)]) == 2
    assert "which DuckDB and Iceberg take for patterns" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="name or rename a folder without"):
        lake_root(tmp_path / "link" / "lake")
    assert lake_root(tmp_path / "one's ü %20") == tmp_path / "one's ü %20"


@pytest.mark.parametrize("address", ["http://[::1", "http://", "localhost:9000", "http://a:b"])
def test_an_endpoint_that_is_no_address_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL is no address of a server"):
        lake_root("s3://bucket/lake")
