"""Which rows a protocol has, as keys: a run is true of the rows that it was made on.

Enters: `splits` and the `samples` they name. Leaves: `protocols`, one row each, with a key of the
train and valid rows (what a model is fitted on) and a key of all rows (what its numbers are of).
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from schemas.config import Settings
from schemas.tables import PROTOCOLS, SAMPLES
from storage.pieces import Part
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.runs import as_json

FITTED = ("train", "valid")
_ROW = ("sample_id", "step", "class", "label", "split", "role", "subset", "digest", "sequence")


def rows_key(rows: pl.DataFrame) -> str:
    """32 hex digits over the rows of one protocol; their order does not matter."""
    text = rows.select(_ROW).sort("sample_id", "step").write_csv(include_header=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def protocol_rows(
    splits: pl.DataFrame,
    samples: pl.DataFrame,
    definitions: Mapping[str, Mapping[str, Any]],
    *,
    with_content: bool = False,
) -> pl.DataFrame:
    """The table `protocols` of these splits; see `plan_protocols` for `with_content`."""
    keyed = pl.col("digest").is_not_null() if with_content else pl.lit(True)
    content = samples.select("sample_id", "digest", "sequence")
    joined = splits.join(content, on="sample_id", how="left")
    rows = [
        (
            name,
            as_json(definitions.get(name, {})),
            part.height,
            rows_key(part.filter(keyed, pl.col("split").is_in(FITTED))),
            rows_key(part.filter(keyed)),
        )
        for (name,), part in joined.group_by("protocol")
    ]
    return pl.DataFrame(rows, schema=PROTOCOLS.polars_schema, orient="row").sort("protocol")


def plan_protocols(
    splits: Sequence[Part],
    samples: Sequence[Part],
    definitions: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    with_content: bool = False,
) -> list[Shard]:
    """One shard for each part of the splits; `definitions` say by protocol what it is made by.

    `with_content` leaves samples without a digest out of the keys: no model can see them.
    """
    defined = dict(definitions or {})
    rule = {"with_content": True} if with_content else {}
    return [
        Shard(
            part.shard,
            parts=(part, *samples),
            about={
                "definitions": {part.shard: defined[part.shard]}
                if part.shard in defined
                else defined,
                **rule,
            },
        )
        for part in splits
    ]


@stage(writes=(PROTOCOLS,), version=1)
def key_protocols(shard: Shard, settings: Settings) -> Produced:
    """Name the rows of each protocol by keys."""
    splits = shard.read("splits")
    columns = ["sample_id", "digest", "sequence"]
    in_splits = pl.col("sample_id").is_in(splits["sample_id"].unique().implode())
    parts = [
        part.read(columns).filter(in_splits) for part in shard.parts if part.table == "samples"
    ]
    samples = pl.concat([SAMPLES.empty().select(columns), *parts])
    with_content = bool(shard.about.get("with_content"))
    rows = protocol_rows(splits, samples, shard.about["definitions"], with_content=with_content)
    return Produced({"protocols": rows}, rows.height)


def protocol_keys(build: Build) -> dict[str, dict[str, str]]:
    """`fit_key` and `data_key` of each protocol of this build, by its name."""
    return {
        row["protocol"]: {name: row[name] for name in ("fit_key", "data_key")}
        for row in build.read("protocols").iter_rows(named=True)
    }
