"""A clip is decoded once for its row and for all models; what is not kept changes no number.

Decodes are counted where child processes are asked for them.
"""

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from schemas.clips import FrameSampling
from schemas.config import make_config
from schemas.kowl import Config, SampleSettings
from storage.layout import work_path
from tasks.engine.stage import Build, Produced, Shard
from tasks.evaluation.runs import run_id
from tasks.kowl import kept, videos
from tasks.kowl.buffer import FrameBuffer, Keeping, in_groups, read_frames, remove_frames
from tasks.kowl.features import (
    backbone_facts,
    extract_features,
    plan_backbones,
    plan_features,
    sampling_rules,
)
from tasks.kowl.videos import (
    match_source,
    plan_video_shards,
    sample_videos,
    validate,
    validate_videos,
)
from tasks.models import find
from tests.kowl.test_decode import counting_frames, write_video
from tests.kowl.test_evaluation import Held
from tests.kowl.test_features import CPU
from tests.kowl.test_videos import CLIPS, made, real_cases  # noqa: F401
from tests.shared import shared_path

NAMES = CLIPS["sample_id"].to_list()
RULES = (
    FrameSampling(step=2, count=2, crops=3, short_side=32, crop=32),
    FrameSampling(preprocessing="fair", step=1, count=4, crops=2, short_side=40, crop=32),
)
ROOM = 1 << 30
VIEWS = ("plain", "color_invert", "color_jitter", "gaussian_blur", "gaussian_noise")
VIEWS += ("perspective", "rotation", "vertical_flip")


def moving(seed: int, frames: int = 24) -> np.ndarray:
    """Each frame has other blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (frames, 6, 8, 3), dtype=np.uint8)
    return blocks.repeat(8, axis=1).repeat(8, axis=2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    for seed, name in enumerate(NAMES[:3]):
        write_video(folder / f"{name}.mp4", moving(seed), fps=12)
    return folder


@pytest.fixture
def decoded(monkeypatch) -> Counter[str]:
    """How often each file was decoded; OpenCV reads a header alone where it has a count."""
    counts: Counter[str] = Counter()
    run_batch = videos.run_batch

    def counted(function, items, **options):
        whole = [i for i in items if function != videos.OPENCV or i["frames"] is None]
        counts.update(Path(item["path"]).stem for item in whole)
        return run_batch(function, items, **options)

    monkeypatch.setattr(videos, "run_batch", counted)
    return counts


@pytest.fixture
def passed(monkeypatch) -> list[int]:
    """How many clips each pass of the network had."""
    sizes: list[int] = []
    kind = find("frame_backbone")
    pass_batch = kind.pass_batch

    def counted(model, clips):
        sizes.append(len(clips))
        return pass_batch(model, clips)

    monkeypatch.setattr(kind, "pass_batch", counted)
    return sizes


def validated(lake: Path, root: Path, rules=RULES, kept_bytes: int = ROOM) -> Build:
    with Build("kowl", lake) as build:
        source = build.source(root)
        shards = plan_video_shards(source, match_source(source, CLIPS))
        build.run(validate_videos, shards, Keeping(rules=rules, kept_bytes=kept_bytes))
    return build


def backbones(**settings):
    models = {"frame_backbone": {"crops": 2, "cpu_threads": 1, **settings}}
    return plan_backbones(make_config(Config, {"lists": ".", "videos": ".", "models": models}))


def features(build: Build, root: Path, views=("plain",), trained=(), earlier=None) -> Produced:
    """What the stage makes of the one shard of a build, in this process."""
    (run,) = backbones()
    facts = backbone_facts(run)
    splits = ["train" if name in trained else "test" for name in NAMES]
    clips = Held("clips", pl.DataFrame({"sample_id": NAMES, "split": splits}))
    pieces = [piece for piece in build.pieces if piece.has("videos")]
    shown = {f"{run_id(facts)}/{piece.shard}": list(views) for piece in pieces}
    (shard,) = plan_features(str(root), pieces, shown, run, facts, (clips,))
    work = work_path(build.lake, "kowl", extract_features.name, f"{len(views)} views")
    return extract_features(replace(shard, work=work, earlier=earlier), CPU)


def kept_frames(lake: Path) -> FrameBuffer:
    return FrameBuffer(work_path(lake, "kowl", "any", "key"), "0000_of_0001")


def said(caplog) -> list[str]:
    return [line for line in caplog.messages if "decoded a second time" in line]


# ---------------------------------------------------------------- one decode


def test_one_decode_serves_the_row_and_every_rule(root, tmp_path, decoded) -> None:
    rows = validated(tmp_path / "lake", root).read("videos").filter(status="ok")
    assert decoded == Counter(NAMES[:3])
    buffer = kept_frames(tmp_path / "lake")
    for rule in RULES:
        expected = sample_videos(str(root), rows, SampleSettings(**dict(rule)))
        for row, (_, frames) in zip(rows.iter_rows(named=True), expected, strict=True):
            path = buffer.find(row, rule)
            assert path is not None
            np.testing.assert_array_equal(read_frames(path, rule), frames)
            others = {"frames": 23}, {"sha256": "0" * 64}, {"decoder": "opencv"}
            assert not any(buffer.find({**row, **other}, rule) for other in others)
            assert buffer.find(row, rule.model_copy(update={"crop": 16})) is None
    remove_frames(tmp_path / "lake")
    assert buffer.find(row, rule) is None


def test_plain_and_seven_transforms_cost_one_decode_and_the_passes_of_what_is_evaluated(
    root, tmp_path, decoded, passed, caplog
) -> None:
    caplog.set_level(logging.INFO)
    lake = tmp_path / "lake"
    build = validated(lake, root, sampling_rules(backbones()))
    produced = features(build, root, VIEWS, trained=NAMES[:2])
    assert decoded == Counter(NAMES[:3])
    assert produced.tables["outputs"].height == sum(passed)
    evaluated = 1 / 3
    assert sum(passed) <= 1.15 * 3 * (1 + 7 * evaluated)
    (line,) = said(caplog)
    assert "3 clips from the frames that validation kept, 0 decoded a second time" in line


def test_an_added_clip_costs_its_own_decode_and_passes(root, tmp_path, decoded, passed) -> None:
    lake, rules = tmp_path / "lake", sampling_rules(backbones())
    first = features(validated(lake, root, rules), root, VIEWS)
    remove_frames(lake)
    decoded.clear()
    passed.clear()
    build = validated(lake, root, rules)
    again = features(build, root, VIEWS, earlier=Earlier(first))
    assert not decoded and not passed, "nothing is new"
    assert again.tables["outputs"].equals(first.tables["outputs"])
    write_video(root / f"{NAMES[3]}.mp4", moving(3), fps=12)
    more = features(validated(lake, root, rules), root, VIEWS, earlier=Earlier(first))
    assert decoded == Counter([NAMES[3]]) and sum(passed) == len(VIEWS)
    assert more.tables["outputs"].height == first.tables["outputs"].height + len(VIEWS)


class Earlier:
    """The piece of an earlier build."""

    def __init__(self, produced: Produced) -> None:
        self.produced = produced

    def file(self, name: str) -> "Earlier":
        self.path = self.produced.files[name]
        return self

    def part(self, table: str) -> Held:
        return Held(table, self.produced.tables[table])


# ---------------------------------------------------------------- a second decode


def test_what_found_no_place_is_decoded_again_and_counted(root, tmp_path, decoded, caplog) -> None:
    caplog.set_level(logging.INFO)
    rules = sampling_rules(backbones())
    (rule,) = rules
    one = rule.views * rule.count * rule.crop**2 * 3
    tables = []
    for room, seconds in ((ROOM, 0), (2 * one // 3, 1), (0, 3)):
        decoded.clear()
        build = validated(tmp_path / f"lake{room}", root, rules, room)
        tables.append(features(build, root).tables["outputs"])
        assert sum(decoded.values()) == 3 + seconds
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])
    counts = [line.partition(": ")[2] for line in said(caplog)]
    assert counts == [
        "3 clips from the frames that validation kept, 0 decoded a second time (0 for their "
        "header or decoder)",
        "2 clips from the frames that validation kept, 1 decoded a second time (0 for their "
        "header or decoder)",
    ]


def test_a_liar_is_decoded_again_and_counted(tmp_path, decoded, caplog) -> None:
    """Of HMDB51: the header announces a frame more than there are."""
    caplog.set_level(logging.INFO)
    liar = "hmdb51/wave/TrumanShow_wave_f_nm_np1_fr_med_26.avi"
    root = tmp_path / "raw"
    root.mkdir()
    (root / f"{NAMES[0]}.avi").write_bytes((shared_path("videos") / liar).read_bytes())
    build = validated(tmp_path / "lake", root, sampling_rules(backbones()))
    rows = build.read("videos").filter(pl.col("file").is_not_null())
    assert rows["status"].to_list() == ["frame_count_lie"]
    decoded.clear()
    assert features(build, root).tables["outputs"].height == 1
    assert decoded == Counter([NAMES[0]])
    assert "0 clips" in said(caplog)[0] and "1 decoded a second time (1 for" in said(caplog)[0]


def test_a_killed_shard_finds_the_frames_of_before(root, tmp_path, decoded, monkeypatch) -> None:
    rules = sampling_rules(backbones())
    whole = validated(tmp_path / "whole", root, rules)
    decoded.clear()
    monkeypatch.setattr(videos, "FILES_IN_TURN", 1)
    monkeypatch.setattr(kept, "ROWS_KEPT", 1)
    turns: list[str] = []

    def killed(found, settings, keep):
        if len(turns) == 2:
            raise KeyboardInterrupt
        turns.extend(found)
        return validate(found, settings, keep)

    with monkeypatch.context() as patch:
        patch.setattr(videos, "validate", killed)
        with pytest.raises(KeyboardInterrupt):
            validated(tmp_path / "lake", root, rules)
    build = validated(tmp_path / "lake", root, rules)
    assert build.versions["videos"].manifest.parts == whole.versions["videos"].manifest.parts
    assert features(build, root).tables["outputs"].height == 3
    assert decoded == Counter(NAMES[:3])


# ---------------------------------------------------------------- rows and keys


def test_rows_and_keys_do_not_depend_on_the_models(root, tmp_path) -> None:
    with_rules, alone = (
        validated(tmp_path / f"lake{len(rules)}", root, rules) for rules in (RULES, ())
    )
    addresses = [[p.manifest.address for p in build.pieces] for build in (with_rules, alone)]
    assert addresses[0] == addresses[1]
    parts = [build.versions["videos"].manifest.parts for build in (with_rules, alone)]
    assert parts[0] == parts[1]


def test_bad_and_still_videos_are_judged_as_without_models(made, tmp_path) -> None:  # noqa: F811
    paths = {path.name: path for path in sorted(made.iterdir())}
    paths["still"] = write_video(tmp_path / "still.mp4", np.full((30, 48, 64, 3), 90, np.uint8))
    paths["slow"] = write_video(tmp_path / "slow.mp4", counting_frames(30))
    kept_of: list[str] = []
    found = validate(paths, Keeping(rules=RULES), lambda name, *frames: kept_of.append(name))
    assert found == validate(paths, videos.VideoSettings())
    assert {name: n for name, n in Counter(kept_of).items() if n != len(RULES)} == {}
    assert {"good.mp4", "still", "slow"} <= set(kept_of) and "noise.mp4" not in kept_of


def check_real(cases) -> None:
    root = shared_path("videos")
    paths = {name: root / name for name in cases}
    some = Keeping(rules=RULES[:1], workers=2)
    found = validate(paths, some, lambda *frames: None)
    assert found == validate(paths, videos.VideoSettings(workers=2))


def test_real_videos_are_judged_as_without_models() -> None:
    """The smaller ones, liars and damaged ones among them."""
    check_real(name for name, case in real_cases().items() if int(case["bytes"]) < 300_000)


@pytest.mark.slow
def test_all_real_videos_are_judged_as_without_models() -> None:
    check_real(real_cases())


# ---------------------------------------------------------------- groups


def test_groups_fit_into_the_buffer_but_keep_all_workers_busy() -> None:
    (rule, _) = RULES
    one = 3 * 2 * 32 * 32 * 3
    shards = [Shard(str(n), files=("file",) * 10) for n in range(10)]  # type: ignore[arg-type]
    for limit, at_once, sizes in (
        (1 << 40, 2, [10]),
        (40 * one, 2, [4, 4, 2]),
        (40 * one, 6, [6, 4]),
        (0, 3, [3, 3, 3, 1]),
    ):
        groups = in_groups(shards, [rule], limit, at_once)
        assert [len(group) for group in groups] == sizes
        assert [shard for group in groups for shard in group] == shards
    assert in_groups([], [rule], 1, 1) == [[]]


def test_models_that_see_the_same_share_a_rule() -> None:
    (run,) = backbones()
    assert len(sampling_rules([run, *backbones(batch=2)])) == 1
    assert len(sampling_rules([run, *backbones(crops=3)])) == 2
