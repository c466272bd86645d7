"""Any image file becomes 8-bit RGB of the right size, or a refusal with its reason."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from schemas.errors import RecordError
from schemas.semantic import PictureSettings
from tasks.semantic import ingest
from tasks.semantic.pictures import cut_square, read_picture

HOW = {"side": None, "encoding": "png", "quality": 95, "thumbnail": 64, "max_pixels": 1 << 20}


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def read(tmp_path: Path, data: bytes, suffix: str = ".jpg", **how):
    path = tmp_path / "raw"
    path.write_bytes(data)
    return read_picture({"path": str(path), "suffix": suffix, **HOW, **how}, tmp_path)


def pixels(value) -> np.ndarray:
    image = Image.open(io.BytesIO(value["data"]))
    assert image.mode == "RGB" and list(image.size) == value["size"]
    return np.asarray(image)


def ramp(width: int = 40, height: int = 20) -> Image.Image:
    """Red grows to the right, green grows downward."""
    red = np.linspace(0, 255, width).astype(np.uint8)[None].repeat(height, 0)
    green = np.linspace(0, 255, height).astype(np.uint8)[:, None].repeat(width, 1)
    return Image.fromarray(np.stack([red, green, np.full_like(red, 90)], 2))


def test_a_plain_image_keeps_every_pixel(tmp_path):
    found = read(tmp_path, saved(ramp(), "PNG"), ".png")
    assert (found["width"], found["height"], found["format"], found["mode"]) == (
        40,
        20,
        "png",
        "RGB",
    )
    assert found["converted"] is None and np.array_equal(pixels(found), np.asarray(ramp()))


CONVERTED = {
    "grey": (saved(ramp().convert("L"), "JPEG"), ".jpg", "L to RGB"),
    "cmyk": (saved(ramp().convert("CMYK"), "JPEG"), ".jpg", "CMYK to RGB"),
    "palette": (saved(ramp().convert("P"), "PNG"), ".png", "P to RGB"),
    "alpha": (saved(ramp().convert("RGBA"), "PNG"), ".png", "RGBA to RGB, transparency dropped"),
    "suffix": (saved(ramp(), "PNG"), ".jpeg", "png under the suffix of jpeg"),
    "bilevel": (saved(ramp().convert("1"), "PNG"), ".png", "1 to RGB"),
    "frames": (
        saved(ramp(), "TIFF", save_all=True, append_images=[ramp()]),
        ".tif",
        "first of 2 frames",
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_unusual_images_are_converted_and_say_so(name, tmp_path):
    data, suffix, note = CONVERTED[name]
    found = read(tmp_path, data, suffix)
    assert found["converted"] == note
    assert pixels(found).shape == (20, 40, 3)


def test_a_jpeg_in_cmyk_has_the_colours_of_the_rgb_one(tmp_path):
    found = pixels(read(tmp_path, CONVERTED["cmyk"][0])).astype(int)
    assert np.abs(found - np.asarray(ramp()).astype(int)).mean() < 6


def test_sixteen_bits_keep_the_high_byte(tmp_path):
    values = np.arange(800, dtype=np.uint16).reshape(20, 40) * 80
    found = read(tmp_path, saved(Image.fromarray(values), "PNG"), ".png")
    assert found["converted"] == "16 bits a channel; L to RGB" and found["mode"] == "I;16"
    assert np.array_equal(pixels(found)[..., 1], values >> 8)


def deep_colours(kind: str) -> bytes:
    """DEEP as a file of that kind with 16 bits a channel, which Pillow cannot write."""
    import cv2

    ok, data = cv2.imencode(kind, DEEP[..., ::-1])
    assert ok
    return data.tobytes()


DEEP = (np.arange(2400, dtype=np.uint16) * 27).reshape(20, 40, 3)


@pytest.mark.parametrize("kind", [".png", ".tif", ".ppm"])
def test_colours_of_sixteen_bits_say_that_they_were_cut(kind, tmp_path):
    found = read(tmp_path, deep_colours(kind), kind)
    assert found["converted"] == "16 bits a channel" and found["mode"] == "RGB"
    assert np.abs(pixels(found).astype(int) - (DEEP >> 8)).max() <= 1


def test_a_bitmap_of_sixteen_bits_a_pixel_has_no_deep_channels(tmp_path):
    masks = struct.pack("<III", 0xF800, 0x7E0, 0x1F)
    header = struct.pack("<IiiHHIIiiII", 40, 4, 4, 1, 16, 3, 32, 0, 0, 0, 0) + masks
    data = b"BM" + struct.pack("<IHHI", 14 + len(header) + 32, 0, 0, 14 + len(header)) + header
    assert read(tmp_path, data + bytes(range(32)), ".bmp")["converted"] is None


@pytest.mark.parametrize("size, small", [((400, 100), (64, 16)), ((32, 32), (32, 32))])
def test_the_thumbnail_is_never_larger(size, small, tmp_path):
    found = read(tmp_path, saved(ramp(*size), "PNG"), ".png")
    thumbnail = Image.open(io.BytesIO(found["thumbnail"]))
    assert thumbnail.format == "JPEG" and thumbnail.size == small
    assert found["thumbnail_size"] == list(small) and found["size"] == list(size)


# What EXIF says, and which corner of the stored picture is then at the top left.
TURNS = {
    1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (-1, 0), 7: (-1, -1), 8: (0, -1),
}  # fmt: skip


@pytest.mark.parametrize("turn", TURNS)
def test_exif_turns_the_picture(turn, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = turn
    found = read(tmp_path, saved(ramp(), "PNG", exif=exif), ".png")
    stored = np.asarray(ramp())
    assert np.array_equal(pixels(found)[0, 0], stored[TURNS[turn]])
    assert found["size"] == ([20, 40] if turn >= 5 else [40, 20])
    assert (found["width"], found["height"]) == (40, 20)
    assert found["converted"] == (None if turn == 1 else f"turned by EXIF orientation {turn}")


def test_broken_exif_does_not_cost_the_picture(tmp_path):
    exif = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\1\x12"
    found = read(tmp_path, saved(ramp(), "JPEG", exif=exif))
    assert pixels(found).shape == (20, 40, 3)


def bomb(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


REFUSED = {
    "empty": (b"", "empty_file"),
    "text": (b"<html>sign in to download</html>", "not_an_image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not_an_image"),
    "cut jpeg": (saved(ramp(400, 300), "JPEG")[:2500], "damaged_image"),
    "cut png": (saved(ramp(), "PNG")[:60], "damaged_image"),
    "bomb": (bomb(60_000, 60_000), "too_many_pixels"),
    "lying png": (bomb(400, 400), "damaged_image"),
    "floats": (saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "too_deep"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_files_are_refused_with_a_reason(name, tmp_path):
    data, rule = REFUSED[name]
    with pytest.raises(RecordError) as caught:
        read(tmp_path, data)
    assert caught.value.rule == rule and caught.value.message


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"\xff\xd8\xff\xe0", b"GIF89a"]))
def test_random_bytes_are_a_picture_or_a_refusal(tmp_path_factory, data, start):
    try:
        read(tmp_path_factory.mktemp("random"), start + data)
    except RecordError as error:
        assert error.rule in ("empty_file", "not_an_image", "damaged_image", "too_many_pixels")


# ---------------------------------------------------------------- size


@pytest.mark.parametrize(
    "size", [(500, 375), (375, 500), (160, 170), (256, 256), (3, 4000)], ids=str
)
def test_the_middle_square_at_the_shorter_side(size, tmp_path):
    found = read(tmp_path, saved(ramp(*size), "PNG"), ".png", side=256)
    cut = pixels(found).astype(float)
    assert found["size"] == [256, 256] and (found["width"], found["height"]) == size
    # The ramp of the longer side is centred: its middle is half way, its ends are cut evenly.
    channel = 0 if size[0] >= size[1] else 1
    assert abs(cut[..., channel].mean() - 127) < 1.5
    share = min(size) / max(size)
    assert abs(np.ptp(cut[..., channel]) - 255 * share) < 12


def test_resize_then_crop_gives_the_same_picture():
    image = ramp(500, 375)
    plain = image.resize((341, 256), Image.Resampling.BILINEAR).crop((42, 0, 298, 256))
    ours = cut_square(image, 256)
    assert np.abs(np.asarray(plain).astype(int) - np.asarray(ours).astype(int)).max() <= 2


def test_a_square_of_that_side_is_left_alone():
    image = ramp(64, 64)
    assert cut_square(image, 64) is image


def test_jpeg_is_smaller_than_png(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    sizes = {
        kind: len(read(tmp_path, saved(noise, "PNG"), ".png", encoding=kind, quality=60)["data"])
        for kind in ("png", "jpeg")
    }
    assert sizes["jpeg"] < sizes["png"] / 2


# ---------------------------------------------------------------- children


def deadly(item, out):
    """Stands for a decoder that crashes on one image: the whole child dies."""
    from tasks.semantic import pictures

    if any(Path(image["path"]).read_bytes() == b"deadly" for image in item["images"]):
        os._exit(11)
    return pictures.read_pictures(item, out)


def test_an_image_that_kills_its_decoder_costs_itself_only(tmp_path, monkeypatch):
    run = ingest.run_batch
    monkeypatch.setattr(
        ingest, "run_batch", lambda _, *rest, **more: run(f"{__name__}:deadly", *rest, **more)
    )
    items = []
    for number in range(40):
        path = tmp_path / f"{number}.png"
        path.write_bytes(b"deadly" if number == 5 else saved(ramp(8, 8), "PNG"))
        items.append({"path": str(path), "suffix": ".png", **HOW})
    found = list(ingest._decoded(items, PictureSettings()))
    assert [value.get("rule") for value in found] == [
        "native_crash" if number == 5 else None for number in range(40)
    ]
    assert all(value["size"] == [8, 8] for value in found if "rule" not in value)
