"""Timings beside the manifests, and a dry run that says what the build then does."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.dry_run import describe, stages_of
from schemas.manifest import PieceManifest
from storage.locks import locked
from tasks.engine.estimates import DryRun, Pace, dry_run, duration, note_time, paces
from tasks.engine.stage import Build
from tests.toy import FILES, READINGS, build_toy, read_lines, write_raw

ROOT = Path(__file__).parents[1]


def timings(lake: Path) -> Path:
    return lake / ".novelty" / "timings" / f"{socket.gethostname()}.jsonl"


def manifest(stage: str, records: int, shard: str = "x") -> PieceManifest:
    return PieceManifest(
        benchmark="toy",
        stage=stage,
        code="tests.toy:" + stage,
        stage_version=1,
        key="k",
        shard=shard,
        settings={},
        source=None,
        inputs=[],
        rows_in=records,
        rows_out=records,
        quarantined=0,
        parts=[],
    )


def planned(lake: Path, raw: Path, **how) -> DryRun:
    with dry_run() as run:
        build_toy(lake, raw, **how)
    return run


def said(run: DryRun) -> dict[str, tuple[int, int, str]]:
    """Per stage: certain to be made, perhaps, why."""
    return {plan.stage: (plan.missing, plan.waiting, plan.why()) for plan in run.plans}


def tree(lake: Path) -> dict[str, bytes]:
    """Every file but the cache of digests."""
    return {
        str(path.relative_to(lake)): path.read_bytes()
        for path in sorted(lake.rglob("*"))
        if path.is_file() and "hashes" not in path.name
    }


@pytest.fixture
def built(tmp_path) -> tuple[Path, Path]:
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    return tmp_path / "lake", tmp_path / "raw"


def test_every_piece_made_is_timed_once(built):
    lake, raw = built
    build_toy(lake, raw)
    lines = [json.loads(line) for line in timings(lake).read_text().splitlines()]
    assert sorted((line["stage"], line["shard"], line["records"]) for line in lines) == [
        ("add_up", "all", 2),
        *(("read_lines", f"f{n}.txt", 20) for n in range(6)),
    ]
    assert all(0 < line["seconds"] < 60 and line["when"] > 1.7e9 for line in lines)


def test_times_are_in_no_manifest(built, tmp_path):
    lake, raw = built
    build_toy(tmp_path / "other", raw)
    one, two = (
        {name: data for name, data in tree(root).items() if name.endswith("_manifest.json")}
        for root in (lake, tmp_path / "other")
    )
    assert one == two


def test_pace_is_by_record_or_by_shard(tmp_path):
    (tmp_path / ".novelty").mkdir()
    note_time(tmp_path, manifest("read", 100), 2.0)
    note_time(tmp_path, manifest("read", 300), 6.0)
    note_time(tmp_path, manifest("none", 0), 3.0)
    found = paces(tmp_path, "toy")
    assert found == {"read": Pace(2, 400, 8.0, 8.0), "none": Pace(1, 0, 3.0, 3.0)}
    assert found["read"].expect(50) == pytest.approx(1.0)
    assert found["read"].expect(None) == pytest.approx(4.0)
    assert found["none"].expect(50) == pytest.approx(3.0)
    assert paces(tmp_path, "other") == {}
    assert paces(tmp_path / "nowhere", "toy") == {}


def test_a_pace_knows_how_busy_the_threads_were(tmp_path):
    (tmp_path / ".novelty").mkdir()
    note_time(tmp_path, manifest("read", 100), 2.0, 0.5)
    note_time(tmp_path, manifest("read", 100), 3.0)  # by an older version
    assert paces(tmp_path, "toy") == {"read": Pace(2, 200, 5.0, 3.5)}


def test_only_recent_pieces_count(tmp_path, monkeypatch):
    (tmp_path / ".novelty").mkdir()
    monkeypatch.setattr("tasks.engine.estimates.RECENT", 2)
    for number, seconds in enumerate((100.0, 1.0, 1.0)):
        monkeypatch.setattr("time.time", lambda number=number: 1.8e9 + number)
        note_time(tmp_path, manifest("read", 10), seconds)
    assert paces(tmp_path, "toy")["read"] == Pace(2, 20, 2.0, 2.0)


def test_many_writers_and_torn_lines(tmp_path):
    (tmp_path / ".novelty").mkdir()
    with ThreadPoolExecutor(8) as pool:
        for number in range(400):
            pool.submit(note_time, tmp_path, manifest("read", 1, f"shard {number}"), 0.5)
    with timings(tmp_path).open("ab") as file:
        file.write(b'{"benchmark": "toy", "stage": "read", "rec\nnot JSON\n')
    assert paces(tmp_path, "toy")["read"] == Pace(400, 400, 200.0, 200.0)


def test_times_that_cannot_be_written_do_no_harm(built):
    lake, raw = built
    shutil.rmtree(lake / ".novelty" / "timings")
    (lake / ".novelty" / "timings").write_text("a file stands here")
    (raw / "f1.txt").write_text("a,1\n")
    assert sum(piece.made_now for piece in build_toy(lake, raw).pieces) == 2


def test_first_build_is_planned_and_leaves_no_lake(tmp_path):
    write_raw(tmp_path / "raw")
    run = planned(tmp_path / "lake", tmp_path / "raw")
    assert said(run) == {"read_lines": (6, 0, "first build")}
    assert run.unplanned_after == "read_lines"
    assert not (tmp_path / "lake").exists()
    lines = describe(run, ["read_lines", "add_up"])
    assert lines[1].split() == ["read_lines", "6", "6", "unknown", "first", "build"]
    assert lines[2] == "after read_lines, as its rows and the settings ask for: add_up"
    assert lines[3] == (
        "no time is known; not counted: read_lines, what comes after read_lines; nothing was made"
    )


def test_nothing_to_do(built):
    lake, raw = built
    before = tree(lake)
    with locked(lake, "toy"):
        run = planned(lake, raw)
    assert said(run) == {"read_lines": (0, 0, ""), "add_up": (0, 0, "")}
    assert describe(run, [])[-1] == "nothing to do"
    assert tree(lake) == before


def test_a_build_killed_before_it_published(built):
    lake, raw = built
    (lake / ".novelty" / "builds" / "toy.json").unlink()
    assert describe(planned(lake, raw), [])[-1].startswith("nothing to make; a build would publish")


@pytest.mark.parametrize(
    ("name", "body", "first", "second"),
    [
        ("f4.txt", "a,1\n", (1, 0, "changed raw file (f4.txt)"), (0, 1)),
        ("f9.txt", "a,1\n", (1, 0, "new raw file (f9.txt)"), (0, 1)),
        ("f0.txt", None, (0, 0, ""), (1, 0)),
    ],
    ids=["changed", "new", "removed"],
)
def test_changes_of_raw_files(built, name, body, first, second):
    lake, raw = built
    (raw / name).unlink(missing_ok=True)
    if body:
        (raw / name).write_text(body)
    before = tree(lake)
    run = planned(lake, raw)
    why = "perhaps 1 after read_lines" if second[1] else "input changed upstream (readings)"
    assert said(run) == {"read_lines": first, "add_up": (*second, why)}
    assert tree(lake) == before


def test_changes_of_settings_and_versions(built, monkeypatch):
    lake, raw = built
    assert said(planned(lake, raw, scale=2.0))["read_lines"] == (
        6,
        0,
        "settings changed (scale)",
    )
    monkeypatch.setattr(read_lines, "version", 2)
    assert said(planned(lake, raw))["read_lines"][2] == "stage version (1 to 2)"
    monkeypatch.setattr(read_lines, "version", 1)
    monkeypatch.setattr(read_lines, "_writes", (dataclasses.replace(READINGS, version=2), FILES))
    assert said(planned(lake, raw))["read_lines"][2] == "table version (readings 1 to 2)"


def test_expected_time(built):
    """Six shards of 20 records at 0.5 s a record, two at once: 30 s; add_up was never timed."""
    lake, raw = built
    line = {"benchmark": "toy", "stage": "read_lines", "shard": "x", "records": 40, "seconds": 20.0}
    timings(lake).write_text(json.dumps(line | {"when": 1.8e9}) + "\n")
    run = planned(lake, raw, scale=2.0)
    assert [plan.seconds for plan in run.plans] == [pytest.approx(60 / 2), None]
    assert describe(run, [])[-1] == (
        "about 30 s on this machine; not counted: add_up, shards that only new rows will show; "
        "nothing was made"
    )


def test_durations_for_people():
    assert [duration(s) for s in (None, 0.0, 0.2, 89, 600, 5400, 36000)] == [
        "unknown",
        "-",
        "1 s",
        "89 s",
        "10 min",
        "1.5 h",
        "10.0 h",
    ]


edits = st.lists(
    st.tuples(st.sampled_from(["change", "same rows", "new", "remove"]), st.integers(0, 5)),
    max_size=3,
)


@given(edits=edits, scale=st.sampled_from([1.0, 2.0]))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_build_does_what_the_dry_run_said(tmp_path_factory, edits, scale):
    root = tmp_path_factory.mktemp("property")
    write_raw(root / "raw")
    build_toy(root / "lake", root / "raw")
    for kind, number in edits:
        path = root / "raw" / f"f{number}.txt"
        if kind == "change":
            path.write_text("a,1\nb,2\n")
        elif kind == "same rows" and path.exists():
            path.write_text(path.read_text().rstrip("\n"))
        elif kind == "new":
            (root / "raw" / f"g{number}.txt").write_text("b,3\n")
        elif kind == "remove":
            path.unlink(missing_ok=True)
    run = planned(root / "lake", root / "raw", scale=scale)
    made: dict[str, int] = {"read_lines": 0, "add_up": 0}
    for piece in build_toy(root / "lake", root / "raw", scale=scale).pieces:
        made[piece.manifest.stage] += piece.made_now
    for plan in run.plans:
        assert plan.missing <= made[plan.stage] <= plan.missing + plan.waiting
    assert run.unplanned_after is None


def test_the_stages_of_every_flow_are_known_in_order():
    import flows.kowl
    import flows.threedos

    assert stages_of(flows.kowl)[:4] == [
        "read_lists",
        "unify_releases",
        "cut_increments",
        "validate_videos",
    ]
    assert stages_of(flows.threedos)[-2:] == ["score_outputs", "evaluate_scores"]


def test_a_plan_that_needs_rows_ends_there(built):
    """Code between the stages may fail on rows of the last build; that is no error of the user."""
    lake, raw = built
    with dry_run() as run, Build("toy", lake) as build:
        source = build.source(raw)
        from tasks.engine.stage import Shard
        from tests.toy import ReadSettings

        shards = [Shard(file.name, files=(file,), source=source.root) for file in source.files()]
        build.run(read_lines, shards, ReadSettings(scale=3.0))
        raise KeyError("a row that only the new settings give")
    assert run.unplanned_after == "read_lines"


def test_an_error_of_the_user_stays_one(built):
    lake, raw = built
    with pytest.raises(KeyError), dry_run(), Build("toy", lake) as build:
        build.source(raw)
        raise KeyError("nothing was missing before")


@pytest.fixture
def sample(tmp_path) -> Path:
    from tasks.sample.write import write_sample

    write_sample(tmp_path / "sample", seed=0, only=["condda"])
    return tmp_path / "sample" / "condda"


def test_the_command_needs_no_server_and_no_lake(tmp_path, sample):
    """With Prefect forbidden to start a server, a build would fail; a dry run does not."""
    words = ["build", "condda", "--tests", str(sample), "--lake", str(tmp_path / "lake")]
    environment = os.environ | {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false"}
    environment.pop("PREFECT_API_URL", None)
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *words, "--dry-run"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "first build" in done.stdout
    assert "run_agent" in done.stdout
    assert "reference rates of another machine" in done.stdout
    assert "export_session" not in done.stdout
    assert not (tmp_path / "lake").exists()


@pytest.fixture
def make(tmp_path):
    """`make` with a `novelty` that only tells its arguments, and fails for kowl."""
    command = tmp_path / "novelty"
    command.write_text('#!/bin/sh\necho "$*" >> "$(dirname "$0")/calls"\ntest "$2" != kowl\n')
    command.chmod(0o755)

    def run(target: str, *words: str) -> tuple[int, list[str], str]:
        done = subprocess.run(
            ["make", "--no-print-directory", "-o", "setup", target, f"BIN={tmp_path}", *words],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))},
            capture_output=True,
            text=True,
            check=False,
        )
        calls = tmp_path / "calls"
        return (
            done.returncode,
            calls.read_text().splitlines() if calls.exists() else [],
            done.stdout,
        )

    return run


def test_make_all_goes_on_after_a_failure_and_says_so(make):
    code, calls, out = make("all", "KOWL=lists", "CONDDA=my tests", "CONDDA_ARGS=--lake x", "DRY=1")
    assert calls == [
        "build kowl --lists lists --dry-run",
        "build condda --tests my tests --dry-run --lake x",
    ]
    assert code != 0
    assert out.splitlines() == [
        f"{name}: skipped, no source named" for name in ("novelcraft", "threedos", "semantic")
    ]


def test_make_all_succeeds_when_all_named_do(make):
    code, calls, _ = make("all", "SEMANTIC=cifar10=data")
    assert (code, calls) == (0, ["build semantic --source cifar10=data"])


def test_make_without_a_source_leaves_it_to_the_options(make):
    assert make("novelcraft", "ARGS=--source x")[1] == ["build novelcraft --source x"]
    assert make("kowl", "ARGS=--lists x")[1][-1] == "build kowl --lists x"
    assert make("serve", "ARGS=--tests x")[1][-1] == "condda serve --tests x"
    assert make("serve", "SOURCE=a b")[1][-1] == "condda serve --tests a b"


def test_make_all_takes_one_folder_of_all_benchmarks(make, tmp_path):
    """As `novelty sample` writes it; what is named for itself wins."""
    root = tmp_path / "my data"
    for name in ("kowl/lists", "kowl/videos", "semantic/stl10", "threedos/shapenet", "condda"):
        (root / name).mkdir(parents=True)
    for name in ("novelcraft.zip", "semantic/cifar10.tar.gz"):
        (root / name).touch()
    code, calls, out = make("all", f"SOURCE={root}", "CONDDA=other")
    assert calls == [
        f"build novelcraft --source {root}/novelcraft.zip",
        f"build kowl --lists {root}/kowl/lists --videos {root}/kowl/videos",
        f"build threedos --source shapenet={root}/threedos/shapenet",
        f"build semantic --source cifar10={root}/semantic/cifar10.tar.gz"
        f" --source stl10={root}/semantic/stl10",
        "build condda --tests other",
    ]
    assert (code != 0, out) == (True, "")


def test_make_all_without_any_source_is_a_mistake(make):
    code, calls, out = make("all")
    assert (code, calls, out.count("skipped, no source named")) == (2, [], 5)


def test_make_query_passes_quotes_and_dollars_on(make):
    sql = """select "a b", 'x' from t where v ~ '^c$' and `d`"""
    assert make("query", f"SQL={sql}")[1] == [f"query {sql}"]
