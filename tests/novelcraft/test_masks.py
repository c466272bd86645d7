"""Run lengths, agreement, boxes and PNG of masks."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from schemas.errors import RecordError
from tasks.novelcraft.masks import (
    MAX_PIXELS,
    bounding_box,
    decode_png,
    decode_runs,
    encode_png,
    encode_runs,
    mask_iou,
)

MASKS = arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=12))
ORDERS = st.sampled_from(["column", "row"])


@given(MASKS, ORDERS)
def test_runs_give_the_mask_back(mask: np.ndarray, order: str) -> None:
    runs = encode_runs(mask, order)
    assert runs.dtype == np.uint32
    assert runs.sum() == mask.size
    assert runs[1::2].sum() == mask.sum()
    assert (runs[1:] > 0).all(), "only the first run may be empty"
    assert np.array_equal(decode_runs(runs, mask.shape, order), mask)


def test_runs_are_those_of_coco() -> None:
    mask = np.array([[0, 1, 1], [0, 1, 0]], bool)
    assert encode_runs(mask).tolist() == [2, 3, 1]
    assert encode_runs(mask, "row").tolist() == [1, 2, 1, 1, 1]
    assert encode_runs(~mask).tolist() == [0, 2, 3, 1]
    assert encode_runs(np.zeros((2, 3), bool)).tolist() == [6]
    assert encode_runs(np.ones((2, 3), bool)).tolist() == [0, 6]


@pytest.mark.parametrize("runs", [[5], [7], [], [-1, 7], [[6]], [1 << 31, 1 << 31]])
def test_runs_that_make_no_mask(runs: list) -> None:
    with pytest.raises(RecordError) as caught:
        decode_runs(np.array(runs), (2, 3))
    assert caught.value.rule == "run_lengths"


def test_a_huge_mask_is_refused_before_it_is_made() -> None:
    with pytest.raises(RecordError):
        decode_runs(np.array([MAX_PIXELS * 4]), (MAX_PIXELS * 2, 2))


@given(st.data())
def test_agreement(data: st.DataObject) -> None:
    shape = data.draw(array_shapes(min_dims=2, max_dims=2, max_side=8))
    one, other = (data.draw(arrays(bool, shape)) for _ in range(2))
    iou = float(mask_iou(one, other))
    assert 0.0 <= iou <= 1.0
    assert iou == float(mask_iou(other, one))
    assert (iou == 1.0) == np.array_equal(one, other)
    stack = mask_iou(np.stack([one, one]), np.stack([other, one]))
    assert stack.tolist() == [iou, 1.0]


def test_two_empty_masks_agree() -> None:
    empty = np.zeros((3, 3), bool)
    assert mask_iou(empty, empty) == 1.0
    assert mask_iou(empty, ~empty) == 0.0


@given(MASKS)
def test_bounding_box(mask: np.ndarray) -> None:
    box = bounding_box(mask)
    if box is None:
        assert not mask.any()
        return
    x0, y0, x1, y1 = box
    outside = mask.copy()
    outside[y0:y1, x0:x1] = False
    assert not outside.any()
    inside = mask[y0:y1, x0:x1]
    assert inside[0].any() and inside[-1].any() and inside[:, 0].any() and inside[:, -1].any()


@given(MASKS)
def test_png_gives_the_mask_back(mask: np.ndarray) -> None:
    data = encode_png(mask)
    assert encode_png(mask) == data
    assert np.array_equal(decode_png(data), mask)


def test_png_threshold() -> None:
    import cv2

    grey = np.array([[0, 127, 128, 255]], np.uint8)
    data = cv2.imencode(".png", grey)[1].tobytes()
    assert decode_png(data).tolist() == [[False, False, True, True]]
    colour = cv2.imencode(".png", np.repeat(grey[..., None], 3, axis=2))[1].tobytes()
    assert decode_png(colour).tolist() == [[False, False, True, True]]


def huge_png(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "png_header"),
        (b"GIF89a" + b"\0" * 40, "png_header"),
        (huge_png(1 << 20, 1 << 20), "png_size"),
        (huge_png(0, 5), "png_size"),
        (huge_png(5, 5), "png_decode"),
    ],
)
def test_what_is_no_mask(data: bytes, rule: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode_png(data)
    assert caught.value.rule == rule
