"""A lake of hand-written rows for every table that the example queries read."""

import io
from pathlib import Path

import numpy as np
import polars as pl
from PIL import Image

from storage.catalog import refresh_catalog
from tests.small_lake import put_table

KNOWN, NOVEL = ["normal", "fence"], ["item_tnt", "item_cake", "item_bed", "item_web"]


def small_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    return file.getvalue()


def scores(seed: int, detectors: list[str], protocol: str = "visual") -> pl.DataFrame:
    """Forty frames scored by each detector, with many ties."""
    random = np.random.default_rng(seed)
    classes = [(KNOWN + NOVEL)[i % 6] for i in range(40)]
    frames = [
        pl.DataFrame(
            {
                "protocol": protocol,
                "detector": detector,
                "backbone": "small",
                "split": "test",
                "sample_id": [f"{name}/0/{i}" for i, name in enumerate(classes)],
                "class": classes,
                "novel": [name in NOVEL for name in classes],
                "score": random.integers(0, 12, 40) / 4,
            }
        )
        for detector in detectors
    ]
    return pl.concat(frames)


def metric_rows(values: dict[tuple[str, int], float]) -> list[dict]:
    return [
        {
            "protocol": "SN1",
            "run_id": f"dgcnn{seed}",
            "model": "cross_entropy",
            "score_id": score,
            "score": score,
            "seed": seed,
            "split": "test",
            "view": "plain",
            "phase": "none",
            "step": 0,
            "subset": "all",
            "convention": "threedos",
            "metric": "auroc",
            "value": value,
            "n": 10,
        }
        for (score, seed), value in values.items()
    ]


def measure(increment: int, value: float, **other: object) -> dict:
    row = {
        "extractor": "x3d",
        "predictor": "ann",
        "feedback": 0.5,
        "increment": increment,
        "phase": "post_feedback",
        "scope": "increment",
        "split": "test",
        "known_set": "none",
        "reduction": "raw",
        "grouping": "all",
        "group": "",
        "metric": "accuracy",
        "value": value,
        "n": 20,
    }
    return row | other


def confused(target: str, predicted: str, count: int, rank: int = 1) -> dict:
    run = {"extractor": "x3d", "predictor": "ann", "feedback": 0.5, "split": "test"}
    found = {"target": target, "predicted": predicted, "count": count, "rank": rank}
    return run | found | {"phase": "post_feedback", "grouping": "all", "group": ""}


def refused(rule: str, record: str, message: str) -> dict:
    return {
        "stage": "ingest",
        "shard": "s",
        "table_name": "frames",
        "record": record,
        "rule": rule,
        "message": message,
    }


def make_query_lake(lake: Path) -> Path:
    both = scores(1, ["odin", "patch_memory", "vgg_classifier"])
    put_table(lake, "novelcraft", "scores", both)
    put_table(lake, "threedos", "scores", scores(2, ["msp", "energy"], "SN1"))
    put_table(lake, "novelcraft", "images", [{"frame_id": "normal/0/0", "png": small_png()}])
    vectors = [{"sample_id": f"c{i}", "embedding": [float(i)] * 1280} for i in range(2)]
    put_table(lake, "kowl", "features_efficientnet", vectors)
    frames = both.filter(detector="odin").select("sample_id", "class")
    place = frames.with_row_index("frame").with_columns(subset=pl.lit(""), episode=0)
    fraction = pl.when(pl.col("class") == "item_tnt").then(0.3).otherwise(0.02)
    put_table(
        lake,
        "novelcraft",
        "targets",
        place.rename({"sample_id": "frame_id"}).with_columns(novel_fraction=fraction),
    )
    put_table(
        lake,
        "novelcraft",
        "splits",
        [
            {"frame_id": f"{name}/{i}/0", "episode_id": f"{name}/{i}", "class": name, "role": role,
             "split": split, "kept": kept}
            for i, (name, role, split, kept) in enumerate(
                [
                    ("normal", "normal", "train", True),
                    ("normal", "normal", "train", True),
                    ("normal", "normal", "test", True),
                    ("item_tnt", "novel_valid", "valid", True),
                    ("item_tnt", "novel_valid", None, False),
                ]
            )
        ],
    )  # fmt: skip
    put_table(
        lake,
        "novelcraft",
        "quarantine",
        [
            refused("json_syntax", "normal/0/9", "the second"),
            refused("json_syntax", "normal/0/7", "the first"),
            refused("image_size", "fence/0/1", "too small"),
        ],
    )
    put_table(lake, "kowl", "quarantine", [refused("field_count", "list.csv:4", "5 fields")])
    put_table(
        lake,
        "threedos",
        "metrics",
        metric_rows(
            {("msp", 0): 0.5, ("msp", 1): 0.7, ("msp", 2): 0.9, ("mls", 0): 0.8, ("mls", 1): 0.8}
        ),
    )
    put_table(
        lake,
        "threedos",
        "runs",
        [
            {"run_id": f"dgcnn{seed}", "protocol": "SN1", "model": "cross_entropy", "seed": seed}
            | {"network": "dgcnn", "changed": "{}", "config_id": "c", "state": "done"}
            | {"origin": "trained", "base_runs": []}
            for seed in range(3)
        ],
    )
    put_table(
        lake,
        "threedos",
        "splits",
        [
            {
                "protocol": "SN1",
                "sample_id": f"s{i}",
                "step": 0,
                "class": name,
                "split": split,
                "role": role,
                "label": 0 if role == "known" else None,
            }
            for i, (name, split, role) in enumerate(
                [
                    ("chair", "train", "known"),
                    ("chair", "train", "known"),
                    ("chair", "test", "known"),
                    ("car", "test", "novel"),
                ]
            )
        ],
    )
    put_table(lake, "threedos", "shapes", [{"sample_id": f"s{i}"} for i in (0, 3)])
    put_table(
        lake,
        "semantic",
        "splits",
        [
            {"sample_id": f"i{i}", "class": name, "role": role, "label": label}
            | {"protocol": "dog/pug", "split": "test", "step": 0, "subset": None}
            for i, (name, role, label) in enumerate(
                [
                    ("pug", "novel", None),
                    ("husky", "known", 0),
                    ("husky", "known", 0),
                    ("husky", "known", 0),
                ]
            )
        ],
    )
    trial = {"protocol": "dog/pug", "definition": '{"subset": "dog", "held_out": "pug"}'}
    keys = {"samples": 4, "fit_key": "f", "data_key": "d"}
    put_table(lake, "semantic", "protocols", [trial | keys])
    put_table(
        lake,
        "kowl",
        "increments",
        [
            {
                "sample_id": f"c{i}",
                "label": label,
                "split": "train",
                "increment": step,
                "role": role,
            }
            for i, (label, step, role) in enumerate(
                [("a", 0, "known"), ("a", 1, "known"), ("b", 1, "novel"), ("b", 1, "novel")]
            )
        ],
    )
    put_table(
        lake,
        "kowl",
        "measures",
        [
            measure(0, 0.9),
            measure(1, 0.8),
            measure(3, 0.2),
            measure(4, 0.6),
            measure(1, 0.1, phase="pre_feedback"),
            measure(1, 0.1, scope="cumulative"),
            measure(1, 0.1, metric="mcc"),
        ],
    )
    put_table(
        lake,
        "kowl",
        "confusion",
        [
            confused("luge", "luge", 1),
            confused("luge", "skiing", 2),
            confused("luge", "archery", 1),
            confused("skiing", "skiing", 5),
            confused("skiing", "luge", 9, rank=2),
        ],
    )
    put_table(
        lake,
        "condda",
        "sessions",
        [{"session_id": "s1", "detector": "threshold", "tests": 2, "finished": 1}],
    )
    at = {"session_id": "s1", "test_id": "t1"}
    put_table(
        lake,
        "condda",
        "rounds",
        [
            at | {"attempt": attempt, "round": number, "served": 1}
            for attempt, number in ((0, 0), (1, 0), (1, 1))
        ],
    )
    put_table(
        lake,
        "condda",
        "results",
        [
            at | {"type": kind, "position": position}
            for kind, position in (("detection", 0), ("detection", 1), ("classification", 0))
        ],
    )
    put_table(lake, "condda", "feedback", [at | {"number": i, "ids": 5} for i in range(2)])
    refresh_catalog(lake)
    return lake
