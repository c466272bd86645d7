"""verify names what differs, status says why a table is stale, gc keeps what is in use."""

from schemas.tables import QUARANTINE
from storage.damage import drop, verify_lake, verify_version
from storage.filehash import HashCache
from storage.layout import hash_cache_path
from storage.raw import open_raw
from storage.tables import current_version, current_versions
from storage.tombstones import discard
from storage.upkeep import find_garbage, statuses, trace_lineage
from tests.toy import build_toy, parquet_bytes, write_raw


def stale(
    lake,
    stage_version=lambda code: 1,
    schema_version=lambda benchmark, table: QUARANTINE.version if table == "quarantine" else 1,
):
    cache = HashCache(hash_cache_path(lake))

    def listing(root):
        return {file.name: file.digest for file in open_raw(root, cache).files()}

    return {s.name: s.stale for s in statuses(lake, stage_version, schema_version, listing)}


def test_fresh_then_stale_and_why(tmp_path):
    raw, lake = tmp_path / "raw", tmp_path / "lake"
    write_raw(raw)
    build_toy(lake, raw)
    assert set(stale(lake)) == {"toy/readings", "toy/files", "toy/totals", "toy/quarantine"}
    assert not any(stale(lake).values())
    (raw / "f0.txt").write_text("a,1\n")
    (raw / "new.txt").write_text("a,1\n")
    (why,) = stale(lake)["toy/totals"]
    assert why == f"raw files under {raw}: 1 changed (f0.txt), 1 added"
    (raw / "f1.txt").unlink()
    assert "1 removed (f1.txt), 1 added" in stale(lake)["toy/readings"][0]


def test_stale_because_code_changed(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    why = stale(tmp_path / "lake", stage_version=lambda code: 2 if "add_up" in code else 1)
    assert why["toy/totals"] == ["stage add_up is version 2 now, was 1"]
    assert why["toy/readings"] == []
    why = stale(tmp_path / "lake", schema_version=lambda b, t: 3 if t == "files" else 1)
    assert why["toy/files"] == ["schema is version 3 now, was 1"]


def test_missing_source_is_said(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    (tmp_path / "raw").rename(tmp_path / "elsewhere")
    assert "cannot be read now" in stale(tmp_path / "lake")["toy/readings"][0]


def test_verify_names_the_damaged_file_and_drop_lets_it_be_remade(tmp_path):
    lake = tmp_path / "lake"
    write_raw(tmp_path / "raw")
    version = build_toy(lake, tmp_path / "raw").versions["readings"]
    before = parquet_bytes(lake)
    assert not verify_version(version)
    places = version.places
    body = bytearray(places[1].read_bytes())
    body[50] ^= 1
    places[1].write_bytes(body)
    (damage,) = verify_version(version)
    assert damage.file == places[1] and "sha256" in damage.problem
    places[2].unlink()
    (version.folder / "stray.txt").write_text("x")
    problems = {entry.file.name: entry.problem for entry in verify_version(version)}
    assert problems[places[2].name] == "is missing"
    assert problems["stray.txt"] == "is not in the manifest"
    drop(lake, verify_lake(lake).damage)
    build_toy(lake, tmp_path / "raw")
    assert parquet_bytes(lake) == before


def test_gc_removes_only_what_nothing_refers_to(tmp_path):
    lake, raw = tmp_path / "lake", tmp_path / "raw"
    write_raw(raw)
    build_toy(lake, raw)
    assert find_garbage(lake) == []
    (raw / "f0.txt").write_text("a,1\n")
    build_toy(lake, raw)
    assert find_garbage(lake) == []  # readers may still read it
    garbage = find_garbage(lake, grace_hours=-1, keep=1)
    assert len([path for path in garbage if path.parent.name == "snapshots"]) == 1
    assert len([path for path in garbage if "versions" in path.parts]) == 3
    assert len([path for path in garbage if "pieces" in path.parts]) == 2
    before = parquet_bytes(lake)
    discard(lake, garbage)
    assert find_garbage(lake, grace_hours=-1, keep=1) == [] and parquet_bytes(lake) == before
    assert not any(verify_version(version) for version in current_versions(lake))
    assert not any(piece.made_now for piece in build_toy(lake, raw).pieces)


def test_lineage_leads_to_the_raw_files(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    tree = trace_lineage(tmp_path / "lake", current_version(tmp_path / "lake", "toy", "totals"))
    totals = tree["toy/totals"]
    assert totals.stage == "add_up"
    readings = totals.tables["readings"]
    assert readings.stage == "read_lines" and len(readings.shards) == 6
    assert readings.raw == {str(tmp_path / "raw"): {f"f{i}.txt" for i in range(6)}}
