"""Raw episodes to tables: layouts and edge cases of the release, every kind of bad frame."""

import json
import zipfile
import zlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.errors import RecordError, SourceError
from schemas.novelcraft import IngestSettings, SplitSettings
from storage.raw import open_raw
from tasks.ingest.png import check_png
from tasks.novelcraft.ingest import (
    ARCHIVE_LIMITS,
    folder_of_classes,
    ingest_episodes,
    plan_episode_shards,
    warn_of_classes,
)
from tasks.novelcraft.label import states_of
from tasks.novelcraft.worldstate import parse_world_state
from tests.shared import shared_path


def png(width: int = 256, height: int = 256) -> bytes:
    import struct

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(height * (1 + 3 * width)))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def state(step: int = 0, **changes) -> dict:
    document = {
        "blockInFront": {"name": "minecraft:air"},
        "inventory": {
            "0": {
                "item": "minecraft:log",
                "count": step,
                "damage": 0,
                "maxdamage": 0,
                "variant": "oak",
            },
            "selectedItem": {"slot": 0, "item": "minecraft:log", "count": step},
        },
        "player": {"pos": [45, 17, 40], "facing": "SOUTH", "yaw": -0.0, "pitch": 0.0},
        "entities": {"7": {"type": "EntityTrader", "name": "trader", "pos": [45, 17, 40]}},
        "map": {
            "45,17,44": {"name": "minecraft:tnt"},
            "45,17,45": {"name": "minecraft:air"},
            "46,17,45": {"name": "minecraft:log", "variant": "oak"},
        },
        "goal": {"goalType": "ITEM", "goalAchieved": False},
        "command_result": {"command": "MOVE", "argument": "w", "result": "SUCCESS"},
        "step": step,
        "gameOver": False,
    }
    return document | changes


def write_frame(
    root: Path, name: str, document: dict | bytes | None, image: bytes | None = b""
) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if document is not None:
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        path.with_suffix(".json").write_bytes(text)
    if image is not None:
        path.with_suffix(".png").write_bytes(image or png())


def ingest(root: Path, **settings) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    tables: dict[str, list[pl.DataFrame]] = {}
    rejects = {}
    for shard in plan_episode_shards(open_raw(root, limits=ARCHIVE_LIMITS)):
        produced = ingest_episodes(shard, IngestSettings(**settings))
        first = produced.tables.get("frames")
        assert produced.records == (0 if first is None else first.height) + len(produced.rejects)
        rejects |= {reject.record: reject.rule for reject in produced.rejects}
        for name, frame in produced.tables.items():
            tables.setdefault(name, []).append(frame)
    return {name: pl.concat(frames) for name, frames in tables.items()}, rejects


def test_episode_zero_starts_at_one_and_order_is_numeric(tmp_path):
    for frame in (1, 2, 10, 11):
        write_frame(tmp_path, f"normal/0/{frame}", state(frame))
    tables, rejects = ingest(tmp_path)
    frames = tables["frames"]
    assert frames["frame_id"].to_list() == [f"normal/0/{n}" for n in (1, 2, 10, 11)]
    assert frames["position"].to_list() == [0, 1, 2, 3]
    assert tables["episodes"].row(0, named=True)["first_frame"] == 1
    assert not rejects


def test_shards_are_tens_of_episodes(tmp_path):
    for episode in (0, 9, 10, 25):
        write_frame(tmp_path, f"fence/{episode}/0", state())
    names = [shard.name for shard in plan_episode_shards(open_raw(tmp_path))]
    assert names == ["fence//000000", "fence//000010", "fence//000020"]


def test_novelcraft_plus_nests_one_deeper(tmp_path):
    write_frame(tmp_path, "normal/normal_3/12/40", state())
    write_frame(tmp_path, "normal/12/40", state())
    tables, rejects = ingest(tmp_path)
    assert sorted(tables["frames"]["frame_id"]) == ["normal/12/40", "normal/normal_3/12/40"]
    assert sorted(tables["episodes"]["subset"]) == ["", "normal_3"]
    assert not rejects


@pytest.mark.parametrize(
    ("yaw", "expected"), [(-270, 90.0), (-0.0, 0.0), (315, 315.0), (-180, 180.0)]
)
def test_yaw_is_normalised(tmp_path, yaw, expected):
    pose = {"pos": [1, 2, 3], "facing": "SOUTH", "yaw": yaw, "pitch": 64.74683}
    write_frame(tmp_path, "normal/0/1", state(player=pose))
    row = ingest(tmp_path)[0]["frames"].row(0, named=True)
    assert row["yaw"] == expected and np.copysign(1, row["yaw"]) == 1
    assert row["pitch"] == 64.74683


def test_finished_game_is_flagged_or_dropped(tmp_path):
    write_frame(tmp_path, "normal/1/0", state())
    write_frame(tmp_path, "normal/1/1", state(1, gameOver=True))
    tables, _ = ingest(tmp_path)
    assert tables["frames"]["suspect_last"].to_list() == [False, True]
    tables, rejects = ingest(tmp_path, last_frame="drop")
    assert tables["frames"].height == 1 and rejects == {"normal/1/1": "finished_game"}


def test_novelty_description_is_read_and_is_no_record(tmp_path):
    write_frame(tmp_path, "item_x/0/1", state())
    described = {"novelty": [{"noveltyType": "NewItem", "noveltyItem": "minecraft:stonebrick"}]}
    (tmp_path / "item_x" / "novelty_description.json").write_text(json.dumps(described))
    tables, rejects = ingest(tmp_path)
    assert tables["episodes"]["novel_item"].to_list() == ["minecraft:stonebrick"]
    assert not rejects


def test_every_bad_frame_has_its_reason(tmp_path):
    good = json.dumps(state()).encode()
    write_frame(tmp_path, "normal/0/1", state())
    write_frame(tmp_path, "normal/0/2", None)
    write_frame(tmp_path, "normal/0/3", state(), None)
    write_frame(tmp_path, "normal/0/4", good[:-9])
    write_frame(tmp_path, "normal/0/5", good.replace(b"-0.0", b"NaN"))
    write_frame(tmp_path, "normal/0/6", state(), png()[:200])
    write_frame(tmp_path, "normal/0/7", state(), png(128, 128))
    write_frame(tmp_path, "normal/0/8", state(), b"<html>")
    write_frame(
        tmp_path,
        "normal/0/9",
        state(),
        png().replace(b"IDAT", b"IDAT", 1)[:-20] + png()[-20:][::-1],
    )
    write_frame(tmp_path, "normal/0/10", b"")
    with (tmp_path / "normal/0/11.json").open("wb") as huge:
        huge.truncate(100 << 20)
    (tmp_path / "normal/0/11.png").write_bytes(png())
    write_frame(tmp_path, "normal/0/frame12", state())
    (tmp_path / "readme.txt").write_text("hello")
    tables, rejects = ingest(tmp_path)
    assert tables["frames"]["frame_id"].to_list() == ["normal/0/1"]
    assert rejects == {
        "normal/0/2": "missing_json",
        "normal/0/3": "missing_png",
        "normal/0/4": "json_syntax",
        "normal/0/5": "json_syntax",
        "normal/0/6": "png_truncated",
        "normal/0/7": "image_size",
        "normal/0/8": "png_signature",
        "normal/0/9": rejects["normal/0/9"],
        "normal/0/10": "json_syntax",
        "normal/0/11": "too_large",
        "normal/0/frame12.json": "unrecognised_name",
        "normal/0/frame12.png": "unrecognised_name",
        "readme.txt": "unrecognised_name",
    }
    assert rejects["normal/0/9"].startswith("png_")


def test_zip_gives_the_same_as_the_folder_and_a_bomb_is_one_bad_record(tmp_path):
    for frame in (1, 2):
        write_frame(tmp_path / "raw", f"item_tnt/0/{frame}", state(frame))
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((tmp_path / "raw").rglob("*.*")):
            archive.write(path, path.relative_to(tmp_path / "raw"))
        archive.writestr("item_tnt/0/3.png", png())
        archive.writestr("item_tnt/0/3.json", b" " * (300 << 20))
    folder, none = ingest(tmp_path / "raw")
    zipped, refused = ingest(tmp_path / "all.zip")
    assert not none and refused == {"item_tnt/0/3": "too_large"}
    for name, frame in folder.items():
        assert frame.equals(zipped[name]), name


@pytest.mark.parametrize(
    ("names", "inside"),
    [
        (["normal/0/1.png"], ""),
        (["NovelCraft/normal/0/1.png", "NovelCraft/fence/0/1.png"], "NovelCraft/"),
        (["a/b/normal/normal_1/0/1.png", "a/b/readme.txt"], "a/b/"),
        (["x.txt"], ""),
        (["a/x.txt", "b/y.txt"], ""),
    ],
)
def test_a_top_folder_of_a_zip_is_found(tmp_path, names, inside):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    assert folder_of_classes(tmp_path / "all.zip") == inside


def test_zip_with_a_top_folder_is_ingested(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("NovelCraft/normal/0/1.png", png())
        archive.writestr("NovelCraft/normal/0/1.json", json.dumps(state()))
    source = open_raw(tmp_path / "all.zip", inside="NovelCraft/", limits=ARCHIVE_LIMITS)
    (shard,) = plan_episode_shards(source)
    assert ingest_episodes(shard, IngestSettings()).tables["frames"]["frame_id"][0] == "normal/0/1"


def test_links_are_not_followed_but_accounted_for(tmp_path):
    write_frame(tmp_path, "normal/0/1", state())
    (tmp_path / "normal" / "0" / "2.png").symlink_to("/etc/passwd")
    _, rejects = ingest(tmp_path)
    assert rejects == {"normal/0/2.png": "unreadable"}


def test_no_frames_is_said(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(SourceError, match="no frames found"):
        plan_episode_shards(open_raw(tmp_path))


def test_blocks_are_spans_and_give_the_states_back(tmp_path):
    tnt, log = {"45,17,44": {"name": "minecraft:tnt"}}, {"1,17,1": {"name": "minecraft:log"}}
    maps = [tnt | log, tnt, tnt | log, log]
    for number, blocks in enumerate(maps):
        write_frame(tmp_path, f"item_tnt/1/{number}", state(number, map=blocks))
    tables, _ = ingest(tmp_path)
    spans = tables["blocks"].select("block", "from_position", "to_position").rows()
    assert sorted(spans) == [
        ("minecraft:log", 0, 0),
        ("minecraft:log", 2, 3),
        ("minecraft:tnt", 0, 2),
    ]
    for row, again in states_of(tables["frames"], tables["blocks"], tables["entities"]):
        path = tmp_path / f"{row['frame_id']}.json"
        original = parse_world_state(path.read_bytes())

        def blocks_of(world):
            names = [world.keys[i] for i in world.key_index]
            return sorted(zip(map(tuple, world.positions.tolist()), names, strict=True))

        assert blocks_of(again) == blocks_of(original)
        assert (again.player, again.yaw, again.pitch) == (
            original.player,
            original.yaw,
            original.pitch,
        )
        assert [e.position for e in again.entities] == [e.position for e in original.entities]


def test_real_episode(tmp_path):
    source = shared_path("novelcraft/episodes/polycraft_v1")
    (tmp_path / "normal").mkdir()
    (tmp_path / "normal" / "0").mkdir()
    for path in source.iterdir():
        (tmp_path / "normal" / "0" / path.name).write_bytes(path.read_bytes())
    tables, rejects = ingest(tmp_path)
    assert tables["frames"].height == 92 and not rejects
    assert set(tables["frames"]["pitch"].unique()) == {0.0, 64.74683}
    assert tables["blocks"]["y"].unique().to_list() == [4]


@pytest.mark.parametrize("cut", [0, 8, 20, 60])
def test_check_png_refuses_damage(cut):
    data = png()
    assert check_png(data) == (256, 256)
    broken = data[:cut] + bytes([data[cut] ^ 0xFF]) + data[cut + 1 :]
    with pytest.raises(RecordError):
        check_png(broken)


def test_classes_that_will_not_be_labelled_are_warned_of_before_the_work(tmp_path, caplog):
    for name in ("normal", "item_tnt", "item_tntt", "mine", "described"):
        write_frame(tmp_path, f"{name}/0/0", state())
    (tmp_path / "described" / "novelty_description.json").write_text("{}")
    source = open_raw(tmp_path)
    roles = {"mine": "novel_test", "described": "novel_test", "item_tmt": "novel_valid"}
    warn_of_classes(source, SplitSettings(roles=roles))
    first, second, third = sorted(caplog.messages)
    assert first.startswith("WARNING: --splits.roles names item_tmt, but the source has no such")
    assert "class item_tntt has no role" in second and second.endswith("did you mean item_tnt?")
    assert "class mine: no novel block is known, so all of its frames get novel fraction 0" in third
    caplog.clear()
    roles = {"mine": "novel_test", "described": "novel_test", "item_tntt": "normal"}
    warn_of_classes(source, SplitSettings(roles=roles), labelled=True)
    assert not caplog.messages
