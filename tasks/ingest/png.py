"""Is this a whole PNG, and how large is the picture? Checked without trusting an image decoder.

Enters: file bytes. Leaves: (width, height). Signature, chunk checksums, end mark and the exact
length of the pixel data are verified; decompression stops at that length, so a bomb costs nothing.
"""

import struct
import zlib

from schemas.errors import RecordError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
MAX_PIXELS = 64 << 20


def check_png(data: bytes) -> tuple[int, int]:
    """Width and height; RecordError says what is wrong otherwise."""
    if not data.startswith(SIGNATURE):
        raise RecordError("png_signature", f"not a PNG: begins with {data[:8]!r}")
    place, header, compressed, ended = len(SIGNATURE), None, [], False
    view = memoryview(data)
    while place + 12 <= len(data) and not ended:
        length, kind = struct.unpack_from(">I4s", data, place)
        body = view[place + 8 : place + 8 + length]
        if len(body) < length or place + 12 + length > len(data):
            break
        (checksum,) = struct.unpack_from(">I", data, place + 8 + length)
        if zlib.crc32(view[place + 4 : place + 8 + length]) != checksum:
            raise RecordError(
                "png_checksum", f"chunk {kind!r} at byte {place} has a wrong checksum"
            )
        if kind == b"IHDR" and length == 13:
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            compressed.append(body)
        ended = kind == b"IEND"
        place += 12 + length
    if header is None:
        raise RecordError("png_header", "the PNG has no IHDR chunk")
    if not ended:
        raise RecordError(
            "png_truncated", f"the PNG ends after {len(data)} bytes without an end mark"
        )
    width, height, depth, colour, _, _, interlace = header
    if not 0 < width * height <= MAX_PIXELS or colour not in CHANNELS:
        raise RecordError(
            "png_header", f"the PNG claims {width}x{height} pixels, colour type {colour}"
        )
    if not interlace:
        pixels = compressed[0] if len(compressed) == 1 else b"".join(compressed)
        _check_pixels(pixels, height * (1 + (width * CHANNELS[colour] * depth + 7) // 8))
    return width, height


def _check_pixels(compressed: bytes | memoryview, expected: int) -> None:
    inflater = zlib.decompressobj()
    try:
        pixels = inflater.decompress(compressed, expected + 1)
    except zlib.error as error:
        raise RecordError("png_pixels", f"the PNG's pixel data is damaged: {error}") from None
    if len(pixels) != expected:
        count = len(pixels) if len(pixels) < expected else "more"
        raise RecordError("png_pixels", f"the PNG has {count} bytes of pixels, expected {expected}")
