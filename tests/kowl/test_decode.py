"""Decoders in child processes tell the truth about a file and give exactly the frames asked for."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.ingest.native.pool import run_batch
from tasks.kowl.decode import HEAD_BYTES, SQUARES, container_of, frame_indices
from tests.shared import shared_path

DECODE = "tasks.kowl.decode"
SPREAD = {"preprocessing": "spread", "fps": None}
X3D = {"step": 5, "count": 16, "crops": 4, "short_side": 256, "crop": 224, **SPREAD}
BOTH = ("decord", "opencv")
RELEASED_PIXELS = [[149, 81, 194], [171, 229, 254], [37, 39, 219]]
RELEASED_MEAN = 127.045613


def write_video(path: Path, frames: np.ndarray, fps: float = 15, codec: str = "mp4v") -> Path:
    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, (width, height))
    assert writer.isOpened()
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[..., ::-1]))
    writer.release()
    return path


def counting_frames(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frame number k is grey of brightness 20 + 4 k."""
    grey = (20 + 4 * np.arange(count)).astype(np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (count, height, width, 3))


def numbers_of(frames: np.ndarray) -> np.ndarray:
    return np.rint((frames.mean(axis=(-3, -2, -1)) - 20) / 4).astype(int)


def run(function: str, *items: dict[str, Any]) -> list[Any]:
    library = "cv2" if function.endswith("opencv") else "decord"
    return list(run_batch(f"{DECODE}:{function}", items, imports=[library]))


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"<!DOCTYPE html><html>", "text"),
        ("<html>страница".encode(), "text"),
        (b"#EXTM3U\n#EXTINF:10,\n/etc/passwd\n", "text"),
        (b"ffconcat version 1.0\nfile other.mp4\n", "text"),
        (b"\0\0\0\x20ftypisom\0\0\2\0", "iso"),
        (b"\0\0\1\0moov\0\0\0\0", "iso"),
        (b"RIFF\0\1\0\0AVI LIST", "avi"),
        (b"RIFF\0\1\0\0WAVEfmt ", None),
        (b"\x1a\x45\xdf\xa3\1\0\0\0", "matroska"),
        (b"\x47\x40\0\x10" + bytes(184) + b"\x47\x40" + bytes(66), "mpeg"),
        (b"\x47\x40\0\x10" + bytes(252), None),
        (b"", None),
        (bytes(range(1, 200)), None),
    ],
)
def test_container_by_first_bytes(head: bytes, kind: str | None) -> None:
    assert len(head) <= HEAD_BYTES and container_of(head) == kind


def test_x3d_indices_of_a_ten_second_clip() -> None:
    indices = frame_indices(300, step=5, count=16, crops=4)
    assert indices[:, 0].tolist() == [0, 74, 149, 224]
    assert indices[0].tolist() == list(range(0, 80, 5)) and indices[-1, -1] == 299


def test_windows_of_the_release() -> None:
    """Of clips that fill a window; run there. It begins with every fifth frame, from the first."""
    for frames, starts in {
        303: [0, 55, 110, 165],
        300: [0, 55, 110, 165],
        310: [0, 55, 110, 165],
        311: [0, 55, 110, 165],
        316: [0, 60, 120, 180],
        95: [0, 0, 0, 0],
        96: [0, 5, 10, 15],
    }.items():
        indices = frame_indices(frames, 5, 16, 4, "release")
        assert indices[:, 0].tolist() == starts, frames
        assert (np.diff(indices, axis=1) == 5).all()
    # TimeSformer's script: the first 300 frames of any.
    assert frame_indices(320, 1, 300, 1, "release")[0].tolist() == list(range(300))
    # The release fills up with zeros, and lets the later windows of such a clip begin anywhere.
    short = frame_indices(31, 5, 16, 4, "release")
    assert (short == [*range(0, 31, 5), *[30] * 9]).all()


def test_windows_of_fairs_test() -> None:
    """By FAIR's code: 16 frames over 80/30 seconds, 8 over 256/30, first and last included."""
    indices = frame_indices(300, 5, 16, 10, "fair", 30.0)
    assert indices[0].tolist() == [0, 5, 10, 15, 21, 26, 31, 36, 42, 47, 52, 57, 63, 68, 73, 79]
    assert indices[:, 0].tolist() == list(range(0, 220, 22))
    assert frame_indices(300, 32, 8, 1, "fair", 30.0).tolist() == [
        [0, 36, 72, 109, 145, 182, 218, 255]
    ]
    # At half the rate the same time takes half the frames.
    assert frame_indices(300, 32, 8, 1, "fair", 15.0)[0].tolist() == [
        *(0, 18, 36, 54, 72, 90, 108, 127)
    ]
    assert (frame_indices(300, 5, 16, 10, "fair", None) == indices).all()
    assert frame_indices(20, 5, 16, 2, "fair", 30.0).max() == 19


@given(st.integers(1, 2000), st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_indices_lie_in_the_video(frames: int, step: int, count: int, crops: int) -> None:
    indices = frame_indices(frames, step, count, crops)
    assert indices.shape == (crops, count)
    assert indices.min() >= 0 and indices.max() <= frames - 1
    steps = np.diff(indices, axis=1)
    assert (steps >= 0).all() and (np.diff(indices[:, 0]) >= 0).all()
    window = (count - 1) * step + 1
    if window <= frames:
        assert (steps == step).all()
        if crops > 1:
            assert indices[0, 0] == 0 and indices[-1, -1] == frames - 1
        else:
            assert abs(indices[0, 0] - (frames - 1 - indices[0, -1])) <= 1
    else:
        assert (indices == np.minimum(np.arange(count) * step, frames - 1)).all()


@pytest.mark.parametrize("wrong", [(0, 5, 16, 4), (10, 0, 16, 4), (10, 5, 0, 4), (10, 5, 16, 0)])
def test_indices_of_nothing_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        frame_indices(*wrong)


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> Path:
    return write_video(
        tmp_path_factory.mktemp("v") / "counting.avi", counting_frames(50), 15, "MJPG"
    )


def test_a_good_video_is_decoded_once(counting: Path) -> None:
    (seen,) = run("validate_with_decord", {"path": str(counting)})
    assert seen.value == {"frames": 50, "fps": 15.0, "repeated": False, "printed": []}
    trusted, untrusted = run(
        "validate_with_opencv",
        {"path": str(counting), "frames": 50},
        {"path": str(counting), "frames": None},
    )
    assert trusted.value["counted"] is None and untrusted.value["counted"] == 50
    assert trusted.value | {"counted": 50} == untrusted.value
    assert untrusted.value == {
        "announced": 50,
        "counted": 50,
        "fps": 15.0,
        "width": 64,
        "height": 48,
        "codec": "MJPG",
        "rotation": 0,
    }


def test_a_still_end_is_noticed(tmp_path: Path) -> None:
    frames = counting_frames(20).copy()
    frames[-1] = frames[-2]
    path = write_video(tmp_path / "still.avi", frames, codec="MJPG")
    (seen,) = run("validate_with_decord", {"path": str(path)})
    assert seen.value["frames"] == 20 and seen.value["repeated"]


def test_errors_name_neither_folder_nor_clock(tmp_path: Path) -> None:
    path = tmp_path / "noise.mp4"
    path.write_bytes(np.random.default_rng(0).bytes(5000))
    for function in ("validate_with_decord", "validate_with_opencv", "sample_with_decord"):
        (outcome,) = run(function, {"path": str(path), "frames": None})
        assert outcome.rule in ("decode_error", "open_error", "native_error")
        if outcome.rule != "native_error":
            assert str(tmp_path) not in outcome.message and "github" not in outcome.message


@pytest.mark.parametrize("decoder", BOTH)
def test_samples_are_the_frames_asked_for(counting: Path, decoder: str) -> None:
    item = {"path": str(counting), "frames": 50, **SPREAD}
    choices = [
        {"step": 3, "count": 5, "crops": 4, "short_side": 48, "crop": 32},
        {"step": 1, "count": 1, "crops": 1, "short_side": 40, "crop": 40},
        {"step": 7, "count": 10, "crops": 2, "short_side": 96, "crop": 64},
    ]
    for choice, outcome in zip(
        choices, run(f"sample_with_{decoder}", *(item | c for c in choices)), strict=True
    ):
        frames, indices = outcome.value["frames"], outcome.value["indices"]
        assert frames.dtype == np.uint8
        assert frames.shape == (choice["crops"], choice["count"], *2 * (choice["crop"],), 3)
        expected = frame_indices(50, choice["step"], choice["count"], choice["crops"])
        assert (indices == expected).all()
        assert (numbers_of(frames) == expected).all()


@pytest.mark.parametrize("decoder", BOTH)
@pytest.mark.parametrize(("height", "width"), [(64, 96), (96, 64)])
def test_crop_is_the_centre_and_colours_are_rgb(
    tmp_path: Path, decoder: str, height: int, width: int
) -> None:
    """A red square of half the shorter side in the middle of blue fills a crop of that size."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[...] = (0, 0, 220)
    y, x = height // 2, width // 2
    picture[y - 16 : y + 16, x - 16 : x + 16] = (220, 0, 0)
    path = write_video(tmp_path / "square.avi", np.stack([picture] * 4), codec="MJPG")
    item = {"path": str(path), "frames": 4, "step": 1, "count": 2, "crops": 1, **SPREAD}
    item["short_side"] = 128
    inside, wider = (
        outcome.value["frames"][0, 0].astype(int)
        for outcome in run(f"sample_with_{decoder}", item | {"crop": 56}, item | {"crop": 128})
    )
    assert (abs(inside - (220, 0, 0)) < 40).all()
    assert (abs(wider[36:92, 36:92] - (220, 0, 0)) < 40).all()
    assert (abs(wider[:28] - (0, 0, 220)) < 40).all()
    assert (abs(wider[:, -28:] - (0, 0, 220)) < 40).all()


@pytest.mark.parametrize(("height", "width"), [(48, 96), (96, 48)])
def test_fair_cuts_three_squares_along_the_longer_side(height: int, width: int) -> None:
    """Red, green and blue of a third each: the ends show one colour, the middle the middle one."""
    long = np.repeat(np.eye(3, dtype=np.uint8) * 240, 32, axis=0)
    picture = np.broadcast_to(long[None] if width > height else long[:, None], (height, width, 3))
    squares = SQUARES["fair"](picture, 24, 24)
    assert squares.shape == (3, 24, 24, 3) and (picture.shape[0] == 48) == (width > height)
    along = squares.mean(1 if width > height else 2)
    assert (along[0, :15].argmax(1) == 0).all() and (along[2, -15:].argmax(1) == 2).all()
    assert (along[1, 5:-5].argmax(1) == 1).all()
    np.testing.assert_array_equal(squares[1], SQUARES["spread"](picture, 24, 24)[0])


def test_the_release_scales_the_whole_centre_square() -> None:
    """Numbers of its CenterCropScaled, on a picture made by a formula."""
    rows, columns = np.mgrid[:251, :334]
    colours = [np.sin(rows * 0.11 + columns * 0.07 * k) for k in (1, 2, 3)]
    picture = (127.5 + 127 * np.stack(colours, -1)).astype(np.uint8)
    (square,) = SQUARES["release"](picture, 224, 224)
    assert square.shape == (224, 224, 3)
    assert square[[0, 100, 223], [0, 50, 223]].tolist() == RELEASED_PIXELS
    assert square.mean() == pytest.approx(RELEASED_MEAN, abs=1e-6)
    other = SQUARES["spread"](picture, 224, 224)[0]
    assert (other != square).any()  # half a pixel aside


def test_views_of_a_crop_stand_together(counting: Path) -> None:
    item = {"path": str(counting), "frames": 50, "step": 3, "count": 4, "crops": 2}
    item |= {"short_side": 32, "crop": 32, "preprocessing": "fair", "fps": 30.0}
    (outcome,) = run("sample_with_opencv", item)
    frames, indices = outcome.value["frames"], outcome.value["indices"]
    assert frames.shape == (6, 4, 32, 32, 3)
    assert (numbers_of(frames) == np.repeat(indices, 3, axis=0)).all()


@pytest.mark.parametrize("decoder", BOTH)
def test_a_file_with_fewer_frames_than_known_is_refused(counting: Path, decoder: str) -> None:
    (outcome,) = run(f"sample_with_{decoder}", {"path": str(counting), "frames": 60, **X3D})
    assert outcome.rule == "frames_missing" and "number 59" in outcome.message


def test_both_decoders_give_the_same_pixels_of_real_videos() -> None:
    """Also without time stamps, where decord's own seeking gives other frames."""
    root = shared_path("videos")
    clips = {
        "hmdb51/wave/TrumanShow_wave_f_nm_np1_fr_med_26.avi": 48,
        "ucf101/ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c02.avi": 123,
        "kinetics400/using segway/R6llTwEh07w.mp4": 303,
        "other/flipping_a_pancake.mkv": 310,
    }
    small = X3D | {"short_side": 80, "crop": 64}
    items = [{"path": str(root / name), "frames": n, **small} for name, n in clips.items()]
    sides = [run(f"sample_with_{decoder}", *items) for decoder in BOTH]
    for name, one, other in zip(clips, *sides, strict=True):
        assert (one.value["frames"] == other.value["frames"]).all(), name
        assert len({frame.tobytes() for crop in one.value["frames"] for frame in crop}) > 10


def test_rotated_videos_come_upright_from_both() -> None:
    items = [
        {"path": str(shared_path(f"videos/edge_cases/video_{angle}.mov")), "frames": 3, **X3D}
        for angle in (0, 90, 180, 270)
    ]
    for one, other in zip(*(run(f"sample_with_{d}", *items) for d in BOTH), strict=True):
        difference = one.value["frames"].astype(int) - other.value["frames"]
        assert abs(difference).mean() < 2
