"""A first build's stages, shards, bytes and hours: by settings, raw files and shipped rates."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.reference_rates import measured
from flows import first_build as counts
from flows.dry_run import describe, stages_of
from flows.first_build import COUNTED, Works, first_build
from schemas import condda, kowl, novelcraft, semantic, threedos
from tasks.engine.estimates import DryRun, StagePlan, dry_run
from tasks.engine.reference import (
    Rate,
    Raw,
    Reference,
    Work,
    read_reference,
    shipped_reference,
    write_reference,
)
from tests.test_estimates import manifest, note_time, planned
from tests.toy import build_toy, write_raw

RAW = {
    "ingest_episodes": {"a": Raw(20, 2_000_000), "b": Raw(20, 2_000_000)},
    "read_lists": {"k": Raw(1, 1_000_000)},
    "read_test": {"OND/d/t": Raw(3, 1_000_000), "CONDDA/d/u": Raw(3, 1_000_000)},
    "read_images": {"cifar10/0": Raw(1, 3_073_000), "imagenet/0": Raw(500, 50_000_000)},
    "sample_shapes": {f"{name}/0": Raw(300, 3_000_000) for name in ("modelnet40", "shapenet")},
}


def stages(benchmark: str, config) -> dict[str, int]:
    """Shards by stage."""
    found: dict[str, int] = {}
    for work in first_build(benchmark, config, RAW) or ():
        assert work.shards > 0 and work.amount > 0 and work.written > 0
        found[work.stage] = found.get(work.stage, 0) + work.shards
    return found


@pytest.fixture
def videos(tmp_path) -> Path:
    for number in range(5):
        (tmp_path / "videos").mkdir(exist_ok=True)
        (tmp_path / "videos" / f"{number}.mp4").write_bytes(bytes(1000))
    return tmp_path / "videos"


PICTURES = {"cifar10": Path("c"), "imagenet": Path("i")}
SHAPES = {"modelnet40": Path("m"), "shapenet": Path("s")}


def test_novelcraft_without_models(monkeypatch):
    monkeypatch.setattr(counts, "blender_version", lambda: None)
    assert stages("novelcraft", novelcraft.Config(source=Path("x"))) == {
        "ingest_episodes": 2,
        "render_targets": 2,
        "split_frames": 1,
        "cut_all_windows": 1,
        "key_protocols": 2,
    }


def test_novelcraft_asked_for_labels_and_models():
    models = {"colour_rarity": {}, "symbolic_mlp": {"contexts": [5]}}
    found = stages(
        "novelcraft",
        novelcraft.Config(source=Path("x"), targets_csv=Path("t"), models=models, seeds=(0, 1)),
    )
    assert "render_targets" not in found and "check_frames" not in found
    assert found["read_official_targets"] == 1
    assert found["train_model"] == found["pass_samples"]
    assert found["pass_windows"] == 4  # two ways of cutting
    assert "embed_samples" not in found and "discover_categories" not in found


def test_kowl_by_what_is_named(videos):
    lists = {"read_lists": 1, "unify_releases": 1, "cut_increments": 1}
    ends = {"list_samples": 1, "key_protocols": 1}
    decoded = {"validate_videos": 32, "validate_unlisted": 1}  # 1 MB of lists: 33,000 clips
    assert stages("kowl", kowl.Config(lists=Path("l"))) == lists | ends
    no_models = kowl.Config(lists=Path("l"), videos=videos, models={"none": {}})
    assert stages("kowl", no_models) == lists | decoded | ends
    features = stages("kowl", kowl.Config(lists=Path("l"), videos=videos))
    assert features["extract_features"] == 32 and "evaluate_predictor" not in features
    led = kowl.Config(lists=Path("l"), videos=videos, predictors={"ann": {}, "evm": {}})
    assert stages("kowl", led)["evaluate_predictor"] == 2 * 3  # amounts of feedback


def test_condda_by_agents_and_protocols():
    found = stages("condda", condda.Config(tests=Path("t"), protocols=("OND",)))
    assert (found["read_test"], found["pass_features"], found["run_agent"]) == (2, 1, 2 * 2)
    assert found["evaluate_scores"] == found["score_outputs"] + found["run_agent"]
    assert "export_session" not in found
    assert stages("condda", condda.Config(tests=Path("t"), state=Path("s")))["export_session"] == 1


def test_semantic_trains_what_is_asked_for():
    plain = stages("semantic", semantic.Config(source=PICTURES))
    assert plain["train_model"] == plain["make_trial"] > 10  # the trivial baseline alone
    assert "measure_epochs" not in plain
    nothing = semantic.Config(source=PICTURES, trivial_baseline=False)
    assert set(stages("semantic", nothing)) == {"read_images", "make_trial", "key_protocols"}
    asked = {"models": {"classifier": {}, "odin": {}}, "protocols": ("cifar10/cat",)}
    one = stages("semantic", semantic.Config(source=PICTURES, **asked))
    assert one["train_model"] == plain["train_model"] + 2
    assert one["measure_epochs"] == 2
    known = semantic.Config(source=PICTURES, known="cifar10", novel=("imagenet",))
    assert stages("semantic", known)["make_trial"] == 1


def test_threedos_trains_tracks_whose_shapes_are_there():
    plain = stages("threedos", threedos.Config(source=SHAPES))
    assert set(plain) == {"sample_shapes", "split_track", "key_protocols"}
    dense = threedos.Config(source=SHAPES, models={"cross_entropy": {}}, points=(512,))
    found = stages("threedos", dense)
    assert 0 < found["train_model"] < found["split_track"]
    assert found["pass_samples"] == 2 * found["train_model"]


def test_threedos_counts_shapes_by_their_source_where_lists_are_read_first():
    raw = {"read_members": {"all": Raw(1, 1000)}}
    config = threedos.Config(source={"modelnet40": Path("m"), "scanobjectnn": Path("s")})
    sources = {Path("m"): Raw(600, 6_000_000), Path("s"): Raw(2, 24_600_000)}
    found = {work.stage: work for work in first_build("threedos", config, raw, sources) or ()}
    assert found["read_members"].shards == 1
    assert found["sample_shapes"].shards == 3 + 4  # 600 files, 1,000 scans in two
    assert found["sample_shapes"].amount == pytest.approx(1_600 * 4.096)  # thousands of points
    lists_only = first_build("threedos", threedos.Config(lists=Path("l")), raw) or []
    assert [work.stage for work in lists_only] == ["read_members", "split_track", "key_protocols"]


@pytest.mark.parametrize("benchmark", sorted(COUNTED))
def test_no_stage_of_a_flow_is_forgotten(benchmark, videos, monkeypatch):
    """A stage that is new in a flow has to be counted here; failures are not foreseen."""
    monkeypatch.setattr(counts, "blender_version", lambda: "5")
    path = Path("x")
    everything = {"models": {"all": {}}}
    files = ("targets_csv", "compare_targets", "camera_states", "camera_masks")
    configs = {
        "novelcraft": [
            novelcraft.Config(source=path),
            novelcraft.Config(
                source=path, discovery=True, **everything, **dict.fromkeys(files, path)
            ),
        ],
        "kowl": [
            kowl.Config(
                lists=path,
                videos=videos,
                predictors={"ann": {}},
                evaluation=kowl.OpenWorldSettings(ava=path),
            )
        ],
        "condda": [condda.Config(tests=path), condda.Config(tests=path, state=path)],
        "semantic": [semantic.Config(source=PICTURES, **everything)],
        "threedos": [threedos.Config(source=SHAPES, **everything)],
    }
    monkeypatch.setitem(RAW, "read_members", {"all": Raw(1, 1000)})
    told = {name for config in configs[benchmark] for name in stages(benchmark, config)}
    if benchmark == "threedos":  # no model of clouds has frozen features
        told |= {"embed_samples", "record_run"}
    assert told == set(stages_of(import_module(f"flows.{benchmark}"))) - {"record_failure"}


# ---------------------------------------------------------------- rates


def test_the_shipped_reference():
    reference = shipped_reference()
    assert re.match(r"\d+ cores, .*\d{4}-\d\d-\d\d", reference.machine)
    for (benchmark, stage, _), rate in reference.rates.items():
        assert stage in stages_of(import_module(f"flows.{benchmark}"))
        assert rate.seconds > 0 and rate.bytes > 0
    assert {benchmark for benchmark, _, _ in reference.rates} == set(COUNTED)


def test_a_reference_is_read_as_it_was_written(tmp_path):
    rows = [("toy", Work("add_up", 1, 1, 1, "m"), Rate(0.25, 1500.0))]
    write_reference(tmp_path / "r.csv", "3 cores", rows)
    assert read_reference(tmp_path / "r.csv") == Reference(
        "3 cores", {("toy", "add_up", "m"): Rate(0.25, 1500.0)}
    )


WORKS = [
    Work("read_lines", 6, 600.0, 6.0),
    Work("add_up", 3, 30.0, 3.0, "one"),
    Work("add_up", 1, 10.0, 1.0, "other"),
]
RATES = Reference(
    "9 cores",
    {
        ("toy", "read_lines", ""): Rate(0.1, 1e6),
        ("toy", "add_up", "one"): Rate(1.0, 2e6),
    },
)


def by_stage(run: DryRun) -> dict[str, StagePlan]:
    return {plan.stage: plan for plan in run.plans}


def test_a_first_build_is_told_to_its_end(tmp_path):
    """Two workers: 60 s and 30 s of one worker take 30 s and 15 s."""
    write_raw(tmp_path / "raw")
    run = planned(tmp_path / "lake", tmp_path / "raw")
    run.foresee("toy", WORKS, RATES)
    plans = by_stage(run)
    assert (plans["read_lines"].seconds, plans["read_lines"].bytes) == (30.0, 6e6)
    assert (plans["add_up"].seconds, plans["add_up"].bytes) == (15.0, 6e6)
    lines = describe(run, ["read_lines", "add_up"])
    assert lines[1].split() == ["read_lines", "6", "6", "~6", "MB", "~30", "s", "first", "build"]
    assert lines[2].split() == ["add_up", "~4", "~4", "~6", "MB", "over", "~15", "s"]
    assert "another machine" in lines[3] and "order of magnitude" in lines[3]
    assert lines[4] == (
        "about 45 s on this machine with 2 workers, about 12 MB written; not counted: add_up "
        "(other), publishing and the report; nothing was made"
    )


def test_times_of_this_lake_win(tmp_path):
    write_raw(tmp_path / "raw")
    (tmp_path / "lake" / ".novelty").mkdir(parents=True)
    note_time(tmp_path / "lake", manifest("add_up", 10), 7.0)
    run = planned(tmp_path / "lake", tmp_path / "raw")
    run.foresee("toy", WORKS, RATES)
    plan = by_stage(run)["add_up"]
    assert (plan.seconds, plan.referred, plan.lacking) == (7.0 * 4 / 2, False, [])
    assert plan.bytes == 6e6


def test_rounds_of_a_stage_share_its_work():
    """Of four shards of models the first two are planned; the other two are foreseen."""
    run = DryRun()
    run.plans = [StagePlan("add_up", 2, missing=2, seconds=None)]
    run.unplanned_after = "add_up"
    run.foresee("toy", WORKS[1:], RATES)
    assert [(plan.shards, plan.foreseen, plan.bytes) for plan in run.plans] == [
        (2, False, 3e6),
        (2, True, 3e6),
    ]


def test_a_lake_that_is_built_asks_no_reference(tmp_path):
    write_raw(tmp_path / "raw")
    build_toy(tmp_path / "lake", tmp_path / "raw")
    run = planned(tmp_path / "lake", tmp_path / "raw")
    run.foresee("toy", WORKS, RATES)
    assert describe(run, [])[-1] == "nothing to do"
    assert not any(plan.referred or plan.foreseen or plan.bytes for plan in run.plans)


def test_sources_are_known_before_the_first_stage(tmp_path):
    write_raw(tmp_path / "raw")
    run = planned(tmp_path / "lake", tmp_path / "raw")
    size = sum(path.stat().st_size for path in (tmp_path / "raw").iterdir())
    assert run.sources == {tmp_path / "raw": Raw(6, size)}
    assert Raw.sum(run.plans[0].raw.values()) == Raw(6, size)


def test_rates_of_a_lake_foretell_the_same_build(tmp_path):
    """A build of the lists alone makes the stages that were told, as many bytes as its own rates
    say."""
    from flows.runner import run_flow
    from tasks.sample.write import write_sample

    write_sample(tmp_path / "sample", seed=0, only=["kowl"])
    lists, lake = tmp_path / "sample" / "kowl" / "lists", tmp_path / "lake"
    config = kowl.Config(lists=lists, lake=tmp_path / "none")
    flow = import_module("flows.kowl")

    def told(reference: Reference) -> DryRun:
        with dry_run() as run:
            flow.build.fn(config)
        raw = {plan.stage: plan.raw for plan in run.plans}
        run.foresee("kowl", first_build("kowl", config, raw, run.sources) or [], reference)
        return run

    run_flow("kowl", config.model_copy(update={"lake": lake}))
    rates = {("kowl", work.stage, work.model): rate for work, rate in measured(lake, "kowl")}
    run = told(Reference("this one", rates))
    pieces = lake / ".novelty" / "pieces" / "kowl"
    assert {plan.stage: plan.shards for plan in run.plans} == {
        path.name: len(list(path.iterdir())) for path in pieces.iterdir()
    }
    written = sum(path.stat().st_size for path in pieces.rglob("*.parquet"))
    assert sum(plan.bytes or 0 for plan in run.plans) == pytest.approx(written)
    assert not (tmp_path / "none").exists()


def test_an_unknown_benchmark_is_not_told():
    assert first_build("toy", None, {}) is None
    assert Works({}).files("read_lists") == Raw(0, 0)
