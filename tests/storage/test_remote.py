"""A lake in a bucket: the same tables as in a folder, one winner of a race, errors as sentences."""

import hashlib
import http.server
import json
import pickle
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from flows.cli import main
from schemas.errors import ConfigError, LakeError
from storage.catalog import CATALOG_SQL, catalog_for, open_catalog
from storage.damage import drop, restorable, restore, verify_lake, verify_version
from storage.layout import lake_address, lake_root
from storage.objects import Bucket, bucket_of
from storage.pieces import find_piece, find_pieces
from storage.remote import commit_piece, piece_object, piece_prefix
from storage.remote_upkeep import remove_objects
from storage.snapshots import current_snapshot, history
from storage.tables import Contents, current_version, current_versions, publish
from storage.upkeep import find_garbage, find_remote_garbage, statuses, trace_lineage
from tests.cluster_stages import wait_for
from tests.evaluation.small_runs import build_small
from tests.evaluation.small_runs import write_raw as write_samples
from tests.s3 import BUCKET, KEY, SECRET, free_port, moto, rclone, settings
from tests.toy import TOTALS, build_toy, write_raw

ROOT = Path(__file__).parents[2]
TABLES = {"toy/readings", "toy/files", "toy/totals", "toy/quarantine"}


@pytest.fixture(scope="module")
def moto_url(tmp_path_factory):
    with moto(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture(scope="module")
def rclone_url(tmp_path_factory):
    with rclone(tmp_path_factory.mktemp("rclone")) as url:
        yield url


class Machine:
    """Switches this process between machines: each has a cache of its own."""

    def __init__(self, monkeypatch, url, root, address):
        self.monkeypatch, self.url, self.root, self.address = monkeypatch, url, root, address

    def use(self, name: str) -> Path:
        for key, value in settings(self.url, self.root / name).items():
            self.monkeypatch.setenv(key, value)
        return lake_root(self.address)


@pytest.fixture
def strict(monkeypatch, moto_url, tmp_path):
    """A store that keeps the conditions."""
    return Machine(monkeypatch, moto_url, tmp_path, f"s3://{BUCKET}/{tmp_path.name}")


@pytest.fixture
def loose(monkeypatch, rclone_url, tmp_path):
    """A store that ignores them."""
    return Machine(monkeypatch, rclone_url, tmp_path, f"s3://{BUCKET}/{tmp_path.name}")


@pytest.fixture(params=["strict", "loose"])
def machine(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def raw(tmp_path):
    write_raw(tmp_path / "raw", files=3, lines=8)
    return tmp_path / "raw"


def hashes(versions) -> dict[str, list[str]]:
    return {v.name: [v.manifest.key, *(p.sha256 for p in v.manifest.parts)] for v in versions}


def objects(lake: Path) -> set[str]:
    return set(bucket_of(lake).listing(""))


# Addresses


def test_address_and_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NOVELTY_CACHE", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    lake = lake_root("s3://bucket/some/prefix/")
    assert lake.parent == tmp_path / "lakes"
    assert lake_address(lake) == "s3://bucket/some/prefix"
    assert lake_root(Path("s3://bucket/some/prefix")) == lake == lake_root(lake)
    assert lake_root(lake_address(lake)) == lake
    assert lake_root("s3://bucket/some") != lake
    monkeypatch.setenv("NOVELTY_LAKE", "s3://bucket/some/prefix")
    assert lake_root() == lake
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    assert lake_root("s3://bucket/some/prefix") != lake
    assert lake_root(tmp_path / "x") == tmp_path / "x" == Path(lake_address(tmp_path / "x"))


@pytest.mark.parametrize(
    "address", ["gs://bucket", "s3://", "s3:/", "s3:", "s3://b/../c", "https://x/y"]
)
def test_other_addresses_are_refused(address):
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        lake_root(address)


# Builds


def test_same_tables_as_in_a_folder_and_nothing_made_twice(machine, raw, tmp_path):
    folder = build_toy(tmp_path / "folder", raw)
    here = machine.use("here")
    built = build_toy(here, raw)
    assert all(piece.made_now for piece in built.pieces)
    assert hashes(built.versions.values()) == hashes(folder.versions.values())
    before = objects(here)

    there = machine.use("there")
    assert there != here
    again = build_toy(there, raw)
    assert not any(piece.made_now for piece in again.pieces)
    assert hashes(current_versions(there)) == hashes(folder.versions.values())
    assert objects(there) == before
    for version in current_versions(there):
        table = version.manifest.table
        assert version.read().equals(folder.versions[table].read())
        assert not verify_version(version)


def test_a_change_costs_what_changed_and_old_versions_stay_readable(strict, raw):
    lake = strict.use("here")
    old = build_toy(lake, raw).versions["readings"]
    (raw / "f0.txt").write_text("a,1\n")
    other = strict.use("there")
    built = build_toy(other, raw)
    assert sum(piece.made_now for piece in built.pieces) == 2
    assert current_version(lake, "toy", "readings").manifest.key != old.manifest.key
    for place in old.places:
        place.unlink()
    assert old.read().height == 21  # fetched from the bucket, where it is not current any more
    pointer = json.loads(bucket_of(other).get("toy/current.json").data)
    assert (pointer["number"], pointer["partial"]) == (2, False)
    first, second = history(other, "toy")
    assert second.previous == first.name and first.tables["readings"] == old.manifest.key


def test_status_and_lineage_fetch_manifests_only(strict, raw):
    build_toy(strict.use("here"), raw)
    lake = strict.use("there")
    found = statuses(lake, lambda code: 1, lambda b, t: 1, lambda root: {})
    assert {status.name for status in found} == TABLES
    tree = trace_lineage(lake, current_version(lake, "toy", "totals"))
    assert tree["toy/totals"].tables["readings"].raw == {str(raw): {"f0.txt", "f1.txt", "f2.txt"}}
    assert not list(lake.rglob("*.parquet"))


def test_a_part_travels_to_another_machine_by_reference(strict, raw):
    lake = strict.use("here")
    sent = pickle.dumps(build_toy(lake, raw).table("readings")[0])
    expected = pickle.loads(sent).read()
    shutil.rmtree(lake)
    there = strict.use("there")
    part = pickle.loads(sent)
    key = part.piece.rpartition("/")[2]
    found = find_pieces(there, "toy", "read_lines", ["none", key, "never"])
    assert [piece and piece.manifest.key for piece in found] == [None, key, None]
    assert part.read().equals(expected)
    assert part.path.is_relative_to(there)
    assert find_piece(there, *part.piece.split("/")) is not None


def test_catalogue_in_the_cache_and_in_the_bucket(strict, raw):
    build_toy(strict.use("here"), raw)
    lake = strict.use("there")
    sql = "select count(*) from toy.readings"
    catalog_for(lake, sql)
    with open_catalog(lake) as connection:
        assert connection.sql(sql).fetchall() == [(21,)]
    text = bucket_of(lake).get(CATALOG_SQL).data.decode()
    assert text.count("CREATE OR REPLACE VIEW") == len(TABLES) + 1  # lake.quarantine
    assert "IS 'Value read [metre]'" in text
    files = re.findall(rf"'({strict.address}/toy/readings/versions/\w+/[^']+\.parquet)'", text)
    assert len(files) == 3
    # The statements are DuckDB's: with the addresses of the local copies they run.
    version = current_version(lake, "toy", "readings")
    local = text.replace(f"{strict.address}/", f"{lake}/")
    readings = [line for line in local.split(";\n") if '"toy"."readings"' in line]
    with duckdb.connect() as connection:
        connection.execute('create schema "toy"')
        for statement in readings:
            connection.execute(statement)
        assert connection.sql(sql).fetchall() == [(version.manifest.rows,)]


def test_a_file_is_imported_and_ranked_on_another_machine(strict, tmp_path, capsys):
    write_samples(tmp_path / "samples" / "samples.csv")
    here = strict.use("here")
    build_small(here, tmp_path / "samples", protocols=("first",))
    run = current_version(here, "small", "runs").read()["run_id"][0]
    strict.use("there")
    file = str(tmp_path / "out.npz")
    assert main(["export", "outputs", run, file, "--lake", strict.address]) == 0
    place = ["--benchmark", "small", "--protocol", "first", "--lake", strict.address]
    assert main(["import", "outputs", file, "--name", "mine", *place]) == 0
    strict.use("elsewhere")
    sql = "select distinct detector from lake.leaderboard where score = 'msp'"
    capsys.readouterr()
    assert main(["query", sql, "--lake", strict.address]) == 0
    shown = capsys.readouterr().out
    assert "mine · msp" in shown and "line · msp" in shown
    assert main(["leaderboard", "--lake", strict.address]) == 0
    assert "mine · msp" in capsys.readouterr().out


def test_commands_take_an_address(strict, raw, capsys):
    build_toy(strict.use("here"), raw)
    (raw / "f0.txt").write_text("a,1\n")
    build_toy(strict.use("here"), raw)
    strict.use("there")

    def said(*words: str) -> str:
        assert main([*words, "--lake", strict.address]) == 0
        return capsys.readouterr().out

    assert "4 tables" in said("status")
    assert "13 pieces and versions, 31 files checked, 0 damaged" in said("verify")
    assert "5 pieces and versions, 12 files checked, 0 damaged" in said("verify", "toy/totals")
    assert "read_lines" in said("lineage", "toy/totals")
    assert "14" in said("query", "select count(*) from toy.readings")
    assert "nothing to remove" in said("gc", "--yes")
    removed = said("gc", "--yes", "--grace", "-1", "--keep", "1")
    assert f"bytes  {strict.address}/toy/readings/versions/" in removed
    assert f"{strict.address}/toy/snapshots/s000001" in removed


def test_diff_finds_versions_that_were_never_in_this_cache(strict, raw, capsys):
    build_toy(strict.use("here"), raw)
    (raw / "f0.txt").write_text("a,1\n")
    build_toy(strict.use("here"), raw)
    strict.use("there")
    lake = ["--lake", strict.address]
    assert main(["diff", "toy/readings", *lake]) == 1
    assert "7 removed" in capsys.readouterr().out
    assert main(["diff", f"{strict.address}:toy/totals", "toy/totals", *lake]) == 0


def test_the_end_of_an_object(machine):
    machine.use("here")
    bucket = Bucket(machine.address)
    data = bytes(range(256)) * 1000
    bucket.put("x", data)
    for wanted in (1, 1000, len(data), len(data) + 1):
        assert bucket.tail("x", len(data), wanted) == data[-wanted:]


# Readers with none of our code


def test_polars_pyarrow_and_pandas_read_straight_from_the_bucket(request, machine, raw):
    build = build_toy(machine.use("here"), raw)
    expected = build.versions["readings"].read()
    prefix = machine.address.removeprefix("s3://")
    system = pyarrow.fs.S3FileSystem(
        access_key=KEY,
        secret_key=SECRET,
        endpoint_override=machine.url.removeprefix("http://"),
        scheme="http",
        region="us-east-1",
    )
    with system.open_input_stream(f"{prefix}/toy/current.json") as file:
        current = json.loads(file.read())["tables"]["readings"]
    folder = f"{prefix}/toy/{current}"
    names = {place.name for place in build.versions["readings"].places}
    # rclone lists an object a little after it was put.
    selector = pyarrow.fs.FileSelector(folder)
    wait_for(lambda: names <= {file.base_name for file in system.get_file_info(selector)})
    by_arrow = pq.read_table(folder, filesystem=system)
    assert pl.from_arrow(by_arrow).sort("file", "line").equals(expected)
    assert by_arrow.to_pandas().shape == (expected.height, 4)
    options = {
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "aws_endpoint_url": machine.url,
        "aws_region": "us-east-1",
    }
    if request.node.callspec.params["machine"] == "loose":
        return  # rclone serves a whole file where polars asks for a range
    frame = pl.read_parquet(f"s3://{folder}/*.parquet", storage_options=options)
    assert frame.equals(expected)


# Races


def test_one_of_eight_writers_wins_a_create(strict):
    strict.use("here")
    bucket = Bucket(strict.address)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: bucket.create("x", b"%d" % n), range(8)))
    assert won.count(True) == 1
    assert bucket.get("x").data == b"%d" % won.index(True)


def test_no_run_of_eight_writers_is_lost(strict):
    """Who comes too late reads what the others published, and adds its own."""
    lakes = [strict.use(f"machine{number}") for number in range(8)]

    def write(number: int) -> None:
        def plan(old):
            runs = dict(old.runs if old else {})
            return Contents(runs=runs | {f"run{number}": [f"toy/train/{number}"]})

        publish(lakes[number], "toy", plan)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    reader = strict.use("reader")
    snapshot = current_snapshot(reader, "toy")
    assert snapshot.runs == {f"run{n}": [f"toy/train/{n}"] for n in range(8)}
    assert [one.number for one in history(reader, "toy")] == list(range(1, 9))
    assert [len(one.runs) for one in history(reader, "toy")] == list(range(1, 9))


RUNS = """
import sys
from pathlib import Path
from storage.layout import lake_root
from tests.evaluation.small_runs import build_small
build_small(lake_root(sys.argv[1]), Path(sys.argv[2]), slopes=(float(sys.argv[3]),))
"""


@pytest.mark.parametrize("builders", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_builders_of_other_runs_lose_none(strict, tmp_path, builders):
    """The same set of runs as if one machine had made them after each other, to the byte."""
    raw = tmp_path / "samples"
    write_samples(raw / "samples.csv")
    running = []
    for number in range(builders):
        strict.use(f"machine{number}")
        command = [sys.executable, "-c", RUNS, strict.address, str(raw), str(4 + number)]
        running.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE))
    for process in running:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said.decode()
    folder = build_small(tmp_path / "folder", raw, slopes=[4.0 + n for n in range(builders)])
    lake = strict.use("reader")
    assert hashes(current_versions(lake)) == hashes(folder.versions.values())
    snapshot = current_snapshot(lake, "small")
    assert len(snapshot.runs) == 2 * builders and not snapshot.partial


def test_a_stale_pointer_is_refused(strict):
    strict.use("here")
    bucket = Bucket(strict.address)
    assert bucket.replace("p", b"1", None)
    old = bucket.get("p")
    assert bucket.replace("p", b"2", old)
    assert not bucket.replace("p", b"3", old) and not bucket.replace("p", b"3", None)
    assert bucket.get("p").data == b"2"


CHILD = """
import sys
from pathlib import Path
from storage.layout import lake_root
from tests.toy import build_toy
build_toy(lake_root(sys.argv[1]), Path(sys.argv[2]), workers=1, scale=float(sys.argv[3]))
"""


@pytest.mark.parametrize("builders", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_builders_at_once_leave_one_whole_table(strict, raw, tmp_path, builders):
    """Half of them build the same, the others with another setting; each has its own cache."""
    running = []
    for number in range(builders):
        strict.use(f"machine{number}")
        command = [sys.executable, "-c", CHILD, strict.address, str(raw), str(1 + number % 2)]
        running.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE))
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    lake = strict.use("reader")
    possible = [
        hashes(build_toy(tmp_path / f"folder{scale}", raw, scale=scale).versions.values())
        for scale in (1.0, 2.0)
    ]
    versions = current_versions(lake)
    assert hashes(versions) in possible  # all tables of one of them
    for version in versions:
        assert not verify_version(version)
        assert version.read().height == version.manifest.rows


def test_the_first_of_two_different_pieces_of_one_key_counts(strict, raw, tmp_path):
    """A stage that is not deterministic across machines must not leave a mixture."""
    lake = strict.use("here")
    (piece,) = [p for p in build_toy(lake, raw).pieces if p.has("totals")]
    first = piece.part("totals").read()
    other = tmp_path / "other"
    shutil.copytree(piece.folder, other)
    rows = TOTALS.check(first.with_columns(total=pl.col("total") / 2))[0]
    from storage.parquet import write_parquet

    part = write_parquet(rows, TOTALS, other / "totals.parquet")
    parts = [part if p.table == "totals" else p for p in piece.manifest.parts]
    manifest = piece.manifest.model_copy(update={"parts": parts})
    (other / "_manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n")
    commit_piece(bucket_of(lake), other, manifest)
    assert (other / "_manifest.json").read_bytes() == (piece.folder / "_manifest.json").read_bytes()
    assert not list(other.glob("*.parquet"))
    there = strict.use("there")
    found = find_piece(there, *manifest.address.split("/"))
    assert found.part("totals").read().equals(first)
    (stray,) = find_remote_garbage(there, grace_hours=-1)
    assert stray.name == piece_prefix(manifest.address) and len(stray.objects) == 1


# Upkeep


def test_verify_names_the_damaged_object_and_drop_lets_it_be_remade(loose, raw):
    lake = loose.use("here")
    version = build_toy(lake, raw).versions["readings"]
    before = hashes(current_versions(lake))
    place = version.folder.relative_to(lake)
    names = [part.file for part in version.manifest.parts]
    bucket = bucket_of(lake)
    body = bytearray(bucket.get(f"{place}/{names[1]}").data)
    body[50] ^= 1
    bucket.put(f"{place}/{names[1]}", bytes(body))
    bucket.delete([f"{place}/{names[2]}"])
    bucket.put(f"{place}/stray.txt", b"x")
    reader = loose.use("there")
    damaged = current_version(reader, "toy", "readings")
    said = {entry.file.name: entry.problem for entry in verify_version(damaged)}
    assert said.keys() == {names[1], names[2], "stray.txt"}
    assert "sha256" in said[names[1]] and said[names[2]] == "is missing"
    with pytest.raises(LakeError, match=r"sha256|is missing"):
        damaged.read()
    drop(reader, verify_lake(reader).damage)
    with pytest.raises(LakeError, match="no table toy/readings in s3://"):
        current_version(reader, "toy", "readings")
    built = build_toy(reader, raw)
    assert not any(piece.made_now for piece in built.pieces)  # pieces have objects of their own
    assert hashes(current_versions(reader)) == before
    assert not any(verify_version(version) for version in current_versions(reader))


def test_damage_in_the_cache_alone_is_fetched_again(strict, raw):
    lake = strict.use("here")
    version = build_toy(lake, raw).versions["totals"]
    before = objects(lake)
    damaged = b"x" * version.manifest.parts[0].bytes
    version.places[0].write_bytes(damaged)
    (damage,) = verify_version(version)
    assert damage.file == version.places[0] and "sha256" in damage.problem
    drop(lake, [damage])
    assert objects(lake) == before
    current_version(lake, "toy", "totals").read()
    version.places[0].write_bytes(damaged)  # and reading alone heals it too
    assert current_version(lake, "toy", "totals").read().height == 2
    assert not verify_version(current_version(lake, "toy", "totals"))
    assert current_version(lake, "toy", "totals").read().height == 2


def test_a_damaged_piece_is_dropped_with_what_did_not_verify_it(strict, raw):
    lake = strict.use("here")
    build = build_toy(lake, raw)
    (total,) = [piece for piece in build.pieces if piece.manifest.stage == "add_up"]
    bucket, before = bucket_of(lake), objects(lake)
    address = build.pieces[0].manifest.address
    name = piece_object(address, build.pieces[0].manifest.parts[-1])
    bucket.put(name, b"x" * build.pieces[0].manifest.parts[-1].bytes)
    damaged = objects(lake)
    (damage,) = verify_lake(lake).damage
    assert str(damage.file) == name
    drop(lake, [damage])
    assert not bucket.listing(piece_prefix(address))
    restore(lake, min(restorable(lake)))
    assert objects(lake) == damaged  # what verified its inputs read good bytes and stayed
    manifest = f"{piece_prefix(total.manifest.address)}/_manifest.json"
    old = total.manifest.model_copy(update={"inputs_verified": False})
    bucket.put(manifest, old.sealed())
    drop(lake, [damage])
    assert bucket.get(manifest) is None
    again = build_toy(lake, raw)
    assert sum(piece.made_now for piece in again.pieces) == 2
    assert before <= objects(lake)


def test_gc_removes_only_what_is_unused_and_old(strict, raw):
    lake = strict.use("here")
    build_toy(lake, raw)
    assert find_remote_garbage(lake, grace_hours=-1) == []
    (raw / "f0.txt").write_text("a,1\n")
    build_toy(lake, raw)
    assert find_remote_garbage(lake) == []
    assert find_remote_garbage(lake, grace_hours=-1, keep=2) == []
    garbage = find_remote_garbage(lake, grace_hours=-1, keep=1)
    assert len([g for g in garbage if "/snapshots/" in g.name]) == 1
    assert len([g for g in garbage if "/versions/" in g.name]) == 3
    assert len([g for g in garbage if "/pieces/" in g.name]) == 2
    remove_objects(bucket_of(lake), garbage)
    assert find_remote_garbage(lake, grace_hours=-1, keep=1) == []
    assert not any(verify_version(version) for version in current_versions(lake))
    empty = strict.use("there")
    assert not any(piece.made_now for piece in build_toy(empty, raw).pieces)
    assert not [path for path in find_garbage(empty) if "pieces" in path.parts]


def test_what_gc_took_on_another_machine_is_put_again(strict, raw):
    lake = strict.use("here")
    build_toy(lake, raw)
    before = objects(lake)
    bucket = bucket_of(lake)
    bucket.delete(name for name in before if "/pieces/" in name or "/versions/" in name)
    assert not any(piece.made_now for piece in build_toy(lake, raw).pieces)
    assert objects(lake) == before
    # What the disk spoilt meanwhile is not put, but made anew.
    spoilt = next(lake.rglob("pieces/toy/add_up/*/totals.parquet"))
    spoilt.unlink()  # else the version's part, a hard link to it, would be spoilt too
    spoilt.write_bytes(b"x")
    bucket.delete(name for name in before if "/pieces/toy/add_up/" in name)
    with pytest.raises(LakeError, match="run the same command again"):
        build_toy(lake, raw)
    assert [piece.made_now for piece in build_toy(lake, raw).pieces] == [False] * 3 + [True]
    assert objects(lake) == before
    # A machine that has only manifests cannot put the files: it says so, and then makes them.
    other = strict.use("there")
    for version in current_versions(other):
        for part in version.manifest.parts:
            find_piece(other, *part.piece.split("/"))
    bucket.delete(name for name in before if "/pieces/" in name)
    with pytest.raises(LakeError, match="run the same command again"):
        build_toy(other, raw)
    for _ in range(8):
        try:
            build_toy(other, raw)
            break
        except LakeError as error:
            assert "run the same command again" in str(error)
    assert objects(other) == before


# Failures are sentences


def test_a_broken_pointer_is_said_and_mended_by_a_build_or_a_command(strict, raw):
    lake = strict.use("here")
    build_toy(lake, raw)
    bucket_of(lake).put("toy/current.json", b"<html>")
    with pytest.raises(LakeError, match="is no pointer; `novelty verify --drop`"):
        current_version(lake, "toy", "totals")
    build_toy(lake, raw)
    assert current_version(lake, "toy", "totals").read().height == 2
    bucket_of(lake).put("toy/current.json", b"<html>")
    assert main(["verify", "--drop", "--lake", strict.address]) == 2
    assert main(["verify", "--lake", strict.address]) == 0
    assert current_version(lake, "toy", "totals").read().height == 2


def test_a_damaged_snapshot_is_said_and_mended(strict, raw):
    build_toy(strict.use("here"), raw)
    lake = strict.use("there")
    before = hashes(build_toy(strict.use("here"), raw).versions.values())
    (name,) = [name for name in objects(lake) if name.endswith("_snapshot.json")]
    bucket_of(lake).put(name, b"{}")
    lake = strict.use("third")
    with pytest.raises(LakeError, match=r"_snapshot.json is damaged: .*`novelty verify --drop`"):
        current_versions(lake)
    assert main(["verify", "--drop", "--lake", strict.address]) == 2
    assert main(["verify", "--lake", strict.address]) == 0
    assert hashes(current_versions(lake)) == before


def test_a_bucket_of_the_time_before_snapshots(strict, raw):
    lake = strict.use("here")
    build_toy(lake, raw)
    bucket, tables = bucket_of(lake), current_snapshot(lake, "toy").tables
    bucket.delete(name for name in objects(lake) if "/snapshots/" in name or "current" in name)
    for table, key in tables.items():
        pointer = {"version": key, "path": f"versions/{key}"}
        bucket.put(f"toy/{table}/current.json", json.dumps(pointer).encode())
    lake = strict.use("there")
    assert {v.manifest.table: v.manifest.key for v in current_versions(lake)} == tables
    build_toy(lake, raw, scale=2.0)
    assert [name for name in objects(lake) if "current" in name] == ["toy/current.json"]
    assert current_snapshot(strict.use("third"), "toy").number == 1


def test_snapshots_of_a_bucket_are_read_pinned_and_restored(strict, raw, capsys):
    build_toy(strict.use("here"), raw)
    build_toy(strict.use("here"), raw, scale=2.0)
    lake = strict.use("there")
    words = ["--lake", strict.address]
    assert main(["path", "toy@s1", *words]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert pl.read_parquet(folder / "readings" / "*.parquet")["value"].max() < 50
    assert main(["history", "--pin", "toy@s1", *words]) == 0
    assert find_remote_garbage(lake, grace_hours=-1, keep=1) == []
    assert main(["restore", "toy@s1", *words]) == 0
    assert current_version(strict.use("third"), "toy", "readings").read()["value"].max() < 50


def test_names_in_a_bucket_cannot_lead_out_of_the_cache(strict, raw):
    version = build_toy(strict.use("here"), raw).versions["totals"]
    lake = strict.use("there")
    bucket = bucket_of(lake)
    name = f"toy/totals/versions/{version.manifest.key}/_manifest.json"
    (part,) = version.manifest.parts
    parts = [part.model_copy(update={"file": "../../../../out"})]
    bucket.put(name, version.manifest.model_copy(update={"parts": parts}).sealed())
    with pytest.raises(LakeError, match="leads out of the lake"):
        current_version(lake, "toy", "totals").read()
    bucket.put("toy/current.json", b'{"snapshot": "../../x"}')
    with pytest.raises(LakeError, match="leads out of the lake"):
        current_version(strict.use("third"), "toy", "totals")


def test_missing_bucket(monkeypatch, strict, raw):
    strict.use("here")
    lake = lake_root("s3://no-such-bucket/x")
    with pytest.raises(LakeError, match="no such bucket"):
        build_toy(lake, raw)
    with pytest.raises(LakeError, match="no such bucket"):
        current_versions(lake)


def test_wrong_credentials_are_not_repeated(monkeypatch, loose):
    lake = loose.use("here")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
    with pytest.raises(LakeError, match="access was denied") as caught:
        current_versions(lake)
    assert "wrong-secret-value" not in str(caught.value) and KEY not in str(caught.value)


def test_missing_credentials(monkeypatch, loose):
    lake = loose.use("here")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(LakeError, match="set AWS_ACCESS_KEY_ID"):
        current_versions(lake)


def test_network_failure_is_one_sentence_and_a_later_run_finishes(monkeypatch, tmp_path, raw):
    port = free_port()
    machine = Machine(monkeypatch, f"http://127.0.0.1:{port}", tmp_path, f"s3://{BUCKET}/x")
    lake = machine.use("here")
    with pytest.raises(LakeError, match="cannot be reached") as caught:
        build_toy(lake, raw)
    assert "\n" not in str(caught.value)
    with rclone(tmp_path, port):
        old = build_toy(lake, raw)
    (raw / "f0.txt").write_text("a,1\n")
    with pytest.raises(LakeError, match="run the same command again"):
        build_toy(lake, raw)
    with rclone(tmp_path, port):
        assert (
            current_version(lake, "toy", "readings").manifest == old.versions["readings"].manifest
        )
        new = build_toy(lake, raw)
        assert not any(verify_version(version) for version in current_versions(lake))
    assert new.versions["readings"].manifest.rows < old.versions["readings"].manifest.rows


class Cutting(http.server.BaseHTTPRequestHandler):
    """A store without e-tags whose first two replies end in their middle."""

    data = bytes(range(256)) * 400
    replies = 0

    def do_GET(self) -> None:
        type(self).replies += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("Last-Modified", "Wed, 18 Nov 2026 05:00:00 GMT")
        self.end_headers()
        self.wfile.write(self.data[: 50_000 if self.replies < 3 else None])
        self.close_connection = True

    def log_message(self, *words: object) -> None:
        """Nothing is said."""


@pytest.mark.parametrize("way", ["get", "digest", "file"])
def test_a_reply_that_is_cut_is_asked_for_again(monkeypatch, tmp_path, way):
    monkeypatch.setattr(Cutting, "replies", 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cutting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name, value in settings(url, tmp_path).items():
            monkeypatch.setenv(name, value)
        bucket = Bucket("s3://bucket/lake")
        monkeypatch.setenv("NOVELTY_S3_RETRIES", "1")
        with pytest.raises(LakeError, match="cannot read x in s3://bucket/lake"):
            bucket.get("x")
        monkeypatch.setattr(Cutting, "replies", 0)
        monkeypatch.setenv("NOVELTY_S3_RETRIES", "2")
        if way == "get":
            assert bucket.get("x").data == Cutting.data
        else:
            into = tmp_path / "x" if way == "file" else None
            assert bucket.digest("x", into) == hashlib.sha256(Cutting.data).hexdigest()
            assert into is None or into.read_bytes() == Cutting.data
        server.shutdown()
    assert Cutting.replies == 3
