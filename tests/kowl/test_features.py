"""The feature stage: shards, transforms, refusals; and what real videos give."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from schemas.config import make_config
from schemas.errors import ConfigError, NoveltyError, RecordError
from schemas.kowl import Config, SampleSettings
from storage.filehash import sha256_file
from tasks.engine.stage import Shard
from tasks.evaluation.passing import DeviceSettings
from tasks.evaluation.runs import run_id
from tasks.kowl import features as stage
from tasks.kowl import kept
from tasks.kowl.features import (
    backbone_facts,
    extract_features,
    features_name,
    plan_backbones,
    plan_features,
)
from tasks.kowl.separation import separation
from tasks.kowl.videos import sample_videos
from tasks.learning.samples import Samples
from tasks.models import find, make_model
from tests.kowl.test_evaluation import Held
from tests.models.test_clips import WIDTH, checkpoint
from tests.shared import shared_path

CPU = DeviceSettings(device="cpu")


def backbone(model: str = "frame_backbone", features=None, **settings):
    """The run of one model, on one thread."""
    models = {model: {"cpu_threads": 1, **settings}}
    config = {"lists": ".", "videos": ".", "models": models, "features": features or {}}
    (run,) = plan_backbones(make_config(Config, config))
    return run


def videos(*rows: tuple[str, str]) -> pl.DataFrame:
    return pl.DataFrame(
        [(name, status, f"{name}.mp4", 9, name, 20, 25.0, "decord") for name, status in rows],
        schema=["sample_id", "status", "file", "bytes", "sha256", "frames", "fps", "decoder"],
        orient="row",
    )


class Planned:
    """A piece of validated videos."""

    def __init__(self, shard: str, rows: pl.DataFrame, table: str = "videos"):
        self.shard, self.rows, self.table = shard, rows, table

    def has(self, table: str) -> bool:
        return table == self.table

    def part(self, table: str) -> Held:
        return Held(table, self.rows)


def planned(pieces, run, views=("plain",), clips=()) -> list[Shard]:
    views_by_shard = defaultdict(lambda: list(views))
    return list(plan_features("", pieces, views_by_shard, run, backbone_facts(run), clips))


def split_of(**splits: str) -> Held:
    """A part of `clips`."""
    return Held("clips", pl.DataFrame({"sample_id": [*splits], "split": [*splits.values()]}))


def test_shards_with_nothing_to_use_are_left_out():
    pieces = [
        Planned("a", videos(("x", "ok"), ("y", "missing"))),
        Planned("b", videos(("z", "missing"))),
    ]
    run = backbone()
    shards = planned(pieces, run, ("plain", "rotation"))
    assert [shard.name for shard in shards] == [f"{run_id(backbone_facts(run))}/a"]


def test_what_a_backbones_run_and_its_shards_depend_on():
    same = backbone()
    facts = backbone_facts(same)
    assert (facts.origin, facts.protocol, facts.seed) == ("frozen", None, None)
    assert len(facts.weights["efficientnet_lite0"]) == 64
    assert facts.changed == {"cpu_threads": 1, "side": 128}  # as the preset small has it
    more_views = backbone(features={"transforms": ["plain", "rotation"]})
    assert run_id(backbone_facts(more_views)) == run_id(facts)
    others = [backbone(crops=2), backbone(batch=4), backbone(preprocessing="fair")]
    others += [backbone(features=f) for f in ({"strength": {"hue": 0.1}}, {"seed": 1})]
    assert len({run_id(facts), *(run_id(backbone_facts(run)) for run in others)}) == 6

    def key(*rows: tuple[str, str], views=("plain",), **splits: str) -> str:
        (shard,) = planned([Planned("a", videos(*rows))], same, views, (split_of(**splits),))
        return extract_features.key("kowl", replace(shard, about=None), CPU)

    assert key(("x", "ok")) == key(("x", "ok"), ("y", "missing"))
    assert key(("x", "ok")) != key(("x", "ok"), ("y", "ok"))
    # Clips that are trained with have no view but the plain one.
    both = ("plain", "rotation")
    assert key(("x", "ok"), x="train") == key(("x", "ok"), views=both, x="train")
    assert key(("x", "ok"), x="test") != key(("x", "ok"), views=both, x="test")


@pytest.fixture
def clips(monkeypatch):
    """Frames without files: one clip fails, as if its file had changed."""
    drawn = np.random.default_rng(0).integers(0, 256, (2, 1, 1, 256, 256, 3), dtype=np.uint8)

    def sampled(root, rows, settings):
        for name in rows["sample_id"]:
            gone = RecordError("frames_missing", "the file has changed")
            yield name, gone if name == "gone" else drawn[len(name) % 2]

    monkeypatch.setattr(stage, "sample_videos", sampled)
    monkeypatch.setattr(stage, "read_unchanged", lambda root, files, work, **options: work())
    return Held("videos", videos(("one", "ok"), ("gone", "ok"), ("two", "frame_count_lie")))


def run(clips: Held, *views: str, **changed):
    return extract_features(shard_of(clips, views, backbone(crops=1, **changed)), CPU)


@pytest.fixture
def read(clips, monkeypatch) -> list[str]:
    """Clips that were decoded."""
    read: list[str] = []
    sampled = stage.sample_videos

    def counted(root, rows, settings):
        read.extend(rows["sample_id"])
        return sampled(root, rows, settings)

    monkeypatch.setattr(stage, "sample_videos", counted)
    return read


def shard_of(clips: Held, views: Sequence[str], run, source: str = "") -> Shard:
    about = {"facts": backbone_facts(run).model_dump(mode="json"), "views": list(views)}
    splits = split_of(one="train", gone="test", two="test", three="train")
    return Shard("s", files=run.weights, parts=(clips, splits), source=source, about=about)


def vectors_of(produced) -> np.ndarray:
    return np.array(produced.tables["outputs"]["features"].to_list(), np.float32)


def test_every_usable_clip_gets_a_vector_or_a_reason(clips):
    produced = run(clips, "plain")
    rows = produced.tables["outputs"]
    assert rows["sample_id"].to_list() == ["one", "two"]
    assert vectors_of(produced).shape == (2, 1280) and set(rows["view"]) == {"plain"}
    assert [(r.record, r.rule) for r in produced.rejects] == [("gone, plain", "frames_missing")]
    assert produced.records == 3


def test_features_follow_the_transform_and_not_the_batch(clips):
    """To the bit: so vectors of clips that did not change are taken over from an earlier build."""
    both, alone = (
        run(clips, "plain", "color_invert", batch=batch).tables["outputs"].drop("run_id")
        for batch in (8, 1)
    )
    assert both.equals(alone)
    shown = both.select("sample_id", "view").rows()
    assert shown == [("one", "plain"), ("two", "plain"), ("two", "color_invert")]
    _, plain, inverted = np.array(both["features"].to_list())
    assert np.abs(plain - inverted).max() > 0.1


def test_a_clip_is_decoded_once_for_all_views(clips, read):
    run(clips, "plain", "color_invert", "vertical_flip")
    assert read == ["one", "gone", "two"]


def test_a_killed_shard_goes_on_behind_its_last_rows(clips, read, monkeypatch, tmp_path):
    """Also with a model whose vectors depend on the batch: the batches left are the same."""
    monkeypatch.setattr(kept, "ROWS_KEPT", 1)
    monkeypatch.setattr(find("frame_backbone"), "alike_in_any_batch", False)
    shard = replace(
        shard_of(clips, ["plain", "rotation"], backbone(crops=1, batch=2)), work=tmp_path
    )
    whole = extract_features(replace(shard, work=tmp_path / "whole"), CPU).tables["outputs"]
    outputs, calls = find("frame_backbone").outputs, []

    def killed(model, samples):
        calls.append(samples.ids)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return outputs(model, samples)

    with monkeypatch.context() as patch:
        patch.setattr(find("frame_backbone"), "outputs", killed)
        with pytest.raises(KeyboardInterrupt):
            extract_features(shard, CPU)
    read.clear()
    again = extract_features(shard, CPU)
    assert again.tables["outputs"].equals(whole)
    assert read == ["gone", "two"]
    assert again.records == whole.height + 2


def test_a_clip_that_did_not_change_is_not_read_again(clips, read):
    shard = shard_of(clips, ["plain"], backbone(crops=1))
    first = extract_features(shard, CPU)
    earlier = SimpleNamespace(
        file=lambda name: SimpleNamespace(path=first.files[name]),
        part=lambda name: Held(name, first.tables[name]),
    )
    read.clear()
    changed = videos(("one", "ok"), ("two", "ok"), ("three", "ok"))
    changed = changed.with_columns(pl.Series("sha256", ["one", "other", "three"]))
    again = replace(shard, parts=(Held("videos", changed), shard.parts[1]), earlier=earlier)
    produced = extract_features(again, CPU)
    assert read == ["two", "three"]
    rows = produced.tables["outputs"]
    assert sorted(rows["sample_id"]) == ["one", "three", "two"]
    assert rows.filter(sample_id="one").equals(first.tables["outputs"].filter(sample_id="one"))
    none_left = replace(
        again, parts=(Held("videos", changed.filter(sample_id="one")), shard.parts[1])
    )
    assert extract_features(none_left, CPU).tables["outputs"]["sample_id"].to_list() == ["one"]
    assert read == ["two", "three"]


def test_unlisted_videos_get_features_under_the_name_of_their_file(clips):
    rows = clips.frame.drop("sample_id").with_columns(file=pl.Series(["a/x.avi", "gone", "b"]))
    pieces = [Planned("unlisted_0000_of_0001", rows, "unlisted_videos")]
    (shard,) = planned(pieces, backbone(crops=1), ("plain", "rotation"))
    produced = extract_features(shard, CPU)
    assert produced.tables["outputs"]["sample_id"].to_list() == ["a/x.avi", "b"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"models": ["frame_backbone"]}, "models need videos"),
        ({"predictors": ["ann"]}, "predictors need features"),
        ({"predictors": ["ann"], "videos": ".", "models": "none"}, "predictors need features"),
        ({"networks": ["vgg16"]}, "no model of clips takes one"),
        ({"evaluation": {"predicted_ranks": 6}}, "predicted_ranks is above top_k"),
        ({"features": {"extractor": "x3d"}, "videos": "."}, "extractor is not a setting"),
    ],
    ids=["videos", "features", "none", "networks", "ranks", "extractor"],
)
def test_what_is_missing_is_said_before_anything_runs(changed, said):
    with pytest.raises(ConfigError, match=said):
        make_config(Config, {"lists": ".", **changed})


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"x3d": {}}, "x3d needs its weights: name their file with --models.x3d.weights"),
        ({"x3d": {"weights": "absent.pyth"}}, "absent.pyth does not exist"),
        ({"x3d": {"weights": "absent.pyth", "count": 4}}, "x3d: .*count"),
        ({"frame_backbone": {"frames": 4}}, "frame_backbone: .*frames is not a setting"),
        ({"efficientnot": {}}, "no model 'efficientnot'"),
    ],
    ids=["weights", "file", "frames", "setting", "name"],
)
def test_a_wrong_model_is_refused_by_a_sentence(models, said):
    config = make_config(Config, {"lists": ".", "videos": ".", "models": models})
    with pytest.raises(NoveltyError, match=said):
        plan_backbones(config)


def test_a_model_of_other_samples_is_refused_by_a_sentence(monkeypatch):
    monkeypatch.setattr(find("x3d"), "modality", "cloud")
    config = make_config(Config, {"lists": ".", "videos": ".", "models": ["x3d"]})
    said = "x3d does not fit kowl: it takes samples of modality cloud, kowl has clip"
    with pytest.raises(ConfigError, match=said):
        plan_backbones(config)


def test_which_models_are_used(tmp_path):
    def used(**changed) -> list[str]:
        config = make_config(Config, {"lists": ".", **changed})
        return [run.kind.name for run in plan_backbones(config)]

    assert used() == used(videos=".", models="none") == []
    assert used(videos=".") == ["frame_backbone"]
    assert used(videos=".", models=["all"]) == ["frame_backbone"]
    (tmp_path / "x3d.pyth").write_bytes(b"weights")
    both = {"all": {}, "x3d": {"weights": str(tmp_path / "x3d.pyth")}}
    assert used(videos=".", models=both) == ["frame_backbone", "x3d"]
    # `train` is for predictors.
    assert used(videos=".", train={"epochs": 2}) == ["frame_backbone"]


def test_the_name_of_the_preprocessing_is_a_setting_that_readers_see(tmp_path):
    weights = tmp_path / "x3d.pyth"
    weights.write_bytes(b"weights")
    facts = {
        name: backbone_facts(backbone("x3d", weights=str(weights), preprocessing=name))
        for name in ("release", "fair", "spread")
    }
    assert len({run_id(each) for each in facts.values()}) == 3
    assert [each.settings["preprocessing"] for each in facts.values()] == list(facts)
    assert [features_name(each) for each in facts.values()] == ["x3d", "x3d fair", "x3d spread"]
    usual = {"cpu_threads": 1, "weights": sha256_file(weights)[:8]}
    assert facts["release"].changed == usual
    assert facts["spread"].changed == {**usual, "preprocessing": "spread", "short_side": 256}


def test_separation_of_features_that_separate_and_of_noise():
    rng = np.random.default_rng(0)
    labels = pl.Series(np.repeat(["a", "b", "c"], 20))
    centres = np.repeat(rng.normal(size=(3, 16)) * 10, 20, axis=0)
    good = separation(centres + rng.normal(size=(60, 16)), labels)
    assert good.chance == pytest.approx(19 / 59)
    assert good.nearest_neighbour == 1 and good.same_class_auroc == 1
    noise = separation(rng.normal(size=(60, 16)), labels)
    assert noise.nearest_neighbour < 0.6 and abs(noise.same_class_auroc - 0.5) < 0.1
    assert separation(centres[:3], labels[:3]) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x3d", "timesformer"])
def test_the_papers_networks_run_from_a_checkpoint_of_official_names(tmp_path, name):
    """Random weights in FAIR's layout, of full size; two real clips through the stage."""
    weights = checkpoint(name, tmp_path / "official.pyth")
    root = shared_path("videos")
    files = [
        "ucf101/Diving/v_Diving_g01_c01.avi",
        "ucf101/BenchPress/v_BenchPress_g01_c01.avi",
    ]
    rows = pl.DataFrame(
        {
            "sample_id": ["one", "two"],
            "file": files,
            "bytes": [(root / file).stat().st_size for file in files],
            "frames": [259, 151],
            "fps": 25.0,
            "decoder": "decord",
            "status": "ok",
            "sha256": [sha256_file(root / file) for file in files],
        }
    )
    run = backbone(name, weights=str(weights), batch=2)
    shard = shard_of(Held("videos", rows), ["plain"], run, str(root))
    produced = extract_features(shard, CPU)
    vectors = vectors_of(produced)
    assert vectors.shape == (2, WIDTH[name]) and not produced.rejects
    rows = produced.tables["outputs"]
    assert set(rows["logits"].list.len()) == {400} and rows["predicted"].null_count() == 2
    assert np.isfinite(vectors).all() and np.abs(vectors[0] - vectors[1]).max() > 1e-3


@pytest.mark.slow
def test_real_clips_of_different_classes_separate():
    """UCF101, HMDB51 and Kinetics clips of classes with two or more: measured in docs/kowl.md."""
    root = shared_path("videos")
    listed = pl.read_csv(root / "manifest.csv", infer_schema=False).filter(
        pl.col("dataset").is_in(["kinetics400", "ucf101", "hmdb51"])
        & pl.col("frames_decoded_opencv").is_not_null()
    )
    rows = listed.select(
        pl.col("file").alias("sample_id"),
        "file",
        pl.col("frames_decoded_opencv").cast(pl.Int32).alias("frames"),
        pl.lit(None, pl.Float64).alias("fps"),
        pl.lit("opencv").alias("decoder"),
    )
    sampling = SampleSettings(step=1, count=1, crops=4, crop=256)
    frames = dict(sample_videos(str(root), rows, sampling))
    assert not [name for name, found in frames.items() if isinstance(found, RecordError)]
    model = make_model("frame_backbone", {"crops": 4})
    model.prepare(device="cpu")
    shown = Samples([*frames], None, {"clips": np.stack([*frames.values()])})
    vectors = model.outputs(shown).features
    labels = dict(listed.select("file", "label").iter_rows())
    found = separation(vectors, pl.Series([labels[name] for name in frames]))
    print(found)
    assert found.samples >= 30 and found.classes >= 8
    assert found.nearest_neighbour >= 0.75 and found.same_class_auroc >= 0.88  # chance 0.11, 0.5
