"""Archives that mean harm or were harmed: each is refused with the member and the reason named.

Built here with zipfile and tarfile, then patched byte by byte where those would not write it.
"""

import gzip
import io
import os
import random
import re
import resource
import stat
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import ArchiveError, RecordError, SourceError
from storage.archives import ArchiveLimits, TarArchive, ZipArchive, extract
from storage.raw import open_raw

RANDOM = random.Random(1)
GOOD = {"one.txt": b"first " * 100, "two.bin": RANDOM.randbytes(5000), "three.txt": b"3" * 999}
MEGABYTE = 1 << 20


def zip_bytes(files: dict[str, bytes] | list[tuple[zipfile.ZipInfo | str, bytes]]) -> bytearray:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            archive.writestr(name, data)
    return bytearray(buffer.getvalue())


def tar_info(name: str, size: int = 0, **fields) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes], format=tarfile.PAX_FORMAT) -> bytearray:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return bytearray(buffer.getvalue())


def good_tar() -> bytearray:
    return tar_bytes(*((tar_info(name, len(data)), data) for name, data in GOOD.items()))


def local(data: bytearray, name: str) -> int:
    return data.index(name.encode()) - 30


def central(data: bytearray, name: str) -> int:
    return data.rindex(name.encode()) - 46


def refuse(tmp_path: Path, name: str, data: bytes, match: str, limits=None) -> None:
    """Refused by reading everything and by unpacking, and nothing is left outside or inside."""
    # Two levels down, so that what climbs out lands in a folder that is this test's alone.
    box = tmp_path / "outer" / "box"
    box.mkdir(parents=True, exist_ok=True)
    path = box / name
    path.write_bytes(data)
    options = {} if limits is None else {"limits": limits}
    before = sorted(tmp_path.rglob("*"))
    opener = ZipArchive if name.endswith(".zip") else TarArchive
    with pytest.raises(ArchiveError) as caught:
        archive = opener(path, **options)
        for member in archive.members:
            archive.read(member)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    # The folder is named after the test, and must not be what matches.
    assert re.search(match, said.removeprefix(f"{path}: ")), said
    with pytest.raises(ArchiveError):
        extract(path, box / "into", **options)
    assert sorted(tmp_path.rglob("*")) == before


BAD_NAMES = [
    ("../x", "'../x'.*traversal"),
    ("a/../../x", "traversal"),
    ("a/..", "traversal"),
    ("..\\x", "traversal"),
    ("/etc/x", "'/etc/x'.*absolute"),
    ("//x", "absolute"),
    ("C:\\x", "absolute"),
    ("c:/x", "absolute"),
    ("C:x", "absolute"),
    ("\\\\host\\x", "absolute"),
    ("a\\b", "backslash"),
    (".", "without a name"),
]


@pytest.mark.parametrize(("name", "reason"), BAD_NAMES)
def test_names_that_lead_elsewhere(tmp_path, name, reason):
    refuse(tmp_path, "a.zip", zip_bytes({"good": b"1", name: b"2"}), reason)
    data = tar_bytes((tar_info("good", 1), b"1"), (tar_info(name, 1), b"2"))
    refuse(tmp_path, "a.tar", data, reason)


@pytest.mark.parametrize("name", ["../", "/etc/", "a/../../b/"])
def test_folders_that_lead_elsewhere(tmp_path, name):
    refuse(tmp_path, "a.zip", zip_bytes({name: b""}), "traversal|absolute")
    refuse(
        tmp_path, "a.tar", tar_bytes((tar_info(name, type=tarfile.DIRTYPE), b"")), "traversal|absol"
    )


def test_zip_name_with_nul(tmp_path):
    data = zip_bytes({"image.png/evil.sh": b"x"})
    for at in (local(data, "image.png/") + 30, central(data, "image.png/") + 46):
        data[at + 9] = 0
    refuse(tmp_path, "a.zip", data, r"image.png\\x00evil.sh.*NUL")


def test_tar_name_with_nul(tmp_path):
    data = tar_bytes((tar_info("x", 1, pax_headers={"path": "image.png/evil.sh"}), b"x"))
    at = data.index(b"image.png/") + 9
    data[at] = 0
    refuse(tmp_path, "a.tar", data, "NUL")


def test_tar_name_that_is_not_utf8(tmp_path):
    info = tar_info("caf\udce9", 1)
    data = tar_bytes((info, b"x"), format=tarfile.GNU_FORMAT)
    refuse(tmp_path, "a.tar", data, "not UTF-8")


def test_zip_name_that_is_not_utf8(tmp_path):
    data = zip_bytes({"é": b"x"})
    for at in (local(data, "é") + 30, central(data, "é") + 46):
        data[at] = 0xFF
    refuse(tmp_path, "a.zip", data, "not a whole zip")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK])
def test_zip_links_and_devices(tmp_path, kind):
    info = zipfile.ZipInfo("link")
    info.external_attr = (kind | 0o777) << 16
    data = zip_bytes([(info, b"/etc/passwd")])
    reason = "symbolic link" if kind == stat.S_IFLNK else "not a regular file"
    refuse(tmp_path, "a.zip", data, f"'link'.*{reason}")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (tarfile.SYMTYPE, "symbolic link to '../../etc'"),
        (tarfile.LNKTYPE, "hard link to '../../etc'"),
        (tarfile.CHRTYPE, "not a regular file"),
        (tarfile.BLKTYPE, "not a regular file"),
        (tarfile.FIFOTYPE, "not a regular file"),
        (b"V", "not a regular file"),
    ],
)
def test_tar_links_and_devices(tmp_path, kind, reason):
    data = tar_bytes((tar_info("link", type=kind, linkname="../../etc"), b""))
    refuse(tmp_path, "a.tar", data, f"'link'.*{reason}")


def test_tar_link_then_file_through_it(tmp_path):
    link = tar_info("d", type=tarfile.SYMTYPE, linkname=str(tmp_path / "outside"))
    (tmp_path / "outside").mkdir()
    refuse(tmp_path, "a.tar", tar_bytes((link, b""), (tar_info("d/x", 1), b"x")), "symbolic link")


def test_tar_sparse_file(tmp_path):
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "holes"}
    headers["GNU.sparse.realsize"] = str(1 << 40)
    data = tar_bytes((tar_info("x", 512, pax_headers=headers), b"1\n0\n1\n".ljust(512, b"\0")))
    refuse(tmp_path, "a.tar", data, "sparse")


@pytest.mark.parametrize("second", ["x", "./x"])
def test_two_members_of_one_name(tmp_path, second):
    with pytest.warns(UserWarning) if second == "x" else _nothing():
        data = zip_bytes([("x", b"1"), (second, b"2")])
    refuse(tmp_path, "a.zip", data, "'x'.*two members of this name")
    data = tar_bytes((tar_info("x", 1), b"1"), (tar_info(second, 1), b"2"))
    refuse(tmp_path, "a.tar", data, "'x'.*two members of this name")


class _nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def test_names_that_differ_in_case_only_are_two_files(tmp_path):
    (tmp_path / "a.zip").write_bytes(zip_bytes({"x": b"1", "X": b"2"}))
    assert set(ZipArchive(tmp_path / "a.zip").members) == {"x", "X"}


def test_a_file_that_is_a_folder_too(tmp_path):
    refuse(tmp_path, "a.zip", zip_bytes({"a/b": b"1", "a/b/c": b"2"}), "'a/b'.*file and a folder")
    refuse(tmp_path, "b.zip", zip_bytes({"a/b/c/d": b"1", "a": b"2"}), "'a'.*file and a folder")
    data = tar_bytes((tar_info("a", 1), b"1"), (tar_info("a/b", 1), b"2"))
    refuse(tmp_path, "a.tar", data, "'a'.*file and a folder")


def test_ratio_bomb(tmp_path):
    bomb = bytes(2 * MEGABYTE)
    refuse(tmp_path, "a.zip", zip_bytes({"ok": b"1", "bomb": bomb}), "'bomb'.*ratio")
    noise = RANDOM.randbytes(MEGABYTE)
    plain = tar_bytes((tar_info("ok", len(noise)), noise), (tar_info("bomb", len(bomb)), bomb))
    refuse(tmp_path, "a.tar.gz", gzip.compress(plain), "'bomb'.*ratio")


def test_text_that_packs_well_is_no_bomb(tmp_path):
    rows = "".join(
        f'{{"x": {i // 32}, "y": {i % 32}, "name": "minecraft:air"}},' for i in range(60000)
    )
    data = zip_bytes({"a.json": rows.encode()})
    assert 100 > len(rows) / len(data) > 15
    (tmp_path / "a.zip").write_bytes(data)
    assert ZipArchive(tmp_path / "a.zip").read("a.json") == rows.encode()


def test_many_small_bombs(tmp_path):
    files = {str(i): bytes(MEGABYTE) for i in range(5)}
    refuse(tmp_path, "a.zip", zip_bytes(files), "ratio")
    members = [(tar_info(name, len(data)), data) for name, data in files.items()]
    refuse(tmp_path, "a.tgz", gzip.compress(tar_bytes(*members)), "ratio")


def test_ratio_is_configurable(tmp_path):
    (tmp_path / "a.zip").write_bytes(zip_bytes({"zeros": bytes(2 * MEGABYTE)}))
    loose = ArchiveLimits(ratio=1100)
    assert ZipArchive(tmp_path / "a.zip", loose).read("zeros") == bytes(2 * MEGABYTE)
    refuse(tmp_path, "b.zip", zip_bytes(GOOD), "ratio", ArchiveLimits(ratio=1, ratio_above=100))


def test_zeros_after_the_end_of_a_tar_are_a_bomb_too(tmp_path):
    data = gzip.compress(bytes(good_tar()) + bytes(20 * MEGABYTE))
    refuse(tmp_path, "a.tar.gz", data, "ratio")


def test_total_size(tmp_path):
    total = sum(map(len, GOOD.values()))
    limits = ArchiveLimits(total_bytes=total - 1)
    refuse(tmp_path, "a.zip", zip_bytes(GOOD), f"{total} bytes unpacked", limits)
    refuse(tmp_path, "a.tar", good_tar(), f"'three.txt'.*{total} bytes unpacked", limits)


def test_too_many_members(tmp_path):
    limits = ArchiveLimits(members=2)
    refuse(tmp_path, "a.zip", zip_bytes(GOOD), "more than 2 members", limits)
    refuse(tmp_path, "a.tar", good_tar(), "more than 2 members", limits)
    folders = [(tar_info(f"{i}", type=tarfile.DIRTYPE), b"") for i in range(3)]
    refuse(tmp_path, "b.tar", tar_bytes(*folders), "more than 2 members", limits)


def test_too_many_zip_members_are_refused_before_they_are_parsed(tmp_path, monkeypatch):
    def parsed(*_):
        raise AssertionError("the directory was parsed")

    data = zip_bytes({f"{i}": b"" for i in range(3000)})
    monkeypatch.setattr(zipfile.ZipInfo, "_decodeExtra", parsed)
    limits = ArchiveLimits(members=2999)
    refuse(tmp_path, "a.zip", data, "more than 2999 members", limits)


@pytest.mark.parametrize("bit", [0x1, 0x40, 0x2000])
def test_zip_encrypted(tmp_path, bit):
    data = zip_bytes(GOOD)
    at = central(data, "two.bin") + 8
    data[at : at + 2] = struct.pack("<H", bit)
    refuse(tmp_path, "a.zip", data, "'two.bin'.*encrypted")
    data = zip_bytes(GOOD)
    at = local(data, "two.bin") + 6
    data[at : at + 2] = struct.pack("<H", bit)
    refuse(tmp_path, "b.zip", data, "'two.bin'.*encrypted")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_other_methods(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "x", "w", method) as archive:
        archive.writestr("a", b"a" * 1000)
    refuse(tmp_path, "a.zip", (tmp_path / "x").read_bytes(), f"'a'.*method {method}")


LOCAL_FIELDS = {
    "signature": (0, b"PK\3\5", "no local header"),
    "method": (8, b"\0\0", "another method"),
    "crc": (14, b"\1\2\3\4", "local .crc, packed, size."),
    "packed": (18, b"\1\2\0\0", "local .crc, packed, size."),
    "size": (22, b"\1\2\0\0", "local .crc, packed, size."),
    "zip64": (22, b"\xff\xff\xff\xff", "local .crc, packed, size."),
    "zeros": (14, bytes(12), "local .crc, packed, size."),
    "name_length": (26, b"\6\0", "name in the local header"),
    "name": (30, b"evil.sh", "name in the local header"),
    "extra_length": (28, b"\xff\xff", "overlaps"),
}


@pytest.mark.parametrize("field", LOCAL_FIELDS)
def test_zip_local_header_contradicts_the_directory(tmp_path, field):
    offset, value, reason = LOCAL_FIELDS[field]
    data = zip_bytes(GOOD)
    at = local(data, "two.bin") + offset
    assert data[at : at + len(value)] != value
    data[at : at + len(value)] = value
    refuse(tmp_path, "a.zip", data, f"'two.bin'.*header mismatch: .*{reason}")


@pytest.mark.parametrize("change", [-1, 1])
def test_zip_declared_size_is_not_trusted(tmp_path, change):
    data = zip_bytes(GOOD)
    size = struct.pack("<L", len(GOOD["one.txt"]) + change)
    for at in (local(data, "one.txt") + 22, central(data, "one.txt") + 24):
        data[at : at + 4] = size
    reason = "more than the declared" if change < 0 else "600 bytes, expected 601"
    refuse(tmp_path, "a.zip", data, f"'one.txt'.*{reason}")


def test_zip_declared_small_but_large_is_inflated_by_one_byte_only(tmp_path, monkeypatch):
    data = zip_bytes({"bomb": bytes(30 * MEGABYTE)})
    for at in (local(data, "bomb") + 22, central(data, "bomb") + 24):
        data[at : at + 4] = struct.pack("<L", 1000)
    inflated = []
    real = zlib.decompressobj

    class Counting:
        def __init__(self, *arguments):
            self._real = real(*arguments)

        def decompress(self, block, most):
            out = self._real.decompress(block, most)
            inflated.append(len(out))
            return out

        def __getattr__(self, name):
            return getattr(self._real, name)

    monkeypatch.setattr(zlib, "decompressobj", Counting)
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(ArchiveError, match=r"'bomb'.*more than the declared 1000"):
        ZipArchive(tmp_path / "a.zip").read("bomb")
    assert sum(inflated) == 1001


def test_zip_stored_sizes_must_agree(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", b"a" * 100)
    data = bytearray(buffer.getvalue())
    at = central(data, "a") + 24
    data[at : at + 4] = struct.pack("<L", 99)
    refuse(tmp_path, "a.zip", data, "'a'.*header mismatch: stored, 99 bytes")


def test_zip_wrong_checksum(tmp_path):
    data = zip_bytes(GOOD)
    for at in (local(data, "two.bin") + 14, central(data, "two.bin") + 16):
        data[at : at + 4] = b"\1\2\3\4"
    refuse(tmp_path, "a.zip", data, "'two.bin'.*checksum .*expected 04030201")


def test_zip_bytes_between_data_and_next_member(tmp_path):
    data = zip_bytes(GOOD)
    at = local(data, "two.bin")
    packed = struct.unpack_from("<L", data, local(data, "one.txt") + 18)[0] + 10
    data[at:at] = bytes(10)
    for position in (local(data, "one.txt") + 18, central(data, "one.txt") + 20):
        data[position : position + 4] = struct.pack("<L", packed)
    for name in ("two.bin", "three.txt"):
        position = central(data, name) + 42
        offset = struct.unpack_from("<L", data, position)[0] + 10
        data[position : position + 4] = struct.pack("<L", offset)
    end = len(data) - 22 + 16
    data[end : end + 4] = struct.pack("<L", struct.unpack_from("<L", data, end)[0] + 10)
    refuse(tmp_path, "a.zip", data, "'one.txt'.*bytes after its data")


def test_zip_two_names_for_one_place(tmp_path):
    data = zip_bytes({"aaa": b"x" * 1000, "bbb": b"y" * 1000})
    at = central(data, "bbb") + 42
    data[at : at + 4] = struct.pack("<L", 0)
    refuse(tmp_path, "a.zip", data, "overlaps")


def test_zip_member_that_quotes_the_next(tmp_path):
    """The core of a non-recursive bomb: one kernel of data, shared by many members."""
    data = zip_bytes({"aaa": b"", "bbb": RANDOM.randbytes(5000)})
    at, packed = local(data, "bbb"), struct.unpack_from("<L", data, local(data, "bbb") + 18)[0]
    for position in (local(data, "aaa") + 18, central(data, "aaa") + 20):
        data[position : position + 4] = struct.pack("<L", 30 + 3 + packed)
    assert at > 0
    refuse(tmp_path, "a.zip", data, "'aaa'.*overlaps")


def test_zip_member_over_the_directory(tmp_path):
    data = zip_bytes(GOOD)
    at = central(data, "three.txt") + 20
    data[at : at + 4] = struct.pack("<L", 60_000)
    refuse(tmp_path, "a.zip", data, "'three.txt'.*overlaps")


def test_zip_offset_outside_the_file(tmp_path):
    data = zip_bytes(GOOD)
    at = central(data, "three.txt") + 42
    data[at : at + 4] = struct.pack("<L", 0x7FFFFFFF)
    refuse(tmp_path, "a.zip", data, "overlaps")


def test_a_wrong_member_costs_one_record_not_the_source(tmp_path):
    data = zip_bytes(GOOD)
    data[local(data, "two.bin") + 100] ^= 1
    (tmp_path / "a.zip").write_bytes(data)
    source = open_raw(tmp_path / "a.zip")
    assert len(source.files()) == 3
    with pytest.raises(RecordError, match=r"a\.zip.*'two.bin'") as caught:
        source.read("two.bin")
    assert caught.value.rule == "damaged"
    assert source.read("three.txt") == GOOD["three.txt"]


def test_truncated_zip(tmp_path):
    data = zip_bytes(GOOD)
    for length in (0, 1, 30, len(data) // 2, len(data) - 23, len(data) - 1):
        refuse(tmp_path, "a.zip", data[:length], "not a whole zip|overlaps")


def test_truncated_tar_at_every_block(tmp_path):
    data = good_tar()
    end = len(data.rstrip(b"\0"))
    end += -end % 512
    for length in [1, 511, *range(512, end + 1, 512), end + 100]:
        refuse(tmp_path, "a.tar", data[:length], "truncated|damaged|end mark")
    (tmp_path / "a.tar").write_bytes(data[: end + 512])
    assert len(TarArchive(tmp_path / "a.tar").members) == 3


def test_truncated_gzip_at_every_place(tmp_path):
    data = gzip.compress(good_tar(), mtime=0)
    for length in range(1, len(data), 97):
        refuse(tmp_path, "a.tar.gz", data[:length], "truncated|damaged|end mark")
    refuse(tmp_path, "a.tar.gz", data[:-1], "truncated|damaged")


def test_tar_with_a_damaged_header_does_not_end_there(tmp_path):
    """tarfile would list the members before it and say nothing."""
    data = good_tar()
    data[data.index(b"two.bin") + 3] ^= 1
    refuse(tmp_path, "a.tar", data, "neither header nor end mark after member 'one.txt'")


def test_tar_after_the_end_of_a_tar(tmp_path):
    refuse(tmp_path, "a.tar", good_tar() + good_tar(), "neither header nor end mark")


def test_gzip_with_a_wrong_checksum(tmp_path):
    data = bytearray(gzip.compress(good_tar()))
    data[-6] ^= 1
    refuse(tmp_path, "a.tar.gz", data, "damaged.*incorrect data check")


def test_gzip_followed_by_something_else(tmp_path):
    refuse(tmp_path, "a.tar.gz", gzip.compress(good_tar()) + b"rubbish", "incorrect header")


def test_tar_data_that_changed_since_it_was_indexed(tmp_path):
    data = good_tar()
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    members = TarArchive(path).members.values()
    data[data.index(GOOD["two.bin"])] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match=r"'two.bin'.*content .* expected"):
        TarArchive(path, members=members).read("two.bin")


def patched_header(field: slice, value: bytes, kind: bytes = b"0") -> bytearray:
    """A tar whose first header says `value`, with a checksum that agrees."""
    data = tar_bytes((tar_info("first", 512, type=kind), b"x" * 512), (tar_info("next", 0), b""))
    data[field] = value
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return data


SIZE = slice(124, 136)


@pytest.mark.parametrize("size", [-1, -512, -1024, -(1 << 40)])
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"g"])
def test_tar_negative_size(tmp_path, size, kind):
    """Readers that trust it go back and loop for ever."""
    value = b"\xff" + (size & (1 << 88) - 1).to_bytes(11, "big")
    refuse(tmp_path, "a.tar", patched_header(SIZE, value, kind), "size|header|damaged")


def test_tar_huge_size(tmp_path):
    value = b"\x80" + (1 << 60).to_bytes(11, "big")
    refuse(tmp_path, "a.tar", patched_header(SIZE, value), "'first'.*bytes unpacked")
    limits = ArchiveLimits(total_bytes=1 << 62)
    refuse(tmp_path, "a.tar", patched_header(SIZE, value), "'first'.*truncated inside", limits)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_tar_extension_header_bomb(tmp_path, kind):
    """tarfile reads these whole into memory, whatever their size."""
    value = b"%011o\0" % (1 << 32)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = patched_header(SIZE, value, kind)
    refuse(tmp_path, "a.tar", data, f"extension header of {1 << 32} bytes")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000


def test_not_archives_at_all(tmp_path):
    page = b"<!DOCTYPE html><html>please log in</html>"
    refuse(tmp_path, "a.zip", page, "not a whole zip.*begins with b'<!DOCTYPE")
    refuse(tmp_path, "a.tar", page, "damaged after member")
    refuse(tmp_path, "a.tar.gz", page, "damaged after member")
    refuse(tmp_path, "b.tar", b"", "damaged|truncated")


EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
)


def survives(path: Path, data: bytes) -> None:
    """Whatever the bytes: a refusal, or exactly the content that was packed."""
    path.write_bytes(data)
    opener = ZipArchive if path.name.endswith(".zip") else TarArchive
    try:
        archive = opener(path)
        found = {name: archive.read(name) for name in archive.members}
    except ArchiveError:
        return
    if path.name != "a.tar":
        assert set(found.values()) <= set(GOOD.values())


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EDITS, st.sampled_from(["a.zip", "a.tar", "a.tar.gz"]), st.booleans())
def test_any_damage_is_a_refusal_or_harmless(tmp_path_factory, edits, name, cut):
    folder = tmp_path_factory.mktemp("damage")
    data = zip_bytes(GOOD) if name == "a.zip" else good_tar()
    if name == "a.tar.gz":
        data = bytearray(gzip.compress(data, mtime=0))
    for place, value in edits:
        data[int(place * len(data))] = value
    if cut:
        del data[int(edits[0][0] * len(data)) :]
    survives(folder / name, data)


@settings(max_examples=300, deadline=None)
@given(EDITS)
def test_any_damage_of_zip_headers(tmp_path_factory, edits):
    """As above, aimed at the 300 bytes that hold the directory."""
    data = zip_bytes(GOOD)
    start = data.index(b"PK\1\2")
    for place, value in edits:
        data[start + int(place * (len(data) - start))] = value
    survives(tmp_path_factory.mktemp("damage") / "a.zip", data)


def test_extract_does_not_follow_a_link_that_stands_in_its_place(tmp_path):
    (tmp_path / "a.zip").write_bytes(zip_bytes({"x": b"new"}))
    outside = tmp_path / "outside"
    outside.mkdir()
    os.symlink(outside, tmp_path / "into")
    with pytest.raises(SourceError, match="not an empty folder"):
        extract(tmp_path / "a.zip", tmp_path / "into")
    assert list(outside.iterdir()) == []
