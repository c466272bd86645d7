"""NovelCraft's episodes in LeRobot's v3.0 layout, by the facts in huggingface/lerobot's sources."""

import json
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flows.cli import main
from schemas.errors import ConfigError, LakeError
from tasks.novelcraft.lerobot import Exported, export_lerobot
from tasks.novelcraft.lerobot_stats import number_stats, picture_stats, read_picture
from tests.small_lake import put_table

SIZE = 8
EPISODES = {"item_tnt/0": 3, "item_tnt/1": 2, "normal/0": 4, "normal/10": 1}
ROLES = {"normal": "normal", "item_tnt": "novel_valid", "item_bedrock": None}


def picture(number: int, channels: int = 3) -> bytes:
    pixels = np.random.default_rng([7, number]).integers(0, 256, (SIZE, SIZE, channels), np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


def frame_rows(episode_id: str, count: int) -> list[dict]:
    name, episode = episode_id.split("/")
    # Frame numbers start at 1 and one is missing, as after a quarantined frame.
    numbers = [1, *range(3, count + 2)]
    return [
        {
            "frame_id": f"{episode_id}/{frame}",
            "class": name,
            "subset": "",
            "episode": int(episode),
            "frame": frame,
            "episode_id": episode_id,
            "position": place,
            "suspect_last": place == count - 1,
            "width": SIZE,
            "height": SIZE,
            "x": 10 * int(episode) + place,
            "y": 17,
            "z": -place,
            "yaw": 90.0 * (place % 4),
            "pitch": -15.0,
            "goal_type": "ITEM" if name == "normal" else None,
        }
        for place, frame in enumerate(numbers)
    ]


def make_lake(lake: Path, episodes: dict[str, int] = EPISODES) -> Path:
    rows = [row for name, count in episodes.items() for row in frame_rows(name, count)]
    place = ["frame_id", "class", "subset", "episode", "frame"]
    frames = pl.DataFrame(rows)
    images = frames.select(place).with_columns(
        pl.Series("png", [picture(i, 4 if i == 1 else 3) for i in range(frames.height)])
    )
    labelled = frames.filter(pl.col("frame_id") != "normal/0/1")
    fraction = pl.when(pl.col("class") == "normal").then(0.0).otherwise(pl.col("frame") / 100)
    put_table(lake, "novelcraft", "frames", frames)
    shards = images.partition_by("class", maintain_order=True)
    put_table(lake, "novelcraft", "images", *shards)
    put_table(
        lake,
        "novelcraft",
        "targets",
        labelled.select(*place, fraction.alias("novel_fraction")),
    )
    splits = frames.select(
        "frame_id",
        "episode_id",
        "class",
        pl.col("class").replace_strict(ROLES, return_dtype=pl.String).alias("role"),
        pl.when(pl.col("episode") == 0).then(pl.lit("train")).alias("split"),
        pl.lit(True).alias("kept"),
    )
    put_table(lake, "novelcraft", "frame_roles", splits)
    return lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory) -> Path:
    return make_lake(tmp_path_factory.mktemp("lerobot") / "lake")


@pytest.fixture(scope="module")
def out(lake) -> Path:
    folder = lake.parent / "out"
    assert export_lerobot(lake, folder, fps=2) == Exported(4, 10, 1, 0, 0)
    return folder


def read_info(out: Path) -> dict:
    return json.loads((out / "meta/info.json").read_text())


def test_folder_has_the_files_that_lerobot_looks_for(out):
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert files == [
        "data/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
    ]
    info = read_info(out)
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (4, 10, 2)
    assert info["splits"] == {"train": "0:4"} and info["fps"] == 2
    assert info["video_path"] is None
    assert info["data_path"].format(chunk_index=0, file_index=0) == files[0]
    for name in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
        kind = "float32" if name == "timestamp" else "int64"
        assert info["features"][name] == {"dtype": kind, "shape": [1], "names": None}
    assert info["features"]["observation.image"]["shape"] == [SIZE, SIZE, 3]
    assert "action" not in info["features"], "the raw data name no action of the agent"
    assert not [name for name in info["features"] if "/" in name], "LeRobot forbids it"


def test_frames_are_numbered_as_lerobot_wants(out):
    rows = pl.read_parquet(out / "data/chunk-000/file-000.parquet")
    assert rows.columns == list(read_info(out)["features"])
    assert rows["index"].to_list() == list(range(10))
    assert rows["episode_index"].to_list() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert rows["frame_index"].to_list() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
    assert rows["timestamp"].to_list() == [0, 0.5, 1, 0, 0.5, 0, 0.5, 1, 1.5, 0]
    assert rows["novel"].to_list() == [True] * 5 + [False] * 5
    assert rows["task_index"].to_list() == [1] * 5 + [0] * 5
    assert rows["frame_id"][3:5].to_list() == ["item_tnt/1/1", "item_tnt/1/3"]
    assert rows["observation.state"][4].to_list() == [11, 17, -1, 90, -15]
    fraction = rows["novel_fraction"]
    assert fraction[:3].to_list() == pytest.approx([0.01, 0.03, 0.04])
    assert fraction.is_nan().to_list() == [False] * 5 + [True] + [False] * 4
    assert rows["suspect_last"].sum() == 4


def test_pictures_are_the_lakes_own_bytes_unless_they_have_alpha(out):
    rows = pl.read_parquet(out / "data/chunk-000/file-000.parquet")
    files = rows["observation.image"].struct.field("bytes").to_list()
    assert [files[i] == picture(i) for i in range(10)] == [i != 1 for i in range(10)]
    assert files[1][25] == 2, "RGB without alpha"
    plain = cv2.imdecode(np.frombuffer(picture(1, 4), np.uint8), cv2.IMREAD_COLOR)
    assert np.array_equal(cv2.imdecode(np.frombuffer(files[1], np.uint8), cv2.IMREAD_COLOR), plain)


def test_one_row_group_an_episode(out):
    file = pq.ParquetFile(out / "data/chunk-000/file-000.parquet")
    counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert counts == list(EPISODES.values())


def test_episodes_say_where_their_frames_are(out):
    rows = pl.read_parquet(out / "meta/episodes/chunk-000/file-000.parquet")
    assert rows["length"].to_list() == list(EPISODES.values())
    assert rows["dataset_from_index"].to_list() == [0, 3, 5, 9]
    assert rows["dataset_to_index"].to_list() == [3, 5, 9, 10]
    assert rows["novelcraft/episode_id"].to_list() == list(EPISODES)
    assert rows["novelcraft/split"].to_list() == ["train", "none", "train", "none"]
    assert (
        rows["tasks"].to_list() == [["Polycraft goal unknown"]] * 2 + [["Polycraft goal ITEM"]] * 2
    )
    assert rows["stats/observation.state/max"][2].to_list() == [3, 17, 0, 270, -15]
    assert rows["stats/index/count"].to_list() == [[3], [2], [4], [1]]
    for place in ("data/chunk_index", "data/file_index", "meta/episodes/file_index"):
        assert rows[place].to_list() == [0] * 4


def test_pandas_finds_tasks_by_their_text(out):
    tasks = pd.read_parquet(out / "meta/tasks.parquet")
    assert tasks.index.name == "task"
    assert int(tasks.loc["Polycraft goal unknown"].task_index) == 1
    assert list(tasks.columns) == ["task_index"]


def test_statistics_of_the_whole(out):
    stats = json.loads((out / "meta/stats.json").read_text())
    assert set(stats) == set(read_info(out)["features"]) - {"frame_id"}
    assert stats["index"]["mean"] == [4.5] and stats["index"]["q50"] == [4.5]
    assert stats["novel"]["mean"] == [0.5]
    assert stats["novel_fraction"]["count"] == [9], "a frame without a label does not count"
    image = stats["observation.image"]
    assert np.array(image["mean"]).shape == (3, 1, 1) and image["count"] == [10]
    decoded = [
        cv2.imdecode(np.frombuffer(picture(i, 4 if i == 1 else 3), np.uint8), cv2.IMREAD_COLOR)
        for i in range(10)
    ]
    pixels = np.stack(decoded)[..., ::-1].reshape(-1, 3) / 255
    assert np.ravel(image["mean"]) == pytest.approx(pixels.mean(0))
    assert np.ravel(image["std"]) == pytest.approx(pixels.std(0))
    assert np.ravel(image["max"]) == pytest.approx(pixels.max(0))


def test_datasets_library_decodes_it(out, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset, Features, Image, List, Value

    files = [str(path) for path in sorted(out.glob("data/*/*.parquet"))]
    loaded = Dataset.from_parquet(files, cache_dir=str(tmp_path))
    # LeRobot makes these of info.json: (1,) is a value, (n,) a list of fixed length.
    wanted = {
        name: Image()
        if feature["dtype"] == "image"
        else Value(feature["dtype"])
        if feature["shape"] == [1]
        else List(Value(feature["dtype"]), length=feature["shape"][0])
        for name, feature in read_info(out)["features"].items()
    }
    assert loaded.features == Features(wanted)
    assert loaded[1]["observation.image"].size == (SIZE, SIZE)
    assert loaded[1]["observation.image"].mode == "RGB"


def test_lerobot_itself_reads_it(out, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    library = pytest.importorskip(
        "lerobot.datasets.lerobot_dataset", reason="the lerobot package is not installed"
    )
    # A window half a second long, at 2 frames a second, in episodes 1 and 2 alone.
    loaded = library.LeRobotDataset(
        "local/novelcraft",
        root=out,
        episodes=[1, 2],
        delta_timestamps={"observation.state": [-0.5, 0.0]},
    )
    assert len(loaded) == 6
    item = loaded[3]
    assert item["frame_id"] == "normal/0/3" and item["task"] == "Polycraft goal ITEM"
    assert item["observation.image"].shape == (3, SIZE, SIZE)
    assert item["observation.state"][:, 0].tolist() == [0, 1]
    assert loaded.meta.stats["observation.image"]["mean"].shape == (3, 1, 1)


def test_a_new_file_before_the_limit_is_passed(lake, tmp_path):
    done = export_lerobot(lake, tmp_path / "out", data_file_mb=1e-6)
    assert done.files == 4
    names = sorted(path.name for path in (tmp_path / "out/data/chunk-000").iterdir())
    assert names == [f"file-00{i}.parquet" for i in range(4)]
    rows = pl.read_parquet(tmp_path / "out/meta/episodes/chunk-000/file-000.parquet")
    assert rows["data/file_index"].to_list() == [0, 1, 2, 3]


def test_a_new_chunk_after_its_last_file(lake, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.novelcraft.lerobot_files.FILES_A_CHUNK", 3)
    export_lerobot(lake, tmp_path / "out", data_file_mb=1e-6)
    assert (tmp_path / "out/data/chunk-001/file-000.parquet").exists()
    rows = pl.read_parquet(tmp_path / "out/meta/episodes/chunk-000/file-000.parquet")
    assert rows["data/chunk_index"].to_list() == [0, 0, 0, 1]


def test_same_bytes_each_time(lake, out, tmp_path):
    export_lerobot(lake, tmp_path / "again", fps=2)
    for path in out.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(out)).read_bytes()


def test_command_takes_classes(lake, tmp_path, capsys):
    words = ["novelcraft", "lerobot", "--lake", str(lake), "--out", str(tmp_path / "out")]
    assert main([*words, "--only", "normal"]) == 0
    assert "2 episodes, 5 frames, 1 files" in capsys.readouterr().out
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    words[-1] = str(tmp_path / "other")
    assert main([*words, "--only", "nonsense"]) == 2
    assert "no class nonsense; there are: item_tnt, normal" in capsys.readouterr().err
    assert main([*words, "--fps", "0"]) == 2
    assert not (tmp_path / "other").exists()


def test_classes_without_a_role_are_counted_out(tmp_path):
    lake = make_lake(tmp_path / "lake", {"normal/0": 2, "item_bedrock/0": 3})
    assert export_lerobot(lake, tmp_path / "out") == Exported(1, 2, 1, 3, 0)
    with pytest.raises(ConfigError, match="normal or novel"):
        export_lerobot(lake, tmp_path / "none", ["item_bedrock"])


def test_frames_without_a_picture_are_counted_out(tmp_path, capsys):
    lake = make_lake(tmp_path / "lake", {"normal/0": 3})
    images = pl.read_parquet(lake / "novelcraft/images/current/*.parquet")
    put_table(lake, "novelcraft", "images", images.head(2))
    assert main(["novelcraft", "lerobot", "--lake", str(lake), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "1 episodes, 2 frames" in printed and "1 frames left out: they have no pic" in printed


def test_damaged_picture_leaves_no_folder(tmp_path):
    lake = make_lake(tmp_path / "lake", {"normal/0": 2})
    images = pl.read_parquet(lake / "novelcraft/images/current/*.parquet")
    put_table(lake, "novelcraft", "images", images.with_columns(png=pl.lit(b"no picture")))
    with pytest.raises(LakeError, match="picture of normal/0/1 cannot be decoded"):
        export_lerobot(lake, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake"]


@given(arrays(np.uint8, (5, 4, 3)))
def test_picture_statistics_are_those_of_the_pixels(pixels):
    png = cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()
    same, levels = read_picture(png, "x")
    assert same == png
    stats = picture_stats(levels, 1)
    flat = pixels.reshape(-1, 3) / 255
    for name in ("min", "max", "mean", "std"):
        assert np.ravel(stats[name]) == pytest.approx(getattr(flat, name)(0), abs=1e-6)
    median = np.quantile(flat, 0.5, axis=0, method="inverted_cdf")
    assert np.ravel(stats["q50"]) == pytest.approx(median)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(0, 3))
def test_number_statistics_leave_nan_out(values, holes):
    stats = number_stats(np.array(values + [np.nan] * holes)[:, None])
    assert stats["count"] == [len(values)]
    assert stats["min"] == [min(values)] and stats["max"] == [max(values)]
    assert stats["q90"] == [pytest.approx(float(np.quantile(values, 0.9)))]


def test_numbers_that_are_all_missing_count_nothing():
    stats = number_stats(np.full((3, 1), np.nan))
    assert stats["count"] == [0] and stats["mean"] == [0.0]
