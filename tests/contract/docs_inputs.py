"""A folder in which the commands of the documents work: every file that they name, small and real.

`make_inputs` writes it: `lake`, sample data of all benchmarks under `data`, files of scores, lists,
labels and settings. `real_words` puts its paths where a document has DIR, FILE or /data;
`identities` are the names of runs, versions and snapshots.
"""

import re
import shutil
import tarfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from flows.cli import benchmarks
from storage.catalog import refresh_catalog
from storage.snapshots import history
from storage.tables import current_version
from tasks.publish.folder import publish
from tasks.sample.condda import write_condda
from tasks.sample.kowl import write_kowl
from tasks.sample.novelcraft import write_novelcraft
from tasks.sample.semantic import write_semantic
from tasks.sample.threedos import write_threedos
from tests.contract.query_lake import make_query_lake, metric_row
from tests.evaluation import small_runs
from tests.models import test_released_checkpoints as released
from tests.novelcraft.test_lerobot import make_lake
from tests.small_lake import put_table

ROOT = Path(__file__).parents[2]
WEIGHTS = (
    "X3D_M.pyth", "TimeSformer.pyth", "resnet20-12fca82f.th", "dino.pth",
)  # fmt: skip
PROTOCOLS = {
    "threedos": {"SN1": ("a", "b"), "SN2": ("b", "c")},
    "semantic": {"cifar10/cat": ("a", "b")},
}
DIRS = {
    ("kowl", "--lists"): "data/kinetics",
    ("kowl", "--videos"): "data/videos",
    ("kowl", "--evaluation.ava"): "data/ava",
    ("novelcraft", "--source"): "data/novelcraft",
    ("novelcraft", "--camera-states"): "states",
    ("novelcraft", "--camera-masks"): "masks",
    ("threedos", "--lists"): "data/lists",
    ("condda", "--tests"): "data/tests",
    ("", "check-published"): "published",
}
"""What DIR is after an option of a benchmark; after NAME= it is data/NAME."""
FILES = {
    ("import", "outputs"): "mine.csv",
    ("import", "scores"): "scores.csv",
    ("import", "predictions"): "guesses.parquet",
}
"""What FILE is to a command."""


def make_inputs(root: Path) -> None:
    """Fill the folder."""
    _write_raw(root / "data")
    _write_lakes(root)
    _write_files(root)
    for name, page, key in (
        ("mine.yaml", "semantic", "subsets"),
        ("service.yaml", "operations", "lake"),
    ):
        (root / name).write_text(yaml_block(page, key).replace("/data/", f"{root}/data/"))
    (root / "docs").symlink_to(ROOT / "docs")


def yaml_block(page: str, key: str) -> str:
    """The YAML file in a document that begins with a key."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (found,) = re.findall(rf"```yaml\n( *{key}:.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return textwrap.dedent(found)


def real_words(words: Sequence[str], out: Path) -> list[str]:
    """The words of a command with paths of the folder; `out` is new, for what it writes."""
    made: list[str] = []
    about = next((word for word in words if word in benchmarks()), "")
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        word = re.sub(r"(^|=)/data/", r"\1data/", word)
        if word == "DIR":
            writes = before == "--out" or words[0] == "publish"
            word = str(out) if writes else DIRS.get((about, before), f"no input for {before} DIR")
        elif named := re.fullmatch(r"(\w+)=DIR", word):
            word = f"{named[1]}=data/{named[1]}"
        elif word == "FILE":
            writes = words[0] == "export"
            word = str(out.with_suffix(".csv")) if writes else FILES[words[0], words[1]]
        made.append(word)
    return made


def identities(root: Path) -> dict[str, str]:
    """Names of runs, versions and snapshots in the documents -> those of the lake."""
    lake = root / "lake"
    runs = current_version(lake, "threedos", "runs").read()["run_id"].to_list()
    first, *_, last = [one for one in history(lake, "novelcraft") if "targets" in one.tables]
    return {
        "targets@3fa9": f"targets@{first.tables['targets'][:8]}",
        "3fa9": runs[0],
        "77c0": runs[1],
        "@s12": f"@s{first.number}",
        "@s14": f"@s{last.number}",
        "/old/lake": str(root / "old" / "lake"),
        "/data/lake": str(root / "lake"),
        "/data/service.yaml": str(root / "service.yaml"),
        "/tmp/novelty.txt": str(root / "status.txt"),
        "<name>": "ndcc",
        "<benchmark>": "kowl",
    }


def _write_raw(data: Path) -> None:
    """A small sample of each benchmark, in the forms that the documents name."""
    write_kowl(data / "kowl", clips_per_class=4, videos_per_class=1, bad_records=False)
    (data / "kinetics").symlink_to("kowl/lists")
    (data / "videos").symlink_to("kowl/videos")
    (data / "ava").mkdir()
    (data / "ava" / "ava_val.csv").write_text("-5KQ66BBWC4,902,0.077,0.151,0.283,0.811,80\n")
    actions = 'item {\n  name: "x"\n  id: 80\n}\n'
    (data / "ava" / "ava_action_list.pbtxt").write_text(actions)
    episodes = {"item_tnt": 1}
    write_novelcraft(data / "novelcraft", episodes=episodes, bad_records=False, workers=1)
    write_condda(data / "tests", rows=192, bad_records=False)
    for place in ("CONDDA", "OND/activity_recognition"):
        shutil.rmtree(data / "tests" / place)
    images = data / "tests" / "OND" / "image_classification"
    first, *others = (images / "test_ids.csv").read_text().split()
    (images / "test_ids.csv").write_text(f"{first}\n")
    for file in [path for name in others for path in images.glob(f"{name}_*")]:
        file.unlink()
    sizes = {"cifar_train": 5, "cifar_test": 2, "stl_train": 2, "stl_test": 1}
    sizes |= {"imagenet_train": 2, "imagenet_val": 1}
    write_semantic(data, **sizes, bad_records=False)
    few = {"train": 2, "test": 1, "scans_train": 2, "scans_test": 1, "models": 2}
    write_threedos(data, **few, bad_records=False)
    (data / "lists").mkdir()
    shutil.copy(data / "shapenet" / "all.csv", data / "lists")
    for place in ("birds/curlew", "birds/snipe", "birds/sandpiper", "train/cat", "test/cat"):
        (data / place).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (number, 99, 9)).save(data / place / f"{number}.png")
    shutil.make_archive(str(data / "NovelCraft"), "zip", data / "novelcraft")
    shutil.make_archive(str(data / "ModelNet40"), "zip", data / "modelnet40")
    with tarfile.open(data / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(data / "cifar10" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    for name in ("NovelCraft.zip", "ModelNet40.zip", "cifar-10-binary.tar.gz"):
        (data.parent / name).symlink_to(f"data/{name}")
    for name in ("train", "test"):
        shutil.make_archive(str(data.parent / name), "zip", data / name)


def _write_lakes(root: Path) -> None:
    """Rows by hand for most tables; runs of two benchmarks with all that is measured of them."""
    lake = root / "lake"
    make_query_lake(lake)
    make_lake(lake)
    clips = [{"sample_id": f"c{number}"} for number in range(3)]
    put_table(lake, "kowl", "clips", clips[:2])
    put_table(lake, "kowl", "clips", clips)
    put_table(root / "old" / "lake", "kowl", "clips", clips)
    put_table(lake, "kowl", "increments", [{"sample_id": "c0"}])
    measured = {"protocol": "kowl-test", "run_id": "ann", "convention": "openood"}
    rows = [metric_row("ann", 0, 0.75, **measured, split=name) for name in ("test", "valid")]
    put_table(lake, "kowl", "metrics", rows)
    declared = dict(small_runs.PROTOCOLS)
    try:
        for benchmark, protocols in PROTOCOLS.items():
            raw = root / "raw" / benchmark
            small_runs.write_raw(raw / "samples.csv", rows=400 if benchmark == "semantic" else 30)
            small_runs.PROTOCOLS.clear()
            small_runs.PROTOCOLS.update(protocols)
            seeds = (0, 1) if benchmark == "threedos" else (0,)
            small_runs.build_small(
                lake, raw, benchmark=benchmark, protocols=tuple(protocols), seeds=seeds
            )
    finally:
        small_runs.PROTOCOLS.clear()
        small_runs.PROTOCOLS.update(declared)
    refresh_catalog(lake)
    publish(lake, "kowl", root / "published")


def _write_files(root: Path) -> None:
    known = current_version(root / "lake", "threedos", "samples").read()
    splits = current_version(root / "lake", "threedos", "splits").read().filter(protocol="SN1")
    splits = splits.join(known, on="sample_id", how="semi")  # not those that were put by hand
    samples = splits["sample_id"].unique(maintain_order=True)
    numbers = np.random.default_rng(0).normal(size=len(samples))
    # A novelty of the model's own: tests/evaluation/test_imports.py takes logits and features in.
    outputs = pl.DataFrame({"sample_id": samples, "novelty": numbers})
    outputs.write_csv(root / "mine.csv")
    outputs.write_parquet(root / "mine.parquet")
    np.savez(root / "mine.npz", sample_id=np.array(samples), novelty=numbers)
    test_only = outputs.join(splits.filter(split="test"), on="sample_id", how="semi")
    logits = {"logit:a": pl.col("novelty"), "logit:b": -pl.col("novelty")}
    test_only.select("sample_id", **logits).write_csv(root / "logits.csv")
    tested = splits.filter(split="test").select("sample_id", novel=pl.col("role") == "novel")
    scored = tested.with_row_index("score").with_columns(my_score=pl.col("score"))
    scored.write_csv(root / "scores.csv")
    scored.write_parquet(root / "scores_a.parquet")
    scored.with_columns(pl.col("score") + 1).write_parquet(root / "scores_b.parquet")
    guessed = tested.select("sample_id", predicted=pl.lit("a"), p_unknown=pl.lit(0.5))
    guessed.write_parquet(root / "guesses.parquet")
    _write_labels(root)
    for name in WEIGHTS:
        (root / name).write_bytes(name.encode())
    with pytest.MonkeyPatch.context() as patch:
        paper = {"WIDTHS": (64, 64, 128, 256), "FUSED": 1024, "HIDDEN": 512, "FEATURES": 256}
        for name, size in paper.items():
            patch.setattr(released, name, size)
        released.save(root / "model_last.pth", "cross_entropy", classes=18)


def _write_labels(root: Path) -> None:
    """Labels of NovelCraft, lists of Kinetics before and now, world states."""
    for folder, fraction in (("old", 1 / 256), ("new", 0.25)):
        (root / folder).mkdir(exist_ok=True)
        text = f"id,novel_percent\nitem_tnt/0/1,{fraction}\n"
        (root / folder / "targets.csv").write_text(text)
        shutil.copytree(root / "data" / "kinetics", root / f"{folder}_folder")
        list_file = root / "data" / "kinetics" / "kinetics600_train.csv.gz"
        shutil.copy(list_file, root / folder)
        shutil.copy(list_file, root / f"{folder}.csv.gz")
    shutil.copy(root / "new" / "targets.csv", root)
    shutil.copy(root / "old" / "targets.csv", root / "old.csv")
    for name in ("states", "masks"):
        (root / name).mkdir()
    states = sorted((root / "data" / "novelcraft" / "item_tnt").rglob("*.json"))[:2]
    for number, state in enumerate(states):
        shutil.copy(state, root / "states" / f"{number}.json")
        Image.new("L", (8, 8)).save(root / "masks" / f"{number}.png")
    (root / "STATES").symlink_to("states")
    (root / "my.yaml").write_text("source: data/novelcraft\n")
    (root / "condda-state").mkdir()
