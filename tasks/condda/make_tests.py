"""CONDDA and OND tests out of our own tables: labelled samples in, test files in domain `novelty`.

In: a frame with sample_id, class, split and role (`known` or `novel`; other roles are left out), as
`from_lake` makes it of the shared `splits`. Out: `<out>/<PROTOCOL>/novelty/` with `test_ids.csv`,
`<test>_single_df.csv` and `<test>_metadata.json` in the published layout (docs/condda.md, rule 3),
readable by `test_files.TestLibrary`, and a frame of `MADE`.

A test: rows of known classes up to the red light, from there on known and novel rows mixed. Known
classes in alphabetical order are the labels 1..K, novel ones -1, -2, ... the same in every test.
Known rows are drawn from all known samples alike, novel rows evenly from the test's novel classes;
no sample stands twice in a test. Draws depend on seed, number of the test and sample ids only.

A test does not give itself away: its instances have names that tell their place alone, the row of
the change is drawn, the metadata has neither that row nor the number of classes among what agents
may see, and the test's id does not tell the seed, by which all of it could be drawn again.
"""

import csv
import hashlib
import io
import json
import secrets
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from schemas.condda import TestSettings
from schemas.errors import ConfigError, SourceError
from storage.atomic import write_bytes
from tasks.condda.domains import NOVELTY, RED_LIGHT
from tasks.condda.test_files import CELL_EDGES, METADATA, TRUTH

LABELLED = ("sample_id", "class", "split", "role")
MADE: dict[str, pl.DataType | type[pl.DataType]] = {
    "test_id": pl.String,
    "protocol": pl.String,
    "rows": pl.Int64,
    "rounds": pl.Int64,
    "red_light_row": pl.Int64,
    "red_light": pl.String,
    "first_novel_row": pl.Int64,
    "novel_rows": pl.Int64,
    "known_classes": pl.Int64,
    "novel_classes": pl.List(pl.String),
}


def known_class_names(labelled: pl.DataFrame) -> tuple[str, ...]:
    """Known classes in the order of their columns: label 1 is the first."""
    return _class_names(labelled, "known")


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def make_tests(labelled: pl.DataFrame, out: Path, settings: TestSettings) -> pl.DataFrame:
    """Write the tests below `out`; gives one row of `MADE` for each."""
    samples = _checked(labelled, settings)
    known = known_class_names(samples)
    novel = _class_names(samples, "novel")
    if not known or not novel:
        raise SourceError("tests need samples with the role known and samples with the role novel")
    codes = {name: place for place, name in enumerate(known, start=1)}
    codes |= {name: -place for place, name in enumerate(novel, start=1)}
    drawn_from = samples.filter(pl.col("split").is_in(settings.splits)).with_columns(
        pl.col("class").replace_strict(codes, return_dtype=pl.Int64).alias("label")
    )
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    tests = [_draw(drawn_from, seed, number, settings) for number in range(settings.tests)]
    folder = Path(out) / settings.kind / NOVELTY.name
    made = []
    for number, truth in enumerate(tests):
        tag = int(_digest("tests", seed)[:6], 16)
        test = f"{settings.kind}.{settings.group}.{number}.{tag}"
        metadata = _metadata(truth, known, novel, settings) | {"seed": seed}
        text = io.StringIO()
        lines = csv.writer(text, quotechar=NOVELTY.quotechar, lineterminator="\n")
        lines.writerows([truth.columns, *truth.rows()])
        write_bytes(folder / f"{test}{TRUTH}", text.getvalue().encode())
        write_bytes(folder / f"{test}{METADATA}", json.dumps(metadata, indent=2).encode())
        made.append(_described(test, truth, metadata))
    ids = "".join(f"{row['test_id']}\n" for row in made)
    write_bytes(folder / "test_ids.csv", ids.encode())
    return pl.DataFrame(made, schema=MADE)


def _class_names(labelled: pl.DataFrame, role: str) -> tuple[str, ...]:
    return tuple(labelled.filter(pl.col("role") == role)["class"].unique().sort())


def _checked(labelled: pl.DataFrame, settings: TestSettings) -> pl.DataFrame:
    """Known and novel samples by id; one row a sample, one role a class, ids that a CSV can hold.

    Ids are sorted as bytes, so the order is that of every machine.
    """
    lacking = [name for name in LABELLED if name not in labelled.columns]
    if lacking:
        raise SourceError(f"labelled samples have no column {lacking[0]}; expected {LABELLED}")
    used = pl.col("role").is_in(("known", "novel")) & pl.col("class").is_not_null()
    samples = labelled.select(LABELLED).filter(used).sort("sample_id")
    twice = samples.filter(pl.col("sample_id").is_duplicated())["sample_id"]
    if len(twice):
        raise SourceError(f"sample {twice[0]!r} stands twice; give each sample one row")
    both = set(_class_names(samples, "known")) & set(_class_names(samples, "novel"))
    if both:
        raise SourceError(
            f"class {min(both)!r} has known and novel samples; give all samples of a class one role"
        )
    ids = samples["sample_id"]
    bad = ids.filter(
        ids.str.contains(r"[,|\x00-\x1f\x7f\u0085\u2028\u2029\"]")
        | (ids.str.strip_chars(CELL_EDGES) != ids)
        | (ids.str.strip_chars("\"',.") == "")
        | (ids.str.len_chars() > 512)
    )
    if len(bad) and not settings.anonymous:
        raise SourceError(
            f"sample id {bad[0][:80]!r} cannot stand in a test file; use anonymous ids"
        )
    return samples


def _draw(samples: pl.DataFrame, seed: int, number: int, settings: TestSettings) -> pl.DataFrame:
    """Ground truth of one test, columns of the domain."""
    rng = np.random.default_rng([seed, number])
    rows = settings.rows
    start = int(rng.integers(*settings.change_rows, endpoint=True))
    novel_rows = settings.novel_rows(start)
    known = samples.filter(pl.col("label") > 0)
    wanted = rows - novel_rows
    if known.height < wanted:
        raise ConfigError(
            f"a test needs {wanted} samples of known classes, splits {_named(settings.splits)} "
            f"have {known.height}; lower rows or add splits"
        )
    picked_known = known[rng.choice(known.height, wanted, replace=False)]
    picked_novel = _draw_novel(samples, rng, novel_rows, settings)
    after = pl.concat([picked_known[start:], picked_novel])
    chosen = pl.concat([picked_known[:start], after[rng.permutation(after.height)]])
    ids = chosen["sample_id"]
    if settings.anonymous:
        ids = pl.Series([_digest("row", seed, number, row)[:16] for row in range(rows)])
    return pl.DataFrame(
        {
            "instance_id": ids,
            "novel": (chosen["label"] < 0).cast(pl.Int64),
            "detection": (np.arange(rows) >= start).astype(np.int64),
            "classification": chosen["label"],
            "sample_id": chosen["sample_id"],
        }
    ).select(NOVELTY.columns)


def _draw_novel(
    samples: pl.DataFrame, rng: np.random.Generator, novel_rows: int, settings: TestSettings
) -> pl.DataFrame:
    """Samples of the test's novel classes, as many of one as of another, give or take one."""
    share, more = divmod(novel_rows, settings.novel_classes)
    needed = share + (more > 0)
    counts = samples.filter(pl.col("label") < 0).group_by("label").len()
    enough = counts.filter(pl.col("len") >= needed)["label"].sort(descending=True).to_numpy()
    if len(enough) < settings.novel_classes:
        most = cast(int, counts["len"].max() or 0)
        raise ConfigError(
            f"{len(enough)} novel classes have the {needed} samples that a test needs of each in "
            f"splits {_named(settings.splits)}, {settings.novel_classes} are wanted; the largest "
            f"has {most}: lower rows, novelty_mix or novel_classes, or add splits"
        )
    classes = rng.choice(enough, settings.novel_classes, replace=False)
    picked = []
    for place, label in enumerate(classes.tolist()):
        of_class = samples.filter(pl.col("label") == label)
        size = share + (place < more)
        picked.append(of_class[rng.choice(of_class.height, size, replace=False)])
    return pl.concat(picked)


def _named(splits: tuple[str, ...]) -> str:
    return ", ".join(splits)


def _metadata(
    truth: pl.DataFrame, known: tuple[str, ...], novel: tuple[str, ...], settings: TestSettings
) -> dict[str, Any]:
    """Agents see what `domains.SHOWN_METADATA` names, which tells nothing of this test's truth."""
    present = truth.filter(pl.col("novel") == 1)["classification"].unique().sort(descending=True)
    start = int(truth["detection"].arg_max() or 0)
    return {
        "protocol": settings.kind,
        "domain": NOVELTY.name,
        "known_classes": len(known),
        "known_class_names": list(known),
        "novel_classes": len(present),
        "novel_class_names": {str(label): novel[-label - 1] for label in present},
        "round_size": settings.round_size,
        "n_rounds": -(-settings.rows // settings.round_size),
        "detection": start,
        RED_LIGHT: truth["instance_id"][start],
        "prop_novel": settings.novelty_mix,
        "feedback_max_ids": settings.feedback_max_ids,
        "anonymous": settings.anonymous,
        "threshold": 0.5,
    }


def _described(test: str, truth: pl.DataFrame, metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "test_id": test,
        "protocol": metadata["protocol"],
        "rows": truth.height,
        "rounds": metadata["n_rounds"],
        "red_light_row": metadata["detection"],
        "red_light": metadata[RED_LIGHT],
        "first_novel_row": int(truth["novel"].arg_max() or 0),
        "novel_rows": int(truth["novel"].sum()),
        "known_classes": metadata["known_classes"],
        "novel_classes": list(metadata["novel_class_names"].values()),
    }
