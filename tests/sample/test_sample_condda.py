"""The sample SAIL-ON tests parse with plain readers and hold the signal that they promise."""

import csv
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tasks.learning.draws import item_rng
from tasks.sample.condda import bad_condda_records, write_condda
from tasks.sample.files import put
from tests.shared import shared_path

REPOSITORY = Path(__file__).parents[2]


def tree_digest(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def tree_digest_of_child(call: str, module: str, root: Path) -> dict[str, str]:
    """Run `call` (with ROOT) in a process of another hash seed, locale, time zone and folder."""
    code = f"from pathlib import Path\nfrom {module} import *\nROOT = Path({str(root)!r})\n{call}"
    changed = {"PYTHONHASHSEED": "4242", "LC_ALL": "C", "TZ": "Asia/Tokyo", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **changed, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", env=environment)
    return tree_digest(root)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("condda")
    write_condda(folder)
    return folder


def ids_of(root: Path, protocol: str, domain: str) -> list[str]:
    return (root / protocol / domain / "test_ids.csv").read_text().splitlines()


def truth(root: Path, protocol: str, domain: str, test: str) -> tuple[list[str], list[list[str]]]:
    path = root / protocol / domain / f"{test}_single_df.csv"
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, delimiter=",", quotechar="|")
    return header, rows


DOMAINS = [
    (p, d) for p in ("OND", "CONDDA") for d in ("activity_recognition", "image_classification")
]


@pytest.mark.parametrize(("protocol", "domain"), DOMAINS)
def test_ground_truth_follows_the_protocol(root: Path, protocol: str, domain: str) -> None:
    tests = ids_of(root, protocol, domain)
    assert len(tests) == 3 if (protocol, domain) == ("OND", "image_classification") else 2
    activity = domain == "activity_recognition"
    for test in tests:
        header, rows = truth(root, protocol, domain, test)
        assert {len(row) for row in rows} == {len(header)}
        ids = [row[0] for row in rows]
        assert len(set(ids)) == len(ids) == 320
        metadata = json.loads((root / protocol / domain / f"{test}_metadata.json").read_text())
        changed = [int(row[2 if activity else 1]) for row in rows]
        assert changed == sorted(changed) and set(changed) == {0, 1}
        assert metadata["red_light"] == ids[changed.index(1)]
        labels = [int(row[3 if activity else 2]) for row in rows]
        if activity:
            novel = [row[1] == "1" for row in rows]
            known = metadata.get("known_classes", metadata.get("nonnovel_classes"))
            assert all((label == known) == n for label, n in zip(labels, novel, strict=True))
            assert changed.index(1) < novel.index(True)
        else:
            novel = [label < 0 for label in labels]
            assert changed.index(1) == novel.index(True)
            assert max(labels) < metadata["known_classes"] and 0 not in labels
            assert (
                len(set(filter(lambda label: label < 0, labels))) <= metadata["max_novel_classes"]
            )
        assert not any(novel[: changed.index(1)])
        assert 0.3 < np.mean(novel[changed.index(1) :]) < 0.7
        assert metadata["protocol"] == protocol


@pytest.mark.parametrize(("protocol", "domain"), DOMAINS)
def test_features_find_the_novel_rows(root: Path, protocol: str, domain: str) -> None:
    for test, least in zip(ids_of(root, protocol, domain), (0.6, 0.85, 0.85), strict=False):
        _, rows = truth(root, protocol, domain, test)
        with np.load(root / "features" / f"{test}.npz", allow_pickle=False) as file:
            arrays = dict(file)
        assert arrays["features"].dtype == arrays["train_features"].dtype == np.float32
        assert arrays["instance_id"].dtype.kind == "U"
        assert arrays["instance_id"].tolist() == [row[0] for row in rows]
        classes = np.unique(arrays["train_labels"])
        means = np.stack(
            [arrays["train_features"][arrays["train_labels"] == c].mean(axis=0) for c in classes]
        )
        distance = np.linalg.norm(arrays["features"][:, None] - means, axis=2)
        activity = domain == "activity_recognition"
        labels = np.array([int(row[3 if activity else 2]) for row in rows])
        novel = np.array([row[1] == "1" for row in rows]) if activity else labels < 0
        assert least < roc_auc_score(novel, distance.min(axis=1)) < 0.99
        assert (classes[distance.argmin(axis=1)] == labels)[~novel].mean() > 0.9


def test_columns_are_those_of_the_published_fixtures(root: Path) -> None:
    data = shared_path("sailon/sail-on-client/data")
    for protocol, domain in DOMAINS:
        published = {
            path.read_text().splitlines()[0] for path in data.glob(f"*/{domain}/*_single_df.csv")
        }
        for test in ids_of(root, protocol, domain):
            path = root / protocol / domain / f"{test}_single_df.csv"
            assert path.read_text().splitlines()[0] in published


def test_bad_record_lacks_round_size_and_only_that_one(root: Path, tmp_path: Path) -> None:
    bad = {root / path for path, _ in bad_condda_records()}
    lacking = {
        path
        for path in root.glob("*/*/*_metadata.json")
        if "round_size" not in json.loads(path.read_text())
    }
    assert lacking == bad and len(bad) == 1
    write_condda(tmp_path, bad_records=False)
    good, all_of_them = tree_digest(tmp_path), tree_digest(root)
    assert len(all_of_them) - len(good) == 3
    differing = {path for path in good if good[path] != all_of_them[path]}
    assert differing == {"OND/image_classification/test_ids.csv"}


def test_same_bytes_in_another_process(root: Path, tmp_path: Path) -> None:
    assert tree_digest_of_child(
        "write_condda(ROOT)", "tasks.sample.condda", tmp_path
    ) == tree_digest(root)


def test_another_seed_gives_other_tests(root: Path, tmp_path: Path) -> None:
    write_condda(tmp_path, seed=1)
    mine, other = tree_digest(root), tree_digest(tmp_path)
    assert mine.keys() == other.keys()
    same = {path for path in mine if mine[path] == other[path]}
    assert {Path(path).name for path in same} == {"test_ids.csv"}


def test_put_leaves_equal_files_alone_and_mends_others(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b.bin"
    put(file, b"one")
    os.utime(file, ns=(5, 5))
    put(file, b"one")
    assert file.stat().st_mtime_ns == 5
    put(file, b"two")
    assert file.read_bytes() == b"two" and [p.name for p in file.parent.iterdir()] == ["b.bin"]


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows is 10"):
        write_condda(tmp_path, rows=10)


def test_item_rng_depends_on_the_whole_name_and_the_seed() -> None:
    draws = [
        item_rng(*key).random() for key in ((0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, "a", 2))
    ]
    assert len(set(draws)) == len(draws)
    assert item_rng(0, "a").random() == draws[0]
