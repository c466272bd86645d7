"""One raw image file to one picture: 8-bit RGB of its final size, encoded (docs/semantic.md, 4).

Enters: a path and how the picture is to be. Leaves: what the file is, what had to be converted, the
encoded bytes and a thumbnail, or a RecordError. `read_pictures` runs in a child process
(`tasks.ingest.native.pool`).

The shorter side is scaled to `side` and the middle square kept, in one step: only that square is
resampled, so an image of 1 x 50,000 pixels costs no more than any other. What the file is comes
from its content, never from its suffix, and only the formats below are tried.
"""

import hashlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schemas.errors import RecordError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
SUFFIXES = {
    ".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".bmp": "bmp", ".gif": "gif", ".tif": "tiff",
    ".tiff": "tiff", ".webp": "webp", ".ppm": "ppm", ".pgm": "ppm",
}  # fmt: skip
ORIENTATION = 0x0112
TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
    7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
THUMBNAIL_QUALITY = 85
ENCODED = ("data", "thumbnail")
DEEP_MODES = ("I;16", "I;16B", "I;16L", "I")


def read_picture(item: dict[str, Any], out: Path) -> dict[str, Any]:
    """`item`: path, suffix (of the raw name), side (None keeps the size), encoding, quality,
    thumbnail (its longer side), max_pixels."""
    try:
        raw = Path(item["path"]).read_bytes()
    except OSError as error:
        raise RecordError("unreadable", f"cannot be read: {error.strerror}") from None
    if not raw:
        raise RecordError("empty_file", "the file is empty")
    image, image_format, deep = _opened(raw, item["max_pixels"])
    width, height = image.size
    notes = []
    if (expected := SUFFIXES.get(item["suffix"])) != image_format:
        notes.append(f"{image_format} under the suffix of {expected or 'no image'}")
    mode = image.mode
    picture, more = _as_rgb(image, deep)
    if item["side"] is not None:
        picture = cut_square(picture, item["side"])
    return {
        "width": width,
        "height": height,
        "format": image_format,
        "mode": mode,
        "converted": "; ".join(notes + more) or None,
        "digest": hashlib.sha256(raw).hexdigest(),
        **encoded(picture, item["encoding"], item["quality"], item["thumbnail"]),
    }


def read_pictures(item: dict[str, Any], out: Path) -> dict[str, Any]:
    """`read_picture` of each of `item["images"]`: one answer for many images costs much less.

    `results` has the facts of each image, or the rule it broke and a message. `data` has each
    picture that was read, followed by its thumbnail.
    """
    results: list[dict[str, Any]] = []
    data: list[bytes] = []
    for image in item["images"]:
        try:
            value = read_picture(image, out)
        except RecordError as error:
            results.append({"rule": error.rule, "message": error.message})
            continue
        encodings = [value.pop(name) for name in ENCODED]
        data += encodings
        results.append(value | {"bytes": [len(one) for one in encodings]})
    return {"results": results, "data": b"".join(data)}


def _opened(raw: bytes, max_pixels: int) -> tuple["Image", str, bool]:
    """The whole first frame, decoded, its format, and whether the file has 16 bits a channel.

    Its size is known before it is decoded.
    """
    from PIL import UnidentifiedImageError

    with _own_limit() as open_image:
        try:
            image = open_image(io.BytesIO(raw), formats=FORMATS)
        except UnidentifiedImageError:
            raise RecordError("not_an_image", f"no known image: begins with {raw[:12]!r}") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise RecordError("damaged_image", f"its header cannot be read: {error}") from None
        width, height = image.size
        if width * height > max_pixels:
            message = f"declares {width} x {height} pixels, expected at most {max_pixels} in all"
            raise RecordError("too_many_pixels", message)
        deep = _is_deep(image)
        try:
            image.load()
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise RecordError("damaged_image", f"cannot be decoded: {error}") from None
    image_format = (image.format or "").lower()
    if image_format == "mpo":  # a JPEG followed by others
        image_format = "jpeg"
    return image, image_format, deep


def _is_deep(image: "Image") -> bool:
    """Pillow cuts 16 bits to 8 when it decodes; only before that does `tile` show it."""
    tiles = [(tile[0], tile[3]) for tile in getattr(image, "tile", ())]
    if image.format == "PPM":  # ("ppm", (channels, largest value))
        return any(codec.startswith("ppm") and args[-1] > 255 for codec, args in tiles)
    return image.format in ("PNG", "TIFF") and any(";16" in str(args) for _, args in tiles)


@contextmanager
def _own_limit() -> Iterator[Callable[..., "Image"]]:
    """Without Pillow's limit and warnings: our own limit names its rule for the quarantine."""
    from PIL import Image

    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield Image.open
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _as_rgb(image: "Image", deep: bool) -> tuple["Image", list[str]]:
    from PIL import Image

    notes = []
    if (frames := getattr(image, "n_frames", 1)) > 1:
        notes.append(f"first of {frames} frames")
    try:
        turn = image.getexif().get(ORIENTATION)
    except Exception:  # whatever is wrong with the notes, the picture itself was read
        turn = None
        notes.append("unreadable EXIF passed over")
    if turn in TURNS:
        image = image.transpose(Image.Transpose[TURNS[turn]])
        notes.append(f"turned by EXIF orientation {turn}")
    if image.mode in DEEP_MODES:
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise RecordError("too_deep", "values need more than 16 bits, expected 8 or 16")
        image = Image.fromarray((values >> 8).astype(np.uint8))
        notes.append("16 bits a channel")
    elif image.mode == "F":
        raise RecordError("too_deep", "pixels are floating-point numbers, expected 8 or 16 bits")
    elif deep:
        notes.append("16 bits a channel")
    if image.mode != "RGB":
        alpha = image.mode in ("LA", "PA", "RGBA", "RGBa", "La") or "transparency" in image.info
        notes.append(f"{image.mode} to RGB" + (", transparency dropped" if alpha else ""))
        image = image.convert("RGB")
    return image, notes


def cut_square(image: "Image", side: int, filter_name: str = "BILINEAR") -> "Image":
    """Shorter side to `side`, smoothed (bilinear with antialias), and the middle square of it."""
    from PIL import Image

    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    box = (left, top, left + short, top + short)
    if image.size == (side, side):
        return image
    return image.resize((side, side), Image.Resampling[filter_name], box=box)


def encoded(picture: "Image", encoding: str, quality: int, thumbnail: int) -> dict[str, Any]:
    """A picture of its final size and its thumbnail: the size and the bytes of both."""
    small = picture.copy()
    small.thumbnail((thumbnail, thumbnail))
    return {
        "size": list(picture.size),
        "data": encode(picture, encoding, quality),
        "thumbnail_size": list(small.size),
        "thumbnail": encode(small, "jpeg", THUMBNAIL_QUALITY),
    }


def encode(image: "Image", encoding: str, quality: int) -> bytes:
    buffer = io.BytesIO()
    if encoding == "png":
        image.save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
