"""Flip any bit of any file in a lake: a build heals it or stops with a name, never a wrong row."""

import shutil
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.cli import main
from schemas.errors import NoveltyError
from storage.catalog import open_catalog
from storage.damage import verify_lake
from storage.tables import current_versions
from tests.toy import build_toy, write_raw

KINDS = {
    "piece": ".novelty/pieces/**/*.parquet",
    "piece manifest": ".novelty/pieces/**/_manifest.json",
    "version": "toy/*/versions/*/*.parquet",
    "version manifest": "toy/*/versions/*/_manifest.json",
    "snapshot": "toy/snapshots/*/_snapshot.json",
    "build record": ".novelty/builds/*.json",
    "catalogue": "catalog.duckdb",
    "hashes": ".novelty/hashes.sqlite",
}
TABLES = ("readings", "files", "totals", "quarantine")


def rows_of(lake: Path) -> dict[str, pl.DataFrame]:
    return {version.manifest.table: version.read() for version in current_versions(lake, "toy")}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, dict[str, pl.DataFrame]]:
    """A lake of one build whose raw files have changed since, and the rows of the next build."""
    root = tmp_path_factory.mktemp("built")
    write_raw(root / "raw", files=3, lines=8)
    build_toy(root / "lake", root / "raw")
    (root / "raw" / "f0.txt").write_text("a,1\nb,2\n")
    build_toy(root / "other", root / "raw")
    return root, rows_of(root / "other")


def flip(lake: Path, kind: str, number: int, place: float, bit: int) -> Path:
    files = sorted(lake.glob(KINDS[kind]))
    file = files[number % len(files)]
    data = bytearray(file.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    file.unlink()  # a version shares its files with pieces
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(number=st.integers(0, 99), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_makes_a_wrong_row(built, tmp_path_factory, kind, number, place, bit):
    root, expected = built
    folder = tmp_path_factory.mktemp("flipped")
    lake, raw = folder / "lake", root / "raw"
    shutil.copytree(root / "lake", lake, symlinks=True)
    flipped = flip(lake, kind, number, place, bit)
    try:
        build_toy(lake, raw)
        found = rows_of(lake)  # a part that the build only links is compared when it is read
    except NoveltyError as error:
        assert str(lake) in str(error), "it says which file"
        assert kind != "catalogue", "no build reads it"
        main(["verify", "--drop", "--lake", str(lake)])
        build_toy(lake, raw)
        found = rows_of(lake)
    assert found.keys() == expected.keys()
    for table in TABLES:
        assert found[table].equals(expected[table]), f"{table} after {flipped}"
    with open_catalog(lake) as connection:
        assert connection.sql("select * from toy.totals").pl().equals(expected["totals"])
    # What the build did not read is for `verify` to find, and dropping it mends it.
    main(["verify", "--drop", "--lake", str(lake)])
    build_toy(lake, raw)
    assert not verify_lake(lake).damage
    assert all(rows_of(lake)[table].equals(expected[table]) for table in TABLES)
    shutil.rmtree(folder)
