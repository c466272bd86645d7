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


def shared_scores(seed: int, runs: list[str]) -> pl.DataFrame:
    """The same frames as shared rows; the last two runs agree least on the first frame."""
    rows = scores(seed, runs).rename({"detector": "run_id", "score": "value"})
    first = pl.col("sample_id").str.ends_with("/0/0")
    value = pl.when(first, run_id=runs[-1]).then(9.0).when(first, run_id=runs[-2]).then(-9.0)
    usual = {"score": "msp", "score_id": "msp", "view": "plain", "phase": "none", "step": 0}
    return rows.drop("protocol", "backbone").with_columns(
        value.otherwise("value").alias("value"),
        *(pl.lit(given).alias(name) for name, given in usual.items()),
    )


def run_rows(protocol: str, runs: dict[str, tuple[str, int]]) -> list[dict]:
    """`runs`: run_id -> model, which is the configuration too, and seed."""
    return [
        {"run_id": run, "protocol": protocol, "model": model, "seed": seed}
        | {"network": "none", "changed": "{}", "config_id": model}
        for run, (model, seed) in runs.items()
    ]


def metric_row(model: str, seed: int, value: float | None, **other: object) -> dict:
    row = {"protocol": "SN1", "run_id": f"{model}{seed}", "model": model, "seed": seed}
    row |= {"score_id": "msp", "score": "msp", "split": "test", "view": "plain", "phase": "none"}
    row |= {"step": 0, "subset": "all", "convention": "threedos", "metric": "auroc"}
    return row | {"value": value, "low": 0.1, "high": 0.9, "n": 10} | other


def put_shared(lake: Path) -> None:
    """Benchmarks `one` and `two` with the shared tables that queries over all benchmarks read."""
    odin = {"odin": ("odin", 0), "memory": ("memory", 0), "vgg": ("vgg", 0)}
    put_table(lake, "one", "runs", run_rows("visual", odin))
    put_table(lake, "one", "scores", shared_scores(1, list(odin)))
    seeds = {("arpl", 0): 0.5, ("arpl", 1): 0.7, ("arpl", 2): 0.9, ("ce", 0): 0.8, ("ce", 1): 0.8}
    nets = {f"{model}{seed}": (model, seed) for model, seed in [*seeds, ("once", 0)]}
    put_table(lake, "two", "runs", run_rows("SN1", nets))
    put_table(lake, "two", "scores", shared_scores(2, ["arpl0", "ce0"]))
    others = [{"subset": "SN2"}, {"view": "turned"}, {"phase": "after"}, {"step": 1}]
    put_table(
        lake,
        "two",
        "metrics",
        [
            *(metric_row(*run, value) for run, value in seeds.items()),
            metric_row("once", 0, 0.75),
            metric_row("once", 0, None, metric="aupr"),
            *(metric_row("once", 0, 0.99, **other) for other in others),
        ],
    )


def measure(step: int, value: float, **other: object) -> dict:
    row = {
        "run_id": "ann",
        "step": step,
        "phase": "after",
        "scope": "increment",
        "split": "test",
        "view": "plain",
        "known_set": "none",
        "reduction": "raw",
        "grouping": "all",
        "subset": "",
        "metric": "accuracy",
        "value": value,
        "n": 20,
    }
    return row | other


def guessed(number: int, label: str, predicted: str, rank: int = 1) -> dict:
    place = {"run_id": "ann", "phase": "after", "step": 1, "sample_id": f"g{number:02}"}
    found = {"class": label, "predicted": predicted, "rank": rank}
    return place | found | {"view": "plain", "split": "test"}


def refused(rule: str, record: str, message: str) -> dict:
    return {
        "stage": "ingest",
        "shard": "s",
        "table_name": "frames",
        "record": record,
        "rule": rule,
        "message": message,
    }


def put_novelcraft_runs(lake: Path, scored: pl.DataFrame) -> None:
    """The rows as each model's own score; the run is called like the model."""
    place = {"score_id": "own", "view": "plain", "phase": "none", "step": 0}
    rows = scored.select(
        pl.col("detector").alias("run_id"),
        *(pl.lit(value).alias(name) for name, value in place.items()),
        pl.lit("own").alias("score"),
        *("sample_id", "split", "class", "novel"),
        pl.col("score").alias("value"),
    )
    put_table(lake, "novelcraft", "scores", rows)
    models = sorted(set(scored["detector"]))
    runs = [{"run_id": model, "model": model, "protocol": "visual"} for model in models]
    put_table(lake, "novelcraft", "runs", runs)


def make_query_lake(lake: Path) -> Path:
    put_shared(lake)
    both = scores(1, ["odin", "patch_memory", "vgg_classifier"])
    put_novelcraft_runs(lake, both)
    put_table(lake, "novelcraft", "images", [{"frame_id": "normal/0/0", "png": small_png()}])
    vectors = [
        {"run_id": "frozen", "sample_id": f"c{i}", "view": "plain", "features": [float(i)] * 1280}
        for i in range(2)
    ]
    put_table(lake, "kowl", "outputs", vectors)
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
        "frame_roles",
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
        "splits",
        [
            {
                "protocol": "kowl-test",
                "sample_id": f"c{i}",
                "class": name,
                "split": "train",
                "step": step,
                "role": role,
            }
            for i, (name, step, role) in enumerate(
                [("a", 0, "known"), ("a", 1, "known"), ("b", 1, "novel"), ("b", 1, "novel")]
            )
        ],
    )
    settings = '{"feedback": 0.5}'
    run = {"run_id": "ann", "model": "ann", "network": "x3d", "settings": settings, "seed": 0}
    put_table(lake, "kowl", "runs", [run])
    put_table(
        lake,
        "kowl",
        "measures",
        [
            measure(0, 0.9),
            measure(1, 0.8),
            measure(3, 0.2),
            measure(4, 0.6),
            measure(1, 0.1, phase="before"),
            measure(1, 0.1, scope="cumulative"),
            measure(1, 0.1, metric="mcc"),
            measure(1, 0.1, view="rotation"),
        ],
    )
    guesses = ["luge", "skiing", "skiing", "archery"]
    put_table(
        lake,
        "kowl",
        "predictions",
        [
            *(guessed(i, "luge", name) for i, name in enumerate(guesses)),
            *(guessed(i, "skiing", "skiing") for i in range(4, 9)),
            *(guessed(i, "skiing", "luge", rank=2) for i in range(4, 9)),
        ],
    )
    put_table(
        lake,
        "condda",
        "sessions",
        [
            {
                "session_id": "s1",
                "test_id": "t1",
                "agent": "threshold",
                "tests": 2,
                "completed": True,
            }
        ],
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
    _put_condda_predictions(lake)
    refresh_catalog(lake)
    return lake


def _put_condda_predictions(lake: Path) -> None:
    """A novel instance taken for class 3, one noticed, and a known one."""
    run = {"run_id": "c1", "protocol": "OND/d/t1"}
    put_table(lake, "condda", "runs", [run | {"model": "threshold"}])
    rows = [
        {"sample_id": name, "step": 1, "class": kind, "role": role, "split": "test"}
        for name, kind, role in (("a", "-1", "novel"), ("b", "-1", "novel"), ("c", "3", "known"))
    ]
    put_table(
        lake, "condda", "samples",
        [{"sample_id": row["sample_id"], "position": 9 + n} for n, row in enumerate(rows)],
    )  # fmt: skip
    put_table(lake, "condda", "splits", [row | {"protocol": "OND/d/t1"} for row in rows])
    put_table(
        lake,
        "condda",
        "predictions",
        [
            {"run_id": "c1", "step": 1, "sample_id": row["sample_id"], "class": row["class"],
             "view": "plain", "rank": 1, "split": "test", "predicted": said, "p_unknown": chance}
            for row, said, chance in zip(
                rows, ("3", "unknown_0", "3"), (0.25, 0.9, 0.1), strict=True
            )
        ],
    )  # fmt: skip
