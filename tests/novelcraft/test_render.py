"""Both renderers behind one call, and the command for people who have only world states."""

import json
import signal
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from flows.cli import main
from schemas.errors import RecordError
from schemas.novelcraft import RenderSettings
from tasks.ingest.native.pool import Limits, run_batch
from tasks.novelcraft import render as rendering
from tasks.novelcraft.masks import decode_png, mask_iou
from tasks.novelcraft.render import render_all, state_document
from tasks.novelcraft.worldstate import parse_world_state, world_state
from tests.shared import shared_path

TNT = "minecraft:tnt"


def document(yaw: float, blocks: dict[str, str], pitch: float = 0.0) -> dict:
    return {
        "map": {place: {"name": name} for place, name in blocks.items()},
        "player": {"pos": [0, 4, 0], "yaw": yaw, "pitch": pitch},
        "step": 0,
    }


DOCUMENTS = [
    document(0, {"0,4,3": TNT, "1,4,2": "minecraft:stone"}),
    document(0, {"0,4,3": "minecraft:stone"}),
    document(180, {"0,4,3": TNT}),
    document(15, {"2,4,5": TNT, "0,4,4": "minecraft:log"}, pitch=30),
]


@pytest.mark.usefixtures("with_blender")
def test_blender_in_child_processes_gives_the_masks_of_raycast():
    frames = [(world_state(document), (TNT,)) for document in DOCUMENTS]
    cast = list(render_all(frames, RenderSettings()))
    drawn = list(render_all(frames, RenderSettings(renderer="blender")))
    assert [found.pixels > 0 for found in cast] == [True, False, False, True]
    for ours, theirs in zip(cast, drawn, strict=True):
        assert mask_iou(ours.mask, theirs.mask) >= 0.995
        assert abs(ours.fraction - theirs.fraction) <= 0.0005


@pytest.mark.usefixtures("with_blender")
def test_a_frame_that_blender_cannot_render_is_a_bad_record(monkeypatch):
    monkeypatch.setattr(rendering, "BLENDER", "tests.novelcraft.test_render:crash")
    monkeypatch.setattr(rendering, "BLENDER_LIMITS", Limits(seconds_per_item=20))
    frames = [(world_state(DOCUMENTS[0]), (TNT,)), (world_state(DOCUMENTS[1]), (TNT,))]
    bad, good = render_all(frames, RenderSettings(renderer="blender"))
    assert isinstance(bad, RecordError) and bad.rule == "native_crash"
    assert good.pixels == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from schemas.novelcraft import RenderSettings
from tasks.novelcraft import render as rendering
from tests.novelcraft.test_render import frames_of_masks

write = rendering.write_checkpoint

def write_and_die(path, data):
    write(path, data)
    if len(list(Path(sys.argv[1]).iterdir())) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

rendering.write_checkpoint = write_and_die
settings = RenderSettings(renderer="blender")
list(rendering.render_all(frames_of_masks(), settings, work=Path(sys.argv[1])))
"""


def frames_of_masks():
    return [(world_state(DOCUMENTS[number]), (TNT,)) for number in (0, 1, 3, 0, 3)]


@pytest.mark.usefixtures("with_blender")
def test_blender_killed_within_a_shard_goes_on_with_the_next_frame(tmp_path, monkeypatch):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    batches = []

    def counted(function, items, **options):
        batches.append(len(items))
        return run_batch(function, items, **options)

    monkeypatch.setattr(rendering, "run_batch", counted)
    settings = RenderSettings(renderer="blender")
    resumed = list(render_all(frames_of_masks(), settings, work=tmp_path))
    again = list(render_all(frames_of_masks(), settings, work=tmp_path))
    anew = list(render_all(frames_of_masks(), settings))
    assert batches == [2, 0, 4]  # of five frames one shows nothing novel
    for one, two, three in zip(resumed, again, anew, strict=True):
        assert np.array_equal(one.mask, three.mask) and np.array_equal(two.mask, three.mask)
        assert one.pixels == two.pixels == three.pixels


def crash(item, out_dir):
    signal.raise_signal(signal.SIGSEGV)


def test_state_document_keeps_the_picture():
    path = shared_path("novelcraft/world_states_v2/episode_a_0.json")
    state = parse_world_state(path.read_bytes())
    again = world_state(state_document(state))
    assert np.array_equal(state.positions, again.positions)
    assert [state.keys[i] for i in state.key_index] == [again.keys[i] for i in again.key_index]
    assert (state.player, state.yaw, state.pitch) == (again.player, again.yaw, again.pitch)


@pytest.mark.parametrize("kind", ["folder", "lines"])
def test_render_command(tmp_path, capsys, kind):
    if kind == "folder":
        source = tmp_path / "states"
        source.mkdir()
        for number, each in enumerate(DOCUMENTS):
            (source / f"{number}.json").write_text(json.dumps(each))
        (source / "9.json").write_text("{")
    else:
        source = tmp_path / "states.jsonl"
        source.write_text("\n".join([*map(json.dumps, DOCUMENTS), "{"]))
    out = tmp_path / "out"
    words = ["novelcraft", "render", str(source), "--novel", TNT, "--out", str(out)]
    words += ["--rotation", "published"]
    assert main([*words, "--masks"]) == 0
    assert "4 states, 2 show novelty" in capsys.readouterr().out
    targets = pl.read_parquet(out / "targets.parquet")
    assert targets.equals(pl.read_csv(out / "targets.csv", schema=targets.schema))
    assert targets["frame_id"].to_list() == ["0", "1", "2", "3"]
    assert targets["rotation"].unique().to_list() == ["published"]
    for row in targets.iter_rows(named=True):
        mask = decode_png((out / "masks" / f"{row['frame_id']}.png").read_bytes())
        assert mask.sum() == row["novel_pixels"]
    assert pl.read_csv(out / "refused.csv")["rule"].to_list() == ["json_syntax"]


def test_render_command_refuses_what_it_cannot_read(tmp_path, capsys):
    words = ["--novel", TNT, "--out", str(tmp_path / "out")]
    assert main(["novelcraft", "render", str(tmp_path / "none"), *words]) == 2
    assert "neither a folder" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert main(["novelcraft", "render", str(tmp_path / "bad.json"), *words]) == 2
    assert "the first was refused" in capsys.readouterr().err


def test_a_novel_name_that_no_state_has_is_warned_of_before_the_work(tmp_path, caplog):
    source = tmp_path / "states.jsonl"
    source.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    words = ["novelcraft", "render", str(source), "--out", str(tmp_path / "out"), "--novel"]
    assert main([*words, TNT]) == 0
    assert not caplog.messages
    assert main([*words, f"{TNT},minecraft:tntt"]) == 0
    assert caplog.messages == [
        "WARNING: minecraft:tntt is in none of the 4 states, so it gives no novel pixel; did you "
        "mean minecraft:tnt?"
    ]
