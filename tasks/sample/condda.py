"""Sample SAIL-ON tests: out of a seed, into a server data directory with features to detect with.

`<root>/<PROTOCOL>/<domain>/` holds `test_ids.csv`, `<test>_single_df.csv` (ground truth) and
`<test>_metadata.json`, columns and odd spellings as in the public fixtures (CONDDA rules 3 and 4):
activity tests say `novel` and `detection` apart and give novel rows the label K, image tests give
them a negative label; the first row with detection 1 is the red light. `<root>/features/<test>.npz`
holds `instance_id`, `features`, `train_features` and `train_labels` (known classes only): known
classes are Gaussians shared by all tests of a domain. Novel ones are Gaussians too, in the first
test of a domain near to known classes (hard: part of them cannot be told apart), in the second
further off (easy, but not perfect).
"""

import io
import json
import uuid
from pathlib import Path

import numpy as np

from tasks.learning.draws import item_rng
from tasks.sample.files import put

PROTOCOLS = ("OND", "CONDDA")
KNOWN_CLASSES = {"activity_recognition": 12, "image_classification": 10}
NOVEL_CLASSES = 3
DIMENSIONS = 24
TRAIN_PER_CLASS = 30
MEAN_SPREAD = 1.2
# Where the novel classes of each test lie between a place of their own (0) and a known class (1).
NEARNESS = (0.7, 0.35, 0.35)
ROUND_SIZE = 32
PRE_NOVELTY_ROUNDS = 3
# group, run, seed after the protocol; the third is the one that lacks round_size.
TEST_NUMBERS = {
    "activity_recognition": ("10.90001.2100554", "0.10100.6438158", "10.90002.2100555"),
    "image_classification": ("1.1.1234", "54011215.0000.1236", "1.2.1235"),
}
BAD_TEST = ("OND", "image_classification")
KINETICS_NAMES = ("cutting apple", "peeling potatoes", "dyeing eyebrows", "washing hair", "archery")


def bad_condda_records() -> list[tuple[str, str]]:
    """(path below the root, what is wrong) of every bad record that `write_condda` makes."""
    protocol, domain = BAD_TEST
    test = f"{protocol}.{TEST_NUMBERS[domain][2]}"
    return [(f"{protocol}/{domain}/{test}_metadata.json", "metadata without round_size")]


def write_condda(
    root: Path,
    seed: int = 0,
    *,
    rows: int = 320,
    nearness: tuple[float, float, float] = NEARNESS,
    bad_records: bool = True,
) -> None:
    """Two tests for each protocol and domain, `rows` instances each, and one bad test if asked."""
    if rows <= (PRE_NOVELTY_ROUNDS + 2) * ROUND_SIZE:
        raise ValueError(f"rows is {rows}: too few for {PRE_NOVELTY_ROUNDS} rounds before novelty")
    for protocol in PROTOCOLS:
        for domain, numbers in TEST_NUMBERS.items():
            with_bad = bad_records and (protocol, domain) == BAD_TEST
            tests = [f"{protocol}.{number}" for number in numbers[: 3 if with_bad else 2]]
            folder = root / protocol / domain
            for variant, test in enumerate(tests):
                truth, metadata, features = _test(
                    seed, protocol, domain, test, variant, rows, nearness[variant]
                )
                put(folder / f"{test}_single_df.csv", truth.encode())
                put(folder / f"{test}_metadata.json", (json.dumps(metadata, indent=2)).encode())
                put(root / "features" / f"{test}.npz", features)
            put(folder / "test_ids.csv", "".join(f"{test}\n" for test in tests).encode())


def _test(
    seed: int, protocol: str, domain: str, test: str, variant: int, rows: int, nearness: float
) -> tuple[str, dict[str, object], bytes]:
    rng = item_rng(seed, domain, test)
    known = KNOWN_CLASSES[domain]
    change = PRE_NOVELTY_ROUNDS * ROUND_SIZE + int(rng.integers(1, ROUND_SIZE))
    # In activity tests the world changes some rows before its first novel sample.
    first_novel = change + (int(rng.integers(4, 16)) if domain == "activity_recognition" else 0)
    novel = np.arange(rows) >= first_novel
    novel[first_novel + 1 :] &= rng.random(rows - first_novel - 1) < 0.5
    detection = np.arange(rows) >= change
    classes = np.where(
        novel, known + rng.integers(0, NOVEL_CLASSES, rows), rng.integers(0, known, rows)
    )
    ids, truth = (_activity if domain == "activity_recognition" else _image)(
        rng, variant, known, classes, novel, detection
    )
    means = np.stack([_mean(seed, domain, number) for number in range(known + NOVEL_CLASSES)])
    means[known:] += nearness * (means[:NOVEL_CLASSES] - means[known:])
    train_labels = np.repeat(np.arange(known), TRAIN_PER_CLASS)
    train_rng = item_rng(seed, domain, "train")
    noise = train_rng.standard_normal((len(train_labels), DIMENSIONS))
    buffer = io.BytesIO()
    np.savez(
        buffer,
        instance_id=np.array(ids, dtype=np.str_),
        features=(means[classes] + rng.standard_normal((rows, DIMENSIONS))).astype(np.float32),
        train_features=(means[train_labels] + noise).astype(np.float32),
        train_labels=train_labels + (domain == "image_classification"),
    )
    metadata = _metadata(protocol, domain, variant, known, ids[change], change, rows)
    return truth, metadata, buffer.getvalue()


def _mean(seed: int, domain: str, number: int) -> np.ndarray:
    return MEAN_SPREAD * item_rng(seed, domain, "class", number).standard_normal(DIMENSIONS)


def _activity(
    rng: np.random.Generator,
    variant: int,
    known: int,
    classes: np.ndarray,
    novel: np.ndarray,
    detection: np.ndarray,
) -> tuple[list[str], str]:
    """Variant 0 has the older six columns, variant 1 the nineteen with Kinetics and annotations."""
    suffix = ".mp4" if variant else ".avi"
    ids = [str(uuid.UUID(bytes=rng.bytes(16), version=4)) + suffix for _ in classes]
    labels = np.minimum(classes, known)
    columns = [ids, novel.astype(int), detection.astype(int), labels]
    columns += [np.zeros_like(labels), np.zeros_like(labels)]
    header = "vid,novel,detection,activity,spatial,temporal"
    if variant:
        names = [f"kinetics_id_{i}" for i in range(5)]
        names += [f"annotation_{kind}_{i}" for i in range(1, 5) for kind in ("name", "value")]
        header = "anonymous_id,novel,detection,ontology_id,spatial,temporal," + ",".join(names)
        order = rng.permuted(np.tile(np.arange(5), (len(ids), 1)), axis=1)
        columns += list(np.array(KINETICS_NAMES)[order].T)
        for name, values in (
            ("Perspective", ("front", "side", "top")),
            ("Location", ("indoors", "outdoors")),
            ("What", ("Hair", "Face", "Food")),
            ("NA", ("NA",)),
        ):
            columns += [[name] * len(ids), rng.choice(values, len(ids))]
    lines = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
    return ids, "\n".join([header, *lines]) + "\n"


def _image(
    rng: np.random.Generator,
    variant: int,
    known: int,
    classes: np.ndarray,
    novel: np.ndarray,
    detection: np.ndarray,
) -> tuple[list[str], str]:
    """Known labels 1..K, novel ones -1, -2, ...; variant 0 has the fixture's leading spaces."""
    labels = np.where(novel, -(classes - known + 1), classes + 1)
    numbers = rng.permutation(len(classes))
    ids = [
        f"known_{'unknown_' * is_novel}classes/images/val/{abs(label):05d}/{number:05d}.JPEG"
        for label, is_novel, number in zip(labels, novel, numbers, strict=True)
    ]
    gap, header = ("", "id,detection,classification")
    if variant == 0:
        gap, header = (" ", "file,detection,writer_id")
    lines = [
        f"{name},{gap}{int(changed)},{gap}{label}"
        for name, changed, label in zip(ids, detection, labels, strict=True)
    ]
    return ids, "\n".join([header, *lines]) + ("\n" if variant else "")


def _metadata(
    protocol: str, domain: str, variant: int, known: int, red_light: str, change: int, rows: int
) -> dict[str, object]:
    """Older activity tests have numbers as text, newer ones `nonnovel_classes`, as published."""
    if domain == "image_classification":
        metadata: dict[str, object] = {
            "domain": domain,
            "protocol": protocol,
            "known_classes": known + 1,
            "max_novel_classes": NOVEL_CLASSES,
            "round_size": ROUND_SIZE,
            "threshold": 0.5,
            "red_light": red_light,
            "feedback_max_ids": 10,
        }
        if variant == 2:
            del metadata["round_size"]
        return metadata
    shared = {
        "max_novel_classes": NOVEL_CLASSES,
        "distribution": "flat",
        "red_light": red_light,
        "round_size": ROUND_SIZE,
        "pre_novelty_batches": PRE_NOVELTY_ROUNDS,
    }
    if variant == 0:
        return {
            "protocol": protocol,
            "known_classes": known,
            "novel_classes": NOVEL_CLASSES,
            **shared,
            "difficulty": "high",
            "prop_novel": "0.5",
            "n_rounds": "0",
            "detection": str(change),
            "degree": "1",
            "representation": "base",
            "threshold": 0.5,
            "feedback_max_ids": 10,
        }
    return {
        "protocol": protocol,
        "nonnovel_classes": known,
        **shared,
        "difficulty": "easy",
        "prop_novel": 0.5,
        "detection": change,
        "n_rounds": -(-rows // ROUND_SIZE),
        "degree": 1,
        "feedback_max_ids": 5,
        "task": "ar",
        "novelty_type": "class",
    }
