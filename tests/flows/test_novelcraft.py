"""The NovelCraft flow end to end on a small sample: tables, resume, and the cost of a change."""

import json

import polars as pl
import pytest

from schemas.novelcraft import Config
from storage.damage import verify_version
from storage.layout import lake_root
from storage.tables import current_version, current_versions
from tasks.novelcraft.windows import PROTOCOLS
from tasks.sample.novelcraft import write_novelcraft

EPISODES = {"normal": 4, "fence": 2, "item_tnt": 1, "tree_easy": 3}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    from flows.novelcraft import build

    root = tmp_path_factory.mktemp("novelcraft")
    write_novelcraft(root / "raw", episodes=EPISODES, bad_records=False)
    truncated = root / "raw" / "item_tnt" / "0" / "3.json"
    truncated.write_bytes(truncated.read_bytes()[:100])
    build(Config(source=root / "raw", lake=root / "lake"))
    return root


def table(root, name: str) -> pl.DataFrame:
    return current_version(root / "lake", "novelcraft", name).read()


def made(capsys) -> dict[str, int]:
    lines = [line for line in capsys.readouterr().err.splitlines() if " shards made" in line]
    return {line.split(":")[0].split("/")[1]: int(line.split(": ")[1].split()[0]) for line in lines}


def test_tables_agree_with_each_other(built):
    frames, targets, roles = (table(built, name) for name in ("frames", "targets", "frame_roles"))
    assert frames["frame_id"].to_list() == targets["frame_id"].to_list()
    assert sorted(frames["frame_id"]) == roles["frame_id"].to_list()
    assert frames.select(pl.struct("class", "episode").n_unique()).item() == sum(EPISODES.values())
    assert table(built, "quarantine")["record"].to_list() == ["item_tnt/0/3"]
    assert not any(verify_version(version) for version in current_versions(built / "lake"))


def test_protocols_are_made_of_samples(built):
    samples, splits = table(built, "samples"), table(built, "splits")
    roles, windows = table(built, "frame_roles"), table(built, "windows")
    frames = samples.filter(modality="image")
    assert sorted(frames["sample_id"]) == sorted(roles["frame_id"])
    states = samples.filter(modality="states")
    assert sorted(states["sample_id"]) == sorted(windows["sample_id"])
    assert set(splits["sample_id"]) <= set(samples["sample_id"])
    assert sorted(table(built, "protocols")["protocol"]) == [
        "fused", "symbolic", "symbolic_all", "symbolic_windows",
        "symbolic_windows_non_overlapping", "visual",
    ]  # fmt: skip
    kept = roles.filter("kept").drop_nulls("split")
    visual = splits.filter(protocol="visual")
    assert sorted(visual["sample_id"]) == sorted(kept["frame_id"])
    labels = dict(visual.drop_nulls("label").select("class", "label").unique().iter_rows())
    assert labels == {"normal": 0, "fence": 1}
    novel = visual.filter(role="novel")
    assert set(novel["class"]) == {"item_tnt", "tree_easy"} and novel["label"].null_count()
    fused = splits.filter(protocol="fused")
    assert sorted(fused["sample_id"]) == sorted(
        visual.filter(pl.col("split") != "train")["sample_id"]
    )
    assert splits.filter(protocol="symbolic_all").height == roles.drop_nulls("split").height
    # Learnt and validated on the standard game, tested on it and on tree_easy.
    symbolic = splits.filter(protocol="symbolic")
    classes = symbolic.group_by("split").agg(pl.col("class").unique().sort())
    assert dict(classes.iter_rows()) == {
        "train": ["normal"], "valid": ["normal"], "test": ["normal", "tree_easy"],
    }  # fmt: skip
    whole = roles.drop_nulls("split").filter(pl.col("class").is_in(["normal", "tree_easy"]))
    assert sorted(symbolic["sample_id"]) == sorted(whole["frame_id"])
    # The first games in the folder tree_easy are unchanged.
    early = symbolic.filter(pl.col("sample_id").str.starts_with("tree_easy/0/"))
    assert set(early["role"]) == {"known"} and set(early["split"]) == {"test"}
    for name, mode in PROTOCOLS.items():
        rows = splits.filter(protocol=name)
        assert set(rows["label"]) == {None}
        of_mode = windows.filter(pl.col("class").is_in(["normal", "tree_easy"]), mode=mode)
        assert sorted(rows["sample_id"]) == sorted(of_mode["sample_id"])
        novel = rows.filter(role="novel")["sample_id"].str.split("/")
        assert {"/".join(parts[2:]).rpartition("_")[0] for parts in novel} == {"tree_easy/2"}


def test_labels_are_what_the_game_shows(built):
    targets = table(built, "targets")
    by_class = dict(targets.group_by("class").agg(pl.col("novel_pixels").max()).iter_rows())
    assert by_class["normal"] == 0
    assert min(by_class[name] for name in ("fence", "item_tnt", "tree_easy")) > 0
    shown = targets.filter(pl.col("novel_pixels") > 0)
    masks = table(built, "masks")
    assert masks["frame_id"].to_list() == shown["frame_id"].to_list()
    novel = masks["runs"].map_elements(lambda runs: sum(runs[1::2]), return_dtype=pl.Int64)
    assert novel.to_list() == shown["novel_pixels"].to_list()
    boxes = table(built, "novel_objects")
    assert set(boxes["frame_id"]) == set(shown["frame_id"])


def test_masks_are_exported_as_pictures(built, tmp_path):
    from flows.cli import main
    from tasks.novelcraft.masks import decode_png

    words = [
        "novelcraft",
        "masks",
        "--lake",
        str(built / "lake"),
        "--out",
        str(tmp_path),
        "--only",
        "item_tnt",
    ]
    assert main(words) == 0
    shown = table(built, "targets").filter(
        (pl.col("class") == "item_tnt") & (pl.col("novel_pixels") > 0)
    )
    pixels = {
        str(path.relative_to(tmp_path).with_suffix("")): int(decode_png(path.read_bytes()).sum())
        for path in tmp_path.rglob("*.png")
    }
    assert pixels == dict(shown.select("frame_id", "novel_pixels").iter_rows())
    by_label = table(built, "target_labels").filter(pl.col("class") == "item_tnt")
    assert dict(by_label.select("frame_id", "pixels").iter_rows()) == pixels


def test_windows_know_the_changed_games(built):
    windows = table(built, "windows").filter(pl.col("mode") == "non_overlapping")
    novel = windows.group_by("episode_id").agg(pl.col("novel").any())
    assert {name for name, is_novel in novel.iter_rows() if is_novel} == {
        "item_tnt/0",
        "tree_easy/2",
    }


def test_nothing_is_made_twice_and_a_changed_episode_costs_one_shard(built, capsys):
    from flows.novelcraft import build

    config = Config(source=built / "raw", lake=built / "lake")
    build(config)
    assert set(made(capsys).values()) == {0}
    path = built / "raw" / "normal" / "2" / "5.json"
    original = path.read_bytes()
    document = json.loads(original)
    document["step"] += 1
    path.write_text(json.dumps(document))
    build(config)
    assert made(capsys) == {
        "ingest_episodes": 1,
        "render_targets": 1,
        "split_frames": 1,
        "cut_all_windows": 1,
        "key_protocols": 0,  # no model sees the number of the step
    }
    path.write_bytes(original)


def test_official_targets_take_the_place_of_rendering(built, tmp_path):
    from flows.novelcraft import build

    rows = table(built, "targets").filter(pl.col("class") != "normal")
    official = rows.select(
        pl.col("frame_id").alias("id"), pl.col("novel_fraction").alias("novel_percent")
    )
    official.write_csv(tmp_path / "targets.csv", float_precision=None)
    build(
        Config(source=built / "raw", lake=tmp_path / "lake", targets_csv=tmp_path / "targets.csv")
    )
    again = current_version(tmp_path / "lake", "novelcraft", "targets").read()
    assert again["renderer"].unique().to_list() == ["official"]
    assert again["novel_pixels"].to_list() == rows["novel_pixels"].to_list()
    for name in ("frame_roles", "splits", "protocols"):
        same = current_version(tmp_path / "lake", "novelcraft", name).read()
        assert same.equals(table(built, name))


def test_lake_root_is_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("NOVELTY_LAKE", str(tmp_path / "x"))
    assert lake_root() == tmp_path / "x"
