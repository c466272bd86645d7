"""Raw image sets to tables: every image is a row or a refusal, one new image costs one shard."""

import io
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from schemas.errors import ConfigError, LakeError
from schemas.semantic import PictureSettings
from storage.raw import open_raw
from storage.tables import current_version
from tasks.engine.stage import Build
from tasks.sample.semantic import bad_semantic_records, write_semantic
from tasks.semantic import ingest
from tasks.semantic.ingest import plan_image_shards, read_images
from tasks.semantic.records import read_cifar_binary, read_stl
from tasks.semantic.samples import read_pictures
from tasks.semantic.sources import list_images
from tests.shared import shared_path

SMALL = {
    "cifar_train": 5, "cifar_test": 2, "stl_train": 2, "stl_test": 1, "imagenet_train": 3,
    "imagenet_val": 2,
}  # fmt: skip
SETTINGS = PictureSettings(side=64)


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sample")
    write_semantic(root, **SMALL)
    return root


def built(lake: Path, settings: PictureSettings = SETTINGS, **sources: Path):
    """images, pictures and quarantine of some sources, and how many shards were made."""
    listings = [list_images(name, open_raw(path)) for name, path in sources.items()]
    with Build("semantic", lake, max_reject_share=1, workers=2) as build:
        pieces = build.run(read_images, plan_image_shards(listings), settings)
        tables = [build.read(name) for name in ("images", "pictures", "quarantine")]
    files = [piece.part("pictures").path for piece in pieces]
    return *tables, files, sum(piece.made_now for piece in pieces)


def test_the_sample_with_its_bad_records(sample, tmp_path):
    kinds = ("cifar10", "stl10", "imagenet")
    images, pictures, refused, _, _ = built(
        tmp_path / "lake", **{kind: sample / kind for kind in kinds}
    )
    counts = dict(images.group_by("dataset").len().iter_rows())
    good = 3  # of the six unusual files
    assert counts == {"cifar10": 70, "stl10": 30, "imagenet": 30 + good}
    assert images["sample_id"].sort().equals(pictures["sample_id"].sort())
    said = {row["record"].split("/")[-1]: row["rule"] for row in refused.to_dicts()}
    unusual = dict(images.filter(pl.col("converted").is_not_null()).select(
        pl.col("sample_id").str.split("/").list.last(), "converted").iter_rows())  # fmt: skip
    expected = {
        "JPEG cut": "damaged_image", "PNG whose": "too_many_pixels", "text under": "not_an_image",
        "CMYK JPEG": "CMYK to RGB", "greyscale": "L to RGB",
        "16-bit PNG": "png under the suffix of jpeg; 16 bits a channel; L to RGB",
    }  # fmt: skip
    for path, wrong in bad_semantic_records():
        stem = Path(path).stem
        (reason,) = [r for start, r in expected.items() if wrong.startswith(start)]
        assert (said | unusual)[stem] == reason
    assert len(said) == 3 and len(unusual) == 3
    sizes = pictures.with_columns(pl.col("sample_id").str.split("/").list.first().alias("dataset"))
    sizes = sizes.select("dataset", "width", "height", "encoding").unique().sort("dataset")
    assert sizes.rows() == [
        ("cifar10", 32, 32, "png"), ("imagenet", 64, 64, "jpeg"), ("stl10", 96, 96, "png"),
    ]  # fmt: skip


def test_cifar_pixels_come_back_bit_for_bit(sample, tmp_path):
    images, _, _, files, _ = built(tmp_path / "lake", cifar10=sample / "cifar10")
    path = sample / "cifar10" / "cifar-10-batches-bin" / "data_batch_2.bin"
    raw = read_cifar_binary(path.read_bytes())
    own = images.filter(pl.col("file").str.ends_with("data_batch_2.bin")).sort("row")
    assert own["row"].to_list() == list(range(10))
    pictures = read_pictures(files, own["sample_id"])
    assert np.array_equal(pictures[:], raw.pixels)
    assert np.array_equal(pictures[[7, 0]], raw.pixels[[7, 0]])
    assert np.array_equal(pictures[3], raw.pixels[3])
    assert own["sample_id"][3] == "cifar10/train/data_batch_2/00003"


def test_stl_pixels_come_back_bit_for_bit(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(ingest, "RECORDS_PER_SHARD", 8)
    images, _, _, files, made = built(tmp_path / "lake", stl10=sample / "stl10")
    assert made == 3 + 2  # 20 training images, 10 test images
    own = images.filter(pl.col("split") == "train").sort("row")
    folder = sample / "stl10"
    raw = read_stl((folder / "train_X.bin").read_bytes(), (folder / "train_y.bin").read_bytes())
    assert np.array_equal(read_pictures(files, own["sample_id"])[:], raw.pixels)


def test_every_image_has_a_thumbnail(sample, tmp_path):
    kinds = ("cifar10", "stl10", "imagenet")
    how = PictureSettings(side=64, thumbnail=40)
    images, *_ = built(tmp_path / "lake", how, **{kind: sample / kind for kind in kinds})
    thumbnails = current_version(tmp_path / "lake", "semantic", "thumbnails").read()
    assert thumbnails["sample_id"].sort().equals(images["sample_id"].sort())
    sizes = thumbnails.select(
        pl.col("sample_id").str.split("/").list.first(), "width", "height"
    ).unique()
    assert sizes.sort("sample_id").rows() == [
        ("cifar10", 32, 32), ("imagenet", 40, 40), ("stl10", 40, 40),
    ]  # fmt: skip
    for row in thumbnails.sample(5, seed=0).to_dicts():
        small = Image.open(io.BytesIO(row["data"]))
        assert (small.format, *small.size) == ("JPEG", row["width"], row["height"])


def test_a_python_archive_gives_the_same_images_as_the_binary_one(sample, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for path in sorted((sample / "cifar10" / "cifar-10-batches-bin").glob("*.bin")):
        raw = read_cifar_binary(path.read_bytes())
        flat = raw.pixels.transpose(0, 3, 1, 2).reshape(len(raw.labels), -1)
        content = {b"data": np.ascontiguousarray(flat), b"labels": raw.labels.tolist()}
        (folder / path.stem).write_bytes(pickle.dumps(content, 2))
    (folder / "data_batch_5").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    python = built(tmp_path / "p", cifar10=tmp_path / "cifar-10-python.tar.gz")
    binary = built(tmp_path / "b", cifar10=sample / "cifar10")
    columns = ["sample_id", "class", "split", "row", "digest"]
    kept = binary[0].filter(~pl.col("file").str.contains("data_batch_5"))
    assert (
        python[0].select(columns).sort("sample_id").equals(kept.select(columns).sort("sample_id"))
    )
    assert python[2].select("record", "rule").rows() == [
        ("cifar-10-batches-py/data_batch_5", "unsafe_pickle")
    ]


def test_a_pickle_that_asks_for_gigabytes_is_one_refusal(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "data_batch_1").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")  # remember as number 2^31
    labels = {"data": np.zeros((1, 3072), np.uint8), "labels": [2]}
    (raw / "test_batch").write_bytes(pickle.dumps(labels, 2))
    small = PictureSettings(memory_bytes=1 << 29)
    images, _, refused, _, _ = built(tmp_path / "lake", small, cifar10=raw)
    assert images["class"].to_list() == ["bird"]
    assert refused["record"].to_list() == ["data_batch_1"]


def test_bad_labels_and_a_cut_file(tmp_path):
    record = bytes(3072)
    path = tmp_path / "raw" / "data_batch_1.bin"
    path.parent.mkdir()
    path.write_bytes(b"\3" + record + b"\x0a" + record + b"\1" + record[:100])
    images, _, refused, _, _ = built(tmp_path / "lake", cifar10=path.parent)
    assert images.select("class", "row").rows() == [("cat", 0)]
    assert refused.select("record", "rule").sort("rule").rows() == [
        ("data_batch_1.bin", "truncated"),
        ("cifar10/train/data_batch_1/00001", "unknown_label"),
    ]


def test_a_new_image_costs_one_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(ingest, "PICTURES_PER_SHARD", 8)
    raw = tmp_path / "raw"
    for number in range(40):
        path = raw / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    first = built(tmp_path / "lake", mine=raw)
    assert first[4] >= 5 and first[0].height == 40
    assert built(tmp_path / "lake", mine=raw)[4] == 0
    Image.new("RGB", (9, 9)).save(raw / "a" / "new.png")
    again = built(tmp_path / "lake", mine=raw)
    assert again[0].height == 41 and again[4] <= 2


def test_two_sources_of_one_data_set(tmp_path):
    for part, names in (("one", ("train/a/1", "test/a/1")), ("two", ("test/b/1", "test/a/1"))):
        for name in names:
            path = tmp_path / part / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(path)
    parts = {"cifar10.one": tmp_path / "one", "cifar10.two": tmp_path / "two"}
    images, _, refused, _, _ = built(tmp_path / "lake", **parts)
    assert images["dataset"].unique().to_list() == ["cifar10"] and images.height == 3
    assert refused.select("record", "rule").rows() == [("cifar10/test/a/1", "duplicate_id")]


def test_the_real_imagenet_members(tmp_path):
    root = tmp_path / "raw"
    root.mkdir()
    for path in sorted(shared_path("images/imagenet_sample").glob("*.JPEG"))[::4]:
        shutil.copy(path, root)
    images, pictures, refused, files, _ = built(tmp_path / "lake", PictureSettings(), imagenet=root)
    assert images.height == 11 and refused.is_empty()
    assert pictures.select("width", "height", "encoding").unique().rows() == [(256, 256, "jpeg")]
    # The cached picture is the raw one, resized and cropped, up to the loss of JPEG.
    entry = images.sort("sample_id").row(4, named=True)
    raw = Image.open(root / entry["file"])
    short = min(raw.size)
    scaled = raw.resize([round(s * 256 / short) for s in raw.size], Image.Resampling.BILINEAR)
    left, top = ((s - 256) // 2 for s in scaled.size)
    plain = np.asarray(scaled.crop((left, top, left + 256, top + 256)), int)
    ours = read_pictures(files, [entry["sample_id"]])[0]
    assert np.abs(ours - plain).mean() < 4


# ---------------------------------------------------------------- the cache


def test_the_cache_says_what_is_wrong(sample, tmp_path):
    raw = tmp_path / "raw"
    for name, side in (("a/1", 8), ("a/2", 9)):
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side)).save(raw / f"{name}.png")
    keep = PictureSettings(keep=("mine",))
    images, _, _, files, _ = built(tmp_path / "lake", keep, mine=raw)
    with pytest.raises(ConfigError, match=r"several sizes \(8 x 8, 9 x 9"):
        read_pictures(files, images["sample_id"])[:]
    with pytest.raises(LakeError, match="1 pictures are not in the table, such as mine/a/3"):
        read_pictures(files, ["mine/a/1", "mine/a/3"])[:]
    assert read_pictures(files, ["mine/a/2"]).shape == (1, 9, 9, 3)


def test_samples_are_known_by_what_is_stored_of_them(tmp_path):
    """Another side makes other samples; the same picture under another name is the same."""
    raw = tmp_path / "raw"
    rng = np.random.default_rng(0)
    for name in ("a/1", "b/2"):
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), np.uint8)).save(raw / f"{name}.png")
    shutil.copy(raw / "a" / "1.png", raw / "a" / "again.png")

    def digests(lake: str, side: int) -> dict[str, str]:
        images, *_ = built(tmp_path / lake, PictureSettings(side=side), mine=raw)
        samples = current_version(tmp_path / lake, "semantic", "samples").read()
        assert samples["sample_id"].to_list() == images["sample_id"].to_list()
        assert samples["class"].to_list() == images["class"].to_list()
        assert set(samples["modality"]) == {"image"}
        return dict(samples.select("sample_id", "digest").iter_rows())

    small, large = digests("small", 8), digests("large", 16)
    assert small == digests("again", 8) and not set(small.values()) & set(large.values())
    assert small["mine/a/1"] == small["mine/a/again"] != small["mine/b/2"]
