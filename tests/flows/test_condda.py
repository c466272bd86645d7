"""The CONDDA flow end to end: in process, against a server, and out of a server's state."""

import shutil

import polars as pl
import pytest

from schemas.condda import Config, RunSettings
from schemas.errors import SourceError
from storage.tables import current_version
from tasks.condda.server.serve import make_harness, running
from tasks.sample.condda import bad_condda_records, write_condda

SESSION_TABLES = ("rounds", "results", "feedback", "metrics", "characterization")


def table(lake, name: str) -> pl.DataFrame:
    return current_version(lake, "condda", name).read()


@pytest.fixture(scope="module")
def built(tmp_path_factory, prefect_api):
    from flows.condda import build

    root = tmp_path_factory.mktemp("condda")
    write_condda(root / "tests", rows=192)
    config = Config(tests=root / "tests", lake=root / "lake")
    build(config)
    return root, config


def test_every_good_test_is_run_by_every_agent_with_and_without_the_red_light(built):
    lake = built[0] / "lake"
    tests, sessions = table(lake, "tests"), table(lake, "sessions")
    assert sessions.height == tests.height * 2 * 2
    assert (sessions["finished"] == sessions["tests"]).all()
    assert set(sessions["state"]) == {"terminated"}
    rows = table(lake, "results").filter(pl.col("type") == "detection").height
    assert rows == tests["rows"].sum() * 4


def test_the_bad_test_is_quarantined(built):
    quarantine = table(built[0] / "lake", "quarantine")
    (bad,) = bad_condda_records()
    assert [row.split("/")[-1] for row in quarantine["record"]] == [
        bad[0].split("/")[-1].removesuffix("_metadata.json")
    ]
    assert "round_size" in quarantine["message"][0]


def test_agents_notice_the_change_and_discover_classes(built):
    lake = built[0] / "lake"
    program = table(lake, "program")
    noticed = program.filter(pl.col("metric") == "M2")["value"]
    assert noticed.min() >= 50 and noticed.mean() >= 80
    assert program.filter(pl.col("metric") == "M2.1")["value"].max() <= 50
    found = (
        table(lake, "characterization")
        .filter((pl.col("metric") == "discovery_accuracy") & (pl.col("part") == "post"))
        .join(table(lake, "sessions"), on="session_id")
        .filter(pl.col("domain") == "image_classification")
        .group_by("detector")
        .agg(pl.col("value").mean())
    )
    scores = dict(found.iter_rows())
    assert scores["clustering-1"] > 0.5 > scores["threshold-1"]


def test_a_second_run_does_nothing(built, capsys):
    from flows.condda import build

    build(built[1])
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(": 0 of" in line for line in lines if line.startswith("condda/"))


def test_a_run_of_fewer_agents_makes_none_again(built, capsys):
    from flows.condda import build

    root, config = built
    run = RunSettings(agents=("threshold",), red_light="with", protocols=("OND",))
    build(config.model_copy(update={"run": run}))
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("condda/run_agent: 0 of 4 ") for line in lines)
    assert set(table(root / "lake", "sessions")["detector"]) == {"threshold-1"}
    build(config)


def test_report_has_its_sections(built):
    page = (built[0] / "lake" / "reports" / "condda.html").read_text()
    for title in ("When agents notice", "Program metrics", "Discovered classes"):
        assert title in page


@pytest.fixture(scope="module")
def served(built, tmp_path_factory):
    """The same runs of one agent against a real server; its state is exported as well."""
    from flows.condda import build

    root, config = built
    place = tmp_path_factory.mktemp("served")
    run = RunSettings(agents=("clustering",), red_light="without")
    with running(root / "tests", place / "state") as url:
        against = run.model_copy(update={"url": url})
        build(config.model_copy(update={"lake": place / "lake", "run": against}))
    exported = config.model_copy(
        update={
            "lake": place / "exported",
            "state": place / "state",
            "run": run.model_copy(update={"agents": ()}),
        }
    )
    build(exported)
    return place, exported


def alike(lake, name: str) -> pl.DataFrame:
    """Rows of one agent without the red light, with ids of sessions left out."""
    sessions = table(lake, "sessions").filter(
        (pl.col("detector") == "clustering-1") & ~pl.col("red_light")
    )
    rows = table(lake, name).join(sessions.select("session_id"), on="session_id", how="semi")
    return rows.drop("session_id").sort(pl.all().exclude("values"))


@pytest.mark.parametrize("name", SESSION_TABLES)
def test_a_server_gives_what_the_process_gives(built, served, name):
    expected = alike(built[0] / "lake", name)
    assert expected.height
    assert alike(served[0] / "lake", name).equals(expected)
    assert alike(served[0] / "exported", name).equals(expected)


def test_exporting_again_reads_only_sessions_that_changed(served, capsys):
    from flows.condda import build

    build(served[1])
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("condda/export_session: 0 of 8") for line in lines)


def test_sessions_that_cannot_be_measured_are_exported_and_named(built, tmp_path):
    """As the published client's own tests leave them on a server in mode compat."""
    from flows.condda import build

    root, config = built
    domain, test = "image_classification", "OND.1.1.1234"
    harness = make_harness(root / "tests", tmp_path / "state")
    about = {"protocol": "OND", "domain": domain, "novelty_detector_version": "client-1"}
    foreign, narrow, short = (harness.session_request(test_ids=[test], **about) for _ in range(3))
    harness.complete_test(session_id=foreign, test_id="OND.10.90001.2100554")
    names = harness.library.load(test, "OND", domain).names
    for session, rows, values in ((narrow, names, "0.5,0.5"), (short, names[:4], "0.1,0.2,0.3")):
        posted = {
            "detection": "".join(f"{name},0.9\n" for name in rows).encode(),
            "classification": "".join(f"{name},{values}\n" for name in rows).encode(),
        }
        place = {"session_id": session, "test_id": test}
        harness.post_results(result_files=posted, round_id=0, **place)
        harness.complete_test(**place)
    harness.store.close()
    run = RunSettings(agents=())
    update = {"lake": tmp_path / "lake", "state": tmp_path / "state", "run": run}
    build(config.model_copy(update=update))
    assert set(table(tmp_path / "lake", "sessions")["session_id"]) == {foreign, narrow, short}
    assert table(tmp_path / "lake", "results").height == 2 * (len(names) + 4)
    refused = table(tmp_path / "lake", "quarantine").filter(table_name="metrics")
    assert set(refused["rule"]) == {"not_measurable"}
    said = dict(refused.select("record", "message").iter_rows())
    assert "no ground truth" in said[f"{foreign}/OND.10.90001.2100554"]
    assert "cannot hold" in said[f"{narrow}/{test}"] and "lacks" in said[f"{short}/{test}"]


def test_each_session_counts_and_a_baseline_needs_no_detection(built, tmp_path):
    """The published reaction baseline posts classes alone, in a session of its own."""
    from flows.condda import build

    root, config = built
    domain, test = "image_classification", "OND.1.1.1234"
    harness = make_harness(root / "tests", tmp_path / "state")
    file = harness.library.load(test, "OND", domain)
    first = int(file.truth["detection"].arg_max())
    for agent, noticed in (
        ("reaction-base-0.1", None),
        ("client-1", first),
        ("client-1", first + 9),
    ):
        session = harness.session_request(
            test_ids=[test], protocol="OND", domain=domain, novelty_detector_version=agent
        )
        width = file.metadata["known_classes"]
        chosen = [label if label > 0 else 0 for label in file.labels]
        posted = {
            "classification": "".join(
                f"{name},{','.join('1' if c == pick else '0' for c in range(width))}\n"
                for name, pick in zip(file.names, chosen, strict=True)
            ).encode()
        }
        if noticed is not None:
            rows = enumerate(file.names)
            lines = (f"{name},{int(row >= noticed)}\n" for row, name in rows)
            posted["detection"] = "".join(lines).encode()
        place = {"session_id": session, "test_id": test}
        harness.post_results(result_files=posted, round_id=0, **place)
        harness.complete_test(**place)
    harness.store.close()
    run = RunSettings(agents=(), baseline="reaction-base")
    update = {"lake": tmp_path / "lake", "state": tmp_path / "state", "run": run}
    build(config.model_copy(update=update))
    program = table(tmp_path / "lake", "program")
    assert set(program["detector"]) == {"client-1"} and set(program["tests"]) == {2}
    values = dict(program.select("metric", "value").iter_rows())
    assert values["M2"] == 100 and values["M1"] == 4.5 and values["M3"] == 1.0
    measured = table(tmp_path / "lake", "metrics").group_by("session_id").agg(pl.col("metric"))
    assert sorted(len(set(names)) for names in measured["metric"]) == [1, 8, 8]


def test_tests_without_features_are_said(built, tmp_path, capsys):
    from flows.condda import build

    root, config = built
    shutil.copytree(root / "tests", tmp_path / "tests")
    shutil.rmtree(tmp_path / "tests" / "features")
    make_harness(tmp_path / "tests", tmp_path / "state").store.close()
    bare = config.model_copy(update={"tests": tmp_path / "tests", "lake": tmp_path / "lake"})
    for config in (bare, bare.model_copy(update={"state": tmp_path / "state"})):
        with pytest.raises(SourceError, match="no session to measure"):
            build(config)
        assert "agents do not run 8 tests" in capsys.readouterr().err
