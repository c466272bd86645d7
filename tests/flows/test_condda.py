"""The CONDDA flow end to end: in process, against a server, and out of a server's state."""

import json
import shutil
import threading
from collections import Counter

import numpy as np
import polars as pl
import pytest

from schemas.condda import Config, SessionSettings
from schemas.errors import ConfigError, RunsFailed, SourceError
from storage.tables import current_version
from tasks.condda.commands import Policy
from tasks.condda.server.serve import make_harness, running
from tasks.condda.test_files import TestLibrary
from tasks.predictors import find_predictor
from tasks.sample.condda import bad_condda_records, write_condda

SESSION_TABLES = (
    *("rounds", "results", "feedback", "instances", "session_measures", "characterization"),
)
RUN_TABLES = ("predictions", "scores")
CLUSTERING, THRESHOLD = (
    f"{name}-{find_predictor(name).version}" for name in ("clustering", "threshold")
)
APART = (0.0, 0.0, 0.0)
"""Novel classes far from known ones, so that agents surely notice them."""
FEW = {
    "predictors": {},
    "scores": {"nearest": {}},
    "protocols": ("OND/image_classification",),
}


def table(lake, name: str) -> pl.DataFrame:
    return current_version(lake, "condda", name).read()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    from flows.condda import build

    root = tmp_path_factory.mktemp("condda")
    write_condda(root / "tests", rows=192, nearness=APART)
    config = Config(tests=root / "tests", lake=root / "lake")
    build(config)
    return root, config


def test_every_good_test_is_run_by_every_agent_with_and_without_the_red_light(built):
    lake = built[0] / "lake"
    tests, sessions = table(lake, "tests"), table(lake, "sessions")
    assert sessions.height == tests.height * 2 * 2
    assert sessions["completed"].all() and set(sessions["tests"]) == {1}
    assert set(sessions["state"]) == {"terminated"}
    rows = table(lake, "results").filter(pl.col("type") == "detection").height
    assert rows == tests["instances"].sum() * 4


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
        .join(table(lake, "sessions"), on=["session_id", "test_id"])
        .filter(pl.col("domain") == "image_classification")
        .group_by("agent")
        .agg(pl.col("value").mean())
    )
    scores = dict(found.iter_rows())
    assert scores[CLUSTERING] > 0.5 > scores[THRESHOLD]


def test_a_second_run_does_nothing(built, capsys):
    from flows.condda import build

    build(built[1])
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(": 0 of" in line for line in lines if line.startswith("condda/"))


def test_every_instance_is_a_sample_with_its_truth(built):
    lake = built[0] / "lake"
    tests, samples, splits = (table(lake, name) for name in ("tests", "samples", "splits"))
    assert samples.height == tests["instances"].sum() + tests["examples"].sum() == splits.height
    assert samples["digest"].null_count() == 0 and set(samples["modality"]) == {"features"}
    assert set(splits.filter(split="train").select("step", "role").unique().rows()) == {
        (0, "known")
    }
    library = TestLibrary(built[0] / "tests")
    for name in ("OND/activity_recognition/OND.10.90001.2100554",
                 "CONDDA/image_classification/CONDDA.1.1.1234"):  # fmt: skip
        protocol, domain, test = name.split("/")
        file = library.load(test, protocol, domain)
        rows = samples.filter(sequence=name).sort("position")
        assert rows["sample_id"].to_list() == [f"{name}/{one}" for one in file.names]
        placed = rows.select("sample_id").join(
            splits.filter(protocol=name), on="sample_id", maintain_order="left"
        )
        assert placed["step"].to_list() == [row // 32 for row in range(len(file.names))]
        novel = file.labels < 0 if domain[0] == "i" else file.truth["novel"].to_numpy() == 1
        assert (placed["role"] == "novel").to_list() == novel.tolist()
        assert placed["class"].to_list() == [str(label) for label in file.labels]
        assert placed.filter(role="novel")["label"].is_null().all()


def test_every_run_predicts_and_scores_each_instance_of_its_test(built):
    lake = built[0] / "lake"
    runs, splits = table(lake, "runs"), table(lake, "splits").filter(split="test")
    agents = runs.filter(pl.col("model") != "given_features")
    assert set(agents["origin"]) == {"trained"} and agents.height == table(lake, "sessions").height
    expected = (
        splits.join(agents.select("protocol", "run_id"), on="protocol")
        .group_by("run_id", "step")
        .len()
        .sort("run_id", "step")
    )
    for name in RUN_TABLES:
        rows = table(lake, name).join(agents, on="run_id", how="semi")
        assert rows.group_by("run_id", "step").len().sort("run_id", "step").equals(expected)
    predictions, scores = (table(lake, name) for name in RUN_TABLES)
    both = predictions.join(scores.filter(score="p_unknown"), on=["run_id", "sample_id"])
    assert both["value"].equals(both["p_unknown"].alias("value"))
    called = (
        predictions.join(agents, on="run_id")
        .group_by("model")
        .agg(pl.col("predicted").str.contains("^unknown_").any().alias("discovered"))
    )
    assert dict(called.iter_rows()) == {"threshold": False, "clustering": True}


def test_predictions_are_the_posted_lines(built):
    """Column by column: unknown first in image tests, last in activity tests."""
    lake = built[0] / "lake"
    sessions = table(lake, "sessions").filter(protocol="CONDDA", agent=CLUSTERING)
    for domain, first in (("image_classification", True), ("activity_recognition", False)):
        session = sessions.filter(domain=domain, red_light=False).row(0, named=True)
        lines = table(lake, "results").filter(
            session_id=session["session_id"], type="characterization"
        )
        known = 10 if first else 12
        rows = table(lake, "predictions").filter(run_id=session["run_id"])
        found = {row["sample_id"].split("/", 3)[-1]: row for row in rows.to_dicts()}
        for name, numbers in lines.select("instance_id", "numbers").iter_rows():
            values = np.array(numbers)
            classes = values[1 : 1 + known] if first else values[:known]
            row = found[name]
            assert row["probability"] == values.max()
            assert row["p_unknown"] == pytest.approx(values.sum() - classes.sum(), abs=1e-12)
            if row["predicted"].startswith("unknown_"):
                place = int(row["predicted"].removeprefix("unknown_"))
                assert values[known + int(first) + place] == values.max()
            elif row["predicted"] != "unknown":
                assert classes[int(row["predicted"]) - int(first)] == values.max()


def test_every_test_has_areas_by_round_and_over_all(built):
    lake = built[0] / "lake"
    metrics, tests = table(lake, "metrics"), table(lake, "tests")
    assert set(metrics["convention"]) == {"openood"} and metrics["protocol"].n_unique() == 8
    scores = set(metrics.filter(model="given_features")["score"])
    assert scores >= {"nearest", "cosine", "mahalanobis"}
    assert set(metrics.filter(model="clustering")["score"]) == {"p_unknown"}
    for metric in ("auroc", "fpr95"):
        whole = metrics.filter(metric=metric, step=-1)
        assert whole.height == 8 * (len(scores) + 4) and whole["value"].null_count() == 0
        assert (whole["low"] < whole["high"]).any()
        assert metrics.filter(metric=metric, step=0)["value"].is_null().all()  # nothing novel yet
    able = ("nearest", "cosine", "knn", "mahalanobis", "rmd", "p_unknown")
    whole = metrics.filter(pl.col("score").is_in(able), metric="auroc", step=-1)
    assert set(whole["score"]) == set(able) and whole["value"].min() > 0.9
    steps = metrics.filter(metric="auroc").group_by("run_id", "score").agg(pl.col("step").max())
    assert set(steps["step"]) == {tests["rounds"][0] - 1}


def test_a_later_build_of_fewer_agents_keeps_what_was_there(built, capsys):
    from flows.condda import build

    root, config = built
    names = (*SESSION_TABLES, *RUN_TABLES, "runs", "sessions", "program", "metrics")
    before = {name: table(root / "lake", name) for name in names}
    run = SessionSettings(red_light="with")
    fewer = {"run": run, "predictors": {"threshold": {}}, "protocols": ("OND",)}
    build(config.model_copy(update=fewer))
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("condda/run_agent: 0 of 4 ") for line in lines)
    assert all(table(root / "lake", name).equals(before[name]) for name in names)


def test_a_setting_a_seed_and_a_version_make_their_own_runs_only(built, tmp_path, monkeypatch):
    from flows.condda import build
    from tasks.condda.build import agent_facts, chosen_agents
    from tasks.condda.changes.martingale import Martingale
    from tasks.predictors.threshold import Threshold
    from tasks.scores.nearest import Nearest

    _, config = built
    asked = {"predictors": {"threshold": {"neighbours": 5}, "clustering": {}}}
    keys = lambda config: {  # noqa: E731
        (a.model, agent_facts(a, "p", False, config.run, "k").model_dump_json())
        for a in chosen_agents(config)
    }
    plain = keys(config)
    changed = keys(config.model_copy(update=asked))
    assert Counter(name for name, _ in plain - changed) == {"threshold": 1}
    assert len(keys(config.model_copy(update={"seeds": (0, 1)})) & plain) == 2
    assert not keys(config.model_copy(update={"seeds": (1,)})) & plain
    rule = {"change": "cusum", "change_settings": {"alarm_rows": "5000"}}
    own = {"predictors": {"threshold": {"agent": rule}, "clustering": {}}}
    changed = keys(config.model_copy(update=own))
    assert Counter(name for name, _ in plain - changed) == {"threshold": 1}
    agent = chosen_agents(config.model_copy(update=own))[1]
    assert agent.changed == {"agent": rule}
    assert agent.settings["agent"]["change_settings"]["alarm_rows"] == 5000
    for kind in (Threshold, Martingale, Nearest):
        monkeypatch.setattr(kind, "version", kind.version + 1)
        assert keys(config) & plain == set()  # clustering has them all, too
        monkeypatch.undo()

    lake = tmp_path / "lake"
    one = {"lake": lake, "run": SessionSettings(red_light="without"), "scores": {"nearest": {}}}
    one |= {"protocols": ("OND/activity_recognition",)}
    build(config.model_copy(update={**one, "predictors": {"threshold": {}}}))
    build(config.model_copy(update={**one, "predictors": {"threshold": {"neighbours": "5"}}}))
    runs = table(lake, "runs").filter(model="threshold")
    assert [json.loads(text) for text in sorted(set(runs["changed"]))] == [
        {"neighbours": 5},
        {},
    ]
    assert runs.height == 4 and runs["config_id"].n_unique() == 2
    assert table(lake, "sessions").height == 4 and set(table(lake, "program")["tests"]) == {2}


def test_another_test_makes_no_run_anew_and_a_changed_one_its_own(built, tmp_path, capsys):
    from flows.condda import build

    root, config = built
    shutil.copytree(root / "tests", tmp_path / "tests")
    here = {"tests": tmp_path / "tests", "lake": tmp_path / "lake", "predictors": {"threshold": {}}}
    here |= {"run": SessionSettings(red_light="without"), "scores": {"nearest": {}}}
    config = config.model_copy(update=here)
    one = config.model_copy(update={"protocols": ("OND/image_classification",)})
    build(one)
    test = tmp_path / "tests" / "CONDDA" / "image_classification" / "CONDDA.1.1.1234_single_df.csv"
    test.write_text(test.read_text().replace(", -2\n", ", -1\n"))
    capsys.readouterr()
    build(one)
    err = capsys.readouterr().err
    assert "condda/read_test: 1 of 9 " in err and "condda/run_agent: 0 of 2 " in err
    test = tmp_path / "tests" / "OND" / "image_classification" / "OND.1.1.1234_single_df.csv"
    test.write_text(test.read_text().replace(", -2\n", ", -1\n"))
    build(one)
    err = capsys.readouterr().err
    assert "condda/run_agent: 1 of 2 " in err and "condda/pass_features: 1 of 2 " in err
    assert table(tmp_path / "lake", "sessions").height == 2


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"predictors": {"svm": {}}}, "no predictor 'svm'; there are: ann, clustering, evm"),
        ({"predictors": {"threshold": {"depth": 1}}}, "threshold: .*depth is not a setting"),
        ({"predictors": {"evm": {"agent": {"held_out": 2}}}}, "evm: agent: .*held_out.* less than"),
        ({"predictors": {"evm": {"agent": {"change": "x"}}}}, "no change rule 'x'"),
        (
            {"predictors": {"clustering": {"agent": {"folds": 2}}}},
            "folds has no effect: clustering",
        ),
        ({"predictors": {"threshold": {"score": "x"}}}, "no score 'x'"),
        ({"predictors": {"evm": {}}, "preset": "huge"}, "evm has no preset 'huge'"),
        ({"scores": {"msp": {}}}, "score msp does not fit condda: it needs logits"),
        ({"scores": {"nearest": {"depth": 1}}}, "nearest: .*depth is not a setting"),
        ({"models": {"ndcc": {}}}, "models ndcc does not fit condda"),
        ({"train": {"epochs": 3}}, "train.epochs is a setting of no predictor"),
        ({"protocols": ("OND/none",)}, "no test is of protocol 'OND/none'; there are: CONDDA/"),
    ],
)
def test_a_choice_that_does_not_fit_is_a_sentence_before_any_work(built, tmp_path, choice, message):
    from flows.condda import build

    update = {"lake": tmp_path / "lake", **choice}
    with pytest.raises(ConfigError, match=message):
        build(built[1].model_copy(update=update))
    assert not list(tmp_path.rglob("*.parquet"))


def test_report_has_its_sections(built):
    page = (built[0] / "lake" / "reports" / "condda.html").read_text()
    for title in ("When agents notice", "Program metrics", "Discovered classes"):
        assert title in page


def test_the_scoreboard_has_all_measures_and_both_ways_side_by_side(built):
    from tasks.condda.measures import lake_scoreboard

    program, sides = lake_scoreboard(built[0] / "lake", "threshold")
    row = program.filter(agent=CLUSTERING, protocol="CONDDA", domain="image_classification")
    assert row["tests"].to_list() == [2]  # with and without the red light
    alarms = ("M1", "M2", "M2.1", "no_cdt", "false_alarms", "nuisance_alarms")
    named = (*alarms, "M3", "M4", "M5", "M6_docs", "M6_balanced")
    # All sample tests change, so there is no false alarm to count.
    lacking = [name for name in named if row[name][0] is None]
    assert row.height == 1 and lacking == ["false_alarms", "nuisance_alarms"]
    stored = table(built[0] / "lake", "program").filter(
        agent=CLUSTERING, protocol="CONDDA", domain="image_classification"
    )
    assert dict(stored.select("metric", "value").rows()) == row.select(named).row(0, named=True)
    both = sides.filter(agent=CLUSTERING, protocol="CONDDA", domain="image_classification")
    assert set(both["measure"]) >= {"post_top1", "nmi", "discovery_accuracy", "column_stability"}
    assert both.null_count().sum_horizontal().item() == 0


def test_truth_reaches_the_lake_when_a_session_has_ended(built):
    instances = table(built[0] / "lake", "instances")
    sessions = table(built[0] / "lake", "sessions")
    assert set(instances["session_id"]) == set(sessions.filter(state="terminated")["session_id"])
    tests = table(built[0] / "lake", "tests").select("test_id", "novel_rows", "instances")
    counts = instances.group_by("session_id", "test_id").agg(
        pl.len().alias("rows"), pl.col("changed").sum(), pl.col("novel").sum()
    )
    joined = counts.join(tests, on="test_id")
    assert joined.height == counts.height and (joined["rows"] == joined["instances"]).all()
    assert (joined["novel"] <= joined["changed"]).all() and joined["novel"].min() > 0


@pytest.fixture(scope="module")
def served(built, tmp_path_factory):
    """The same runs of one agent against a real server; its state is exported as well."""
    from flows.condda import build

    root, config = built
    place = tmp_path_factory.mktemp("served")
    run = SessionSettings(red_light="without")
    one = {"predictors": {"clustering": {}}, "scores": {"nearest": {}}}
    policy = Policy(red_light=True)
    with running(root / "tests", place / "state", policy=policy) as url:
        against = run.model_copy(update={"url": url})
        build(config.model_copy(update={**one, "lake": place / "lake", "run": against}))
    update = {"lake": place / "exported", "state": place / "state", "predictors": {}}
    exported = config.model_copy(update={**one, **update})
    build(exported)
    return place, exported


def alike(lake, name: str) -> pl.DataFrame:
    """Rows of one agent without the red light, with ids of sessions left out."""
    sessions = table(lake, "sessions").filter(
        (pl.col("agent") == CLUSTERING) & ~pl.col("red_light")
    )
    key = "run_id" if name in RUN_TABLES else "session_id"
    rows = table(lake, name).join(sessions.select(key), on=key, how="semi")
    return rows.drop(key).sort(pl.all().exclude("numbers"))


@pytest.mark.parametrize("name", [*SESSION_TABLES, *RUN_TABLES])
def test_a_server_gives_what_the_process_gives(built, served, name):
    expected = alike(built[0] / "lake", name)
    assert expected.height
    assert alike(served[0] / "lake", name).equals(expected)
    assert alike(served[0] / "exported", name).equals(expected)


def test_sessions_of_a_server_are_imported_runs(built, served):
    lake = served[0] / "exported"
    runs, sessions = table(lake, "runs"), table(lake, "sessions")
    imported = runs.filter(origin="imported")
    assert set(imported["model"]) == {CLUSTERING} and imported.height == sessions.height == 8
    assert set(sessions["run_id"]) == set(imported["run_id"])
    areas = table(lake, "metrics").filter(metric="auroc", step=-1, model=CLUSTERING)
    trained = table(built[0] / "lake", "metrics").filter(metric="auroc", step=-1)
    assert set(areas["value"]) <= set(trained["value"]) and areas.height == 8
    mirrored = table(served[0] / "lake", "sessions")["session_id"]
    assert set(mirrored) == {f"{session}/mirror" for session in sessions["session_id"]}


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
    update = {**FEW, "lake": tmp_path / "lake", "state": tmp_path / "state"}
    build(config.model_copy(update=update))
    assert set(table(tmp_path / "lake", "sessions")["session_id"]) == {foreign, narrow, short}
    assert table(tmp_path / "lake", "results").height == 2 * (len(names) + 4)
    refused = table(tmp_path / "lake", "quarantine").filter(table_name="session_measures")
    assert set(refused["rule"]) == {"not_measurable"}
    said = dict(refused.select("record", "message").iter_rows())
    assert "no ground truth" in said[f"{foreign}/OND.10.90001.2100554"]
    assert "cannot hold" in said[f"{narrow}/{test}"] and "lacks" in said[f"{short}/{test}"]
    runs = table(tmp_path / "lake", "runs").filter(origin="imported")
    assert set(runs["state"]) == {"failed"} and runs.height == 2
    assert set(runs["reason"]) == {said[f"{narrow}/{test}"], said[f"{short}/{test}"]}
    found = dict(table(tmp_path / "lake", "sessions").select("session_id", "run_id").iter_rows())
    assert found[foreign] is None and {found[narrow], found[short]} == set(runs["run_id"])


def test_a_session_of_several_tests_is_a_run_for_each_that_is_completed(built, tmp_path, capsys):
    from flows.condda import build

    root, config = built
    domain, tests = "image_classification", ["OND.1.1.1234", "OND.54011215.0000.1236"]
    harness = make_harness(root / "tests", tmp_path / "state")
    about = {"protocol": "OND", "domain": domain, "novelty_detector_version": "client-1"}
    session = harness.session_request(test_ids=tests, **about)
    harness.session_request(test_ids=tests, **about)  # touches none of them
    update = {**FEW, "lake": tmp_path / "lake", "state": tmp_path / "state"}
    config = config.model_copy(update=update)
    for number, test in enumerate(tests):
        names = harness.library.load(test, "OND", domain).names
        values = ",".join(["0.2", "0.8", *["0"] * 9])
        harness.post_results(
            result_files={"classification": "".join(f"{n},{values}\n" for n in names).encode()},
            round_id=0,
            session_id=session,
            test_id=test,
        )
        harness.complete_test(session_id=session, test_id=test)
        capsys.readouterr()
        build(config)
        made = f"condda/export_session: {2 - number} of {2 + number} "
        assert made in capsys.readouterr().err
    harness.store.close()
    sessions = table(tmp_path / "lake", "sessions")
    assert sessions.filter(session_id=session)["test_id"].to_list() == tests
    assert sessions.filter(test_id="")["run_id"].to_list() == [None] and sessions.height == 3
    runs = table(tmp_path / "lake", "runs").filter(origin="imported")
    assert set(runs["state"]) == {"done"} and set(runs["model"]) == {"client-1"}
    assert set(table(tmp_path / "lake", "predictions")["predicted"]) == {"1"}
    build(config.model_copy(update={"state": None}))
    kept = table(tmp_path / "lake", "sessions")
    assert kept.equals(sessions.filter(session_id=session))
    assert table(tmp_path / "lake", "predictions").height == 2 * 192


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
    run = SessionSettings(baseline="reaction-base")
    update = {**FEW, "lake": tmp_path / "lake", "state": tmp_path / "state", "run": run}
    build(config.model_copy(update=update))
    program = table(tmp_path / "lake", "program")
    assert set(program["agent"]) == {"client-1"} and set(program["tests"]) == {1}
    values = dict(program.select("metric", "value").iter_rows())
    assert values["M2"] == 100 and values["M1"] == 4.5 and values["M3"] == 1.0
    measured = table(tmp_path / "lake", "session_measures")
    measured = measured.group_by("session_id").agg(pl.col("metric"))
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


def test_an_agent_that_cannot_run_a_test_is_a_failed_run(built, tmp_path):
    from flows.condda import build

    update = {**FEW, "lake": tmp_path / "lake", "run": SessionSettings(red_light="without")}
    update |= {"predictors": {"threshold": {"accepted_error": 0.001}, "clustering": {}}}
    with pytest.raises(
        RunsFailed, match=r"2 shards of runs failed .*threshold cannot run OND/image"
    ):
        build(built[1].model_copy(update=update))
    runs = table(tmp_path / "lake", "runs")
    assert set(runs.filter(state="failed")["model"]) == {"threshold"}
    assert set(table(tmp_path / "lake", "sessions")["agent"]) == {CLUSTERING}


def test_a_file_of_features_that_does_not_fit_is_quarantined(built, tmp_path, capsys):
    from flows.condda import build

    shutil.copytree(built[0] / "tests", tmp_path / "tests")
    file = tmp_path / "tests" / "features" / "OND.1.1.1234.npz"
    file.write_bytes(b"no arrays")
    update = {**FEW, "tests": tmp_path / "tests", "lake": tmp_path / "lake"}
    update |= {"predictors": {"threshold": {}}, "run": SessionSettings(red_light="without")}
    build(built[1].model_copy(update=update))
    assert "agents do not run 1 tests" in capsys.readouterr().err
    refused = table(tmp_path / "lake", "quarantine").filter(rule="unusable_features")
    assert refused["record"].to_list() == ["features/OND.1.1.1234.npz"]
    bare = table(tmp_path / "lake", "samples").filter(pl.col("digest").is_null())
    assert bare.height == 192 and table(tmp_path / "lake", "sessions").height == 1


def test_a_build_killed_between_the_end_of_a_session_and_its_commit_goes_on(tmp_path, monkeypatch):
    from flows.condda import build
    from tasks.engine import stage

    write_condda(tmp_path / "tests", rows=192)
    config = Config(
        tests=tmp_path / "tests",
        lake=tmp_path / "lake",
        predictors={"threshold": {}},
        scores={},
        protocols=("OND/image_classification",),
        run=SessionSettings(red_light="without"),
    )
    write_piece = stage.write_piece

    def killed(lake, manifest, *rest):
        if manifest.stage == "run_agent":
            raise SystemExit("killed before the commit")
        return write_piece(lake, manifest, *rest)

    monkeypatch.setattr(stage, "write_piece", killed)
    before = set(threading.enumerate())
    with pytest.raises(SystemExit, match="killed before"):
        build(config)
    for thread in set(threading.enumerate()) - before:  # a kill would have ended them, too
        thread.join(120)
    assert list((tmp_path / "lake").rglob("events.sqlite"))
    monkeypatch.setattr(stage, "write_piece", write_piece)
    build(config)
    build(config.model_copy(update={"lake": tmp_path / "whole"}))
    assert table(tmp_path / "lake", "sessions")["completed"].all()
    for name in (*SESSION_TABLES, "sessions"):
        assert table(tmp_path / "lake", name).equals(table(tmp_path / "whole", name))
