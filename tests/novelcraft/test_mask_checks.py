"""Masks checked against Blender: the sample, the comparison, the warning, a machine without it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.novelcraft import CheckSettings, Config
from storage.tables import current_version
from tasks.novelcraft import mask_checks
from tasks.novelcraft.mask_checks import sampled
from tasks.operations.doctor import BLENDER, LIBRARIES
from tasks.report.write import write_report
from tasks.sample.novelcraft import write_novelcraft

NAMES = st.lists(st.text("abc/", min_size=1), unique=True)


@given(NAMES, st.floats(0, 1), st.integers(1, 9))
def test_a_sample_has_its_size_and_does_not_depend_on_the_order(names, share, least):
    settings = CheckSettings(share=share, least=least)
    chosen = sampled(names, settings)
    assert len(chosen) == min(len(names), max(least, int(np.ceil(share * len(names)))))
    assert sampled(names[::-1], settings) == chosen


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("checks")
    write_novelcraft(root / "raw", episodes={"normal": 2, "item_tnt": 2}, bad_records=False)
    return root


def build(root, **checks):
    from flows.novelcraft import build

    build(Config(source=root / "raw", lake=root / "lake", checks=checks))


def checks(root):
    return current_version(root / "lake", "novelcraft", "mask_checks").read()


def test_without_blender_one_sentence_and_no_rows(built, capfd):
    build(built)
    assert "masks are not checked against Blender, which is not here" in capfd.readouterr().err
    assert "mask_checks" not in {path.name for path in (built / "lake" / "novelcraft").iterdir()}


def test_without_libraries_of_the_system_one_sentence_and_no_rows(built, capfd, monkeypatch):
    monkeypatch.delenv("NOVELTY_BLENDER_PYTHON")
    monkeypatch.setattr(mask_checks, "blender_version", lambda: "4.5.0")
    monkeypatch.setitem(LIBRARIES, "libabsent.so.1", ("libabsent1", (BLENDER,)))
    build(built)
    said = capfd.readouterr().err
    assert "masks are not checked against Blender, which needs " in said
    assert "libabsent.so.1 of the system; `make doctor` says how to get them" in said
    assert "mask_checks" not in {path.name for path in (built / "lake" / "novelcraft").iterdir()}


@pytest.mark.usefixtures("with_blender")
def test_blender_agrees_and_is_shown(built, capfd):
    build(built, least=2)
    rows = checks(built)
    assert rows.height == 2 and rows["iou"].to_list() == [1.0, 1.0]
    assert rows["pixels"].equals(rows["blender_pixels"]) and rows["pixels"].min() > 0
    capfd.readouterr()
    build(built, least=2)
    assert "check_frames: 0 of 1 shards made" in capfd.readouterr().err
    page = write_report(built / "lake", "novelcraft").read_text()
    assert "2 masks are the same, the mean difference is 0.00 pixels" in page


@pytest.mark.usefixtures("with_blender")
def test_a_difference_is_loud(built, capfd, monkeypatch):
    def drawn(frames, settings):
        for found in cast(frames, settings.model_copy(update={"renderer": "raycast"})):
            mask = found.mask.copy()
            mask[:3, :3] = ~mask[:3, :3]
            yield replace(found, mask=mask, pixels=int(mask.sum()))

    cast = mask_checks.render_all
    monkeypatch.setattr(mask_checks, "render_all", drawn)
    build(built, least=3)
    assert set(checks(built)["differing_pixels"]) == {9}
    said = capfd.readouterr().err
    assert "WARNING: masks differ from Blender's by 9.0 pixels a frame on the mean of 3" in said
    assert all(name in said for name in checks(built)["frame_id"])
