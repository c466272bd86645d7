"""A stage runs once, loses no record, and redoes only what a change touches."""

import json
import os
import pickle
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from schemas.config import Settings
from schemas.errors import (
    ConfigError,
    LakeError,
    LockedError,
    NativeError,
    RecordError,
    TooManyRejects,
)
from storage.locks import locked
from storage.tables import current_version
from tasks.engine.estimates import note_time
from tasks.engine.places import Spread
from tasks.engine.stage import Build, Produced, Shard, stage, stage_version
from tests.toy import (
    READINGS,
    ReadSettings,
    add_up,
    build_toy,
    parquet_bytes,
    read_lines,
    write_raw,
)


def made(build: Build) -> dict[str, int]:
    counts: dict[str, int] = {}
    for piece in build.pieces:
        stage_name = piece.manifest.stage
        counts[stage_name] = counts.get(stage_name, 0) + piece.made_now
    return counts


def test_second_run_makes_nothing(tmp_path):
    write_raw(tmp_path / "raw")
    assert made(build_toy(tmp_path / "lake", tmp_path / "raw")) == {"read_lines": 6, "add_up": 1}
    before = parquet_bytes(tmp_path / "lake")
    assert made(build_toy(tmp_path / "lake", tmp_path / "raw")) == {"read_lines": 0, "add_up": 0}
    assert parquet_bytes(tmp_path / "lake") == before


def test_changed_file_remakes_its_shard_only(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    (tmp_path / "raw" / "f4.txt").write_text("a,1\n")
    assert made(build_toy(tmp_path / "lake", tmp_path / "raw")) == {"read_lines": 1, "add_up": 1}


def test_touched_file_remakes_nothing(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    (tmp_path / "raw" / "f4.txt").touch()
    assert made(build_toy(tmp_path / "lake", tmp_path / "raw")) == {"read_lines": 0, "add_up": 0}


def test_same_output_stops_the_change_there(tmp_path):
    """A change of the raw file that gives the same rows does not reach later stages."""
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    path = tmp_path / "raw" / "f1.txt"
    path.write_text(path.read_text().rstrip("\n"))
    assert made(build_toy(tmp_path / "lake", tmp_path / "raw")) == {"read_lines": 1, "add_up": 0}


def test_changed_setting_remakes_everything_that_depends_on_it(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    again = build_toy(tmp_path / "lake", tmp_path / "raw", scale=2.0)
    assert made(again) == {"read_lines": 6, "add_up": 1}


def test_removed_file_leaves_the_table(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    (tmp_path / "raw" / "f0.txt").unlink()
    build = build_toy(tmp_path / "lake", tmp_path / "raw")
    assert "f0.txt" not in build.versions["readings"].read()["file"].to_list()


def test_bad_records_are_quarantined_with_their_rule(tmp_path):
    write_raw(tmp_path / "raw")
    quarantine = build_toy(tmp_path / "lake", tmp_path / "raw").versions["quarantine"].read()
    assert dict(quarantine.select("record", "rule").iter_rows()) == {
        "f2.txt:3": "number",
        "f2.txt/4": "kind_allowed",
        "f2.txt/5": "value_range",
    }


def test_too_many_bad_records_stop_the_build(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "x.txt").write_text("a,1\na,?\na,?\n")
    with pytest.raises(TooManyRejects, match=r"refused 2 of 3 .* x\.txt:1"):
        build_toy(tmp_path / "lake", raw)
    with pytest.raises(LakeError, match="no table"):
        current_version(tmp_path / "lake", "toy", "readings")


def test_a_stage_that_loses_a_record_is_a_defect(tmp_path):
    @stage(writes=(READINGS,))
    def forgetful(shard, settings):
        return Produced({"readings": READINGS.empty()}, records=1)

    with pytest.raises(AssertionError, match="1 records went in, but 0 came out"):
        forgetful.make(tmp_path, "toy", Shard("x"), Settings())


def test_a_key_in_two_shards_is_refused(tmp_path):
    @stage(writes=(READINGS,))
    def same(shard, settings):
        row = pl.DataFrame([("f", 0, 1.0, "a")], schema=READINGS.polars_schema, orient="row")
        return Produced({"readings": row}, records=1)

    with pytest.raises(LakeError, match=r"key \('f', 0\) stands in two shards"):
        with Build("toy", tmp_path) as build:
            build.run(same, [Shard("one"), Shard("two")], Settings())


def test_a_stage_is_a_plain_function_too(tmp_path):
    from storage.raw import open_raw

    write_raw(tmp_path)
    (first, *_) = open_raw(tmp_path).files()
    produced = read_lines(Shard("s", files=(first,), source=str(tmp_path)), ReadSettings())
    assert produced.records == 20
    assert produced.tables["readings"].height == 20


def test_versions_of_stages_are_found_by_name():
    assert stage_version("tests.toy:read_lines") == 1
    assert stage_version("tests.toy:gone") is None
    assert stage_version("tests.nowhere:gone") is None
    assert add_up.code == "tests.toy:add_up"


def test_second_builder_is_told_who_builds(tmp_path):
    with locked(tmp_path, "toy"), pytest.raises(LockedError, match="toy is being built by process"):
        with Build("toy", tmp_path):
            pass


@stage(writes=(READINGS,), apart=True)
def one_apart(shard: Shard, settings: Settings) -> Produced:
    """One row: this process and how many shards were under way with this one at most."""
    folder = Path(shard.about)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / shard.name).touch()
    most, deadline = 0, time.monotonic() + 30
    while most < (getattr(settings, "trainings", None) or 2) and time.monotonic() < deadline:
        most = max(most, len(list(folder.iterdir())))
        time.sleep(0.02)
    row = [(f"{shard.name} in {os.getpid()}", 0, float(most), "a")]
    return Produced({"readings": pl.DataFrame(row, schema=READINGS.polars_schema, orient="row")}, 1)


@stage(writes=(READINGS,), apart=True)
def dies(shard: Shard, settings: Settings) -> Produced:
    if shard.name == "user":
        raise ConfigError("that cannot be")
    os._exit(3)


def test_shards_in_processes_of_their_own(tmp_path):
    """Two at once, each in another process than this one; a later shard finds a warm one."""
    with Build("toy", tmp_path / "lake", workers=2) as build:
        shards = [Shard(name, about=str(tmp_path / "here")) for name in ("one", "two")]
        build.run(one_apart, shards, Settings())
        build.run(one_apart, [Shard("three", about=str(tmp_path / "here"))], Settings())
    rows = build.versions["readings"].read()
    assert set(rows.filter(~pl.col("file").str.starts_with("three"))["value"]) == {2.0}
    processes = {int(name.split()[-1]) for name in rows["file"]}
    assert len(processes) == 2
    assert os.getpid() not in processes


class Trainings(Settings):
    trainings: int | None = Field(None, exclude=True)


def test_more_shards_than_cores_are_under_way_where_that_is_asked_for(tmp_path):
    with Build("toy", tmp_path / "lake", workers=2) as build:
        shards = [Shard(name, about=str(tmp_path / "here")) for name in ("one", "two", "three")]
        build.run(one_apart, shards, Trainings(trainings=3))
    assert set(build.versions["readings"].read()["value"]) == {3.0}


@stage(writes=(READINGS,))
def where_made(shard: Shard, settings: Settings) -> Produced:
    """One row: the process that made it."""
    row = [(f"{shard.name} in {os.getpid()}", 0, 0.0, "a")]
    return Produced({"readings": pl.DataFrame(row, schema=READINGS.polars_schema, orient="row")}, 1)


def test_a_stage_that_took_long_is_spread_over_processes_at_once(tmp_path):
    lake = tmp_path / "lake"
    with Build("toy", lake, workers=2) as build:
        (piece,) = build.run(where_made, [Shard("first")], Settings())
        note_time(lake, piece.manifest, 60.0)
    with Build("toy", lake, workers=2) as build:
        build.run(where_made, [Shard(name) for name in ("one", "two", "three")], Settings())
    files = build.versions["readings"].read()["file"]
    processes = [int(name.split()[-1]) for name in files if "first" not in name]
    assert len(processes) == 3 and {os.getpid()} < set(processes)


def test_the_smallest_shard_tells_the_pace_and_then_the_largest_come_first():
    left = Spread(2, {0: 30.0, 1: 5.0, 2: 10.0, 3: 40.0}, None)
    first = left.next()
    assert first == 1 and not left.is_long(first)
    with left.measured(first):
        pass
    assert [left.next() for _ in range(len(left))] == [3, 0, 2]


def test_a_thread_that_waits_for_others_is_not_busy(monkeypatch):
    left = Spread(2, {0: 1.0, 1: 1.0}, None)
    first = left.next()
    with monkeypatch.context() as clocks, left.measured(first):
        now = time.monotonic()
        clocks.setattr(time, "monotonic", lambda: now + 100)
    assert not left.is_long(left.next())


@pytest.mark.parametrize(
    ("workers", "sizes", "long"),
    [
        (2, {0: 0.6, 1: 0.6}, False),
        (2, {0: 2.0, 1: 3.0}, True),
        (1, {0: 2.0, 1: 3.0}, False),
        (2, {0: 9.0}, False),
    ],
)
def test_what_would_keep_the_threads_busy_goes_to_processes(workers, sizes, long):
    left = Spread(workers, sizes, 1.5 * sum(sizes.values()))
    assert left.is_long(left.next()) == long


def test_shards_follow_the_first_that_went_to_a_process_and_go_sooner_where_some_are_warm():
    left = Spread(2, {0: 3.0, 1: 0.5}, 3.5)
    assert all(left.is_long(left.next()) for _ in range(len(left)))
    sizes = {0: 0.7, 1: 0.7}
    cold, warm = (Spread(2, sizes, 1.4, warm=warm) for warm in (False, True))
    assert warm.is_long(warm.next()) and not cold.is_long(cold.next())


def test_errors_of_processes_of_their_own(tmp_path):
    with pytest.raises(ConfigError, match="that cannot be"), Build("toy", tmp_path) as build:
        build.run(dies, [Shard("user")], Settings())
    with pytest.raises(NativeError, match="native: its process died"):
        with Build("toy", tmp_path) as build:
            build.run(dies, [Shard("native")], Settings())


def test_manifests_tell_where_rows_come_from(tmp_path):
    write_raw(tmp_path / "raw")
    build = build_toy(tmp_path / "lake", tmp_path / "raw")
    manifest = json.loads((build.pieces[0].folder / "_manifest.json").read_text())
    assert manifest["inputs"][0]["name"] == "f0.txt"
    assert manifest["rows_in"] == manifest["rows_out"] + manifest["quarantined"] == 20
    assert {part["table"] for part in manifest["parts"]} == {"readings", "files", "quarantine"}


lines = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["a", "b", "c", ""]),
            st.one_of(st.floats(-10, 200), st.just(float("nan"))),
        ).map(lambda pair: f"{pair[0]},{pair[1]}"),
        st.sampled_from(["junk", "a,", ",,"]),
    ),
    max_size=30,
)


@given(files=st.lists(lines, min_size=1, max_size=3))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_rows_in_are_rows_out_plus_quarantined(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("property")
    (root / "raw").mkdir()
    for number, body in enumerate(files):
        (root / "raw" / f"{number}.txt").write_text("\n".join(body))
    with Build("toy", root / "lake", max_reject_share=1.0) as build:
        source = build.source(root / "raw")
        shards = [Shard(f.name, files=(f,), source=source.root) for f in source.files()]
        build.run(read_lines, shards, ReadSettings())
    count = sum(len(body) for body in files)
    quarantine = build.versions["quarantine"].read().filter(pl.col("table_name") == "readings")
    assert build.versions["readings"].manifest.rows + quarantine.height == count


def test_a_record_error_crosses_processes():
    error = pickle.loads(pickle.dumps(RecordError("too_large", "9 bytes, expected 5")))
    assert (error.rule, error.message, str(error)) == ("too_large", *["9 bytes, expected 5"] * 2)


def test_what_is_left_out_of_a_source_is_said(tmp_path, caplog):
    write_raw(tmp_path / "raw", files=2)
    (tmp_path / "raw/link.txt").symlink_to(tmp_path / "raw/f0.txt")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    said = [message for message in caplog.messages if "left out" in message]
    assert len(said) == 1 and "1 entries of" in said[0] and "first link.txt (" in said[0]
