"""What AVA-Kinetics says of a clip: the subsets of KOWL-718's ablation (docs/kowl.md, rule 16).

Enters: an AVA-Kinetics list and the AVA action list. Leaves: groups of key frames, then of clips.
"""

import re

import polars as pl

from schemas.errors import SourceError
from tasks.kowl.evaluator import GROUPS

NOT_ANNOTATED = "N/A"
AVA_ROWS = {
    "video_id": pl.String,
    "second": pl.Float64,
    **dict.fromkeys(("x1", "y1", "x2", "y2"), pl.Float64),
    "action_id": pl.Int32,
}
AVA_TYPES = {"PERSON_MOVEMENT": "PM", "OBJECT_MANIPULATION": "OM", "PERSON_INTERACTION": "PI"}
AVA_GROUPINGS = ("action_type", "actions", "area", "people")
_AVA_LABEL = re.compile(r'name:\s*"([^"]*)"\s+label_id:\s*(\d+)\s+label_type:\s*(\w+)')


def read_ava_rows(data: bytes) -> pl.DataFrame:
    """An AVA-Kinetics list, plain or gzipped; two fields are a key frame without people."""
    return pl.read_csv(data, has_header=False, schema=AVA_ROWS)


def read_ava_vocabulary(text: str) -> pl.DataFrame:
    """action_id, action, action_type (PM, OM, PI) of an AVA action list (pbtxt)."""
    actions = [
        (int(number), name, AVA_TYPES.get(kind)) for name, number, kind in _AVA_LABEL.findall(text)
    ]
    schema = {"action_id": pl.Int32, "action": pl.String, "action_type": pl.String}
    vocabulary = pl.DataFrame(actions, schema=schema, orient="row")
    if vocabulary.is_empty() or vocabulary["action_type"].null_count():
        raise SourceError(
            f"AVA vocabulary: {vocabulary.height} actions, "
            f"{vocabulary['action_type'].null_count()} of no type in {sorted(AVA_TYPES)}; "
            "expected the action list that AVA publishes"
        )
    return vocabulary


def ava_groups(ava_rows: pl.DataFrame, vocabulary: pl.DataFrame) -> pl.DataFrame:
    """(video_id, second, grouping, subset) of each key frame (KOWL-718's ablation).

    action_type: PM, OM, PI, each that occurs; actions: distinct actions; people: distinct boxes;
    area: mean area of the distinct boxes, by thirds of the key frames with people in ascending
    order (SM, AVG, LG; equal areas by id and second). Without people action_type and area are N/A.
    """
    frame = ["video_id", "second"]
    unknown = ava_rows.join(vocabulary, on="action_id", how="anti")["action_id"].drop_nulls()
    if len(unknown):
        raise SourceError(f"AVA rows name action {unknown[0]}, which the vocabulary does not have")
    people = ava_rows.filter(pl.col("x1").is_not_null())
    boxes = people.select(*frame, "x1", "y1", "x2", "y2").unique()
    width, height = pl.col("x2") - pl.col("x1"), pl.col("y2") - pl.col("y1")
    sizes = (
        boxes.sort(boxes.columns)
        .group_by(frame, maintain_order=True)
        .agg(pl.len().alias("people"), (width * height).mean().alias("mean"))
        .sort("mean", *frame)
        .with_columns(
            pl.when(pl.int_range(pl.len()) < pl.len() // 3)
            .then(pl.lit("SM"))
            .when(pl.int_range(pl.len()) < 2 * pl.len() // 3)
            .then(pl.lit("AVG"))
            .otherwise(pl.lit("LG"))
            .alias("third")
        )
    )
    acted = people.select(*frame, "action_id").unique().join(vocabulary, on="action_id")
    key_frames = ava_rows.select(frame).unique()
    actions = acted.group_by(frame).agg(pl.len().alias("actions"))
    table = key_frames.join(sizes, on=frame, how="left").join(actions, on=frame, how="left")
    types = key_frames.join(acted.select(*frame, "action_type").unique(), on=frame, how="left")
    parts = {
        "action_type": types.select(*frame, pl.col("action_type").fill_null(NOT_ANNOTATED)),
        "actions": table.select(*frame, pl.col("actions").fill_null(0).cast(pl.String)),
        "area": table.select(*frame, pl.col("third").fill_null(NOT_ANNOTATED)),
        "people": table.select(*frame, pl.col("people").fill_null(0).cast(pl.String)),
    }
    return pl.concat(
        part.select(
            *frame, pl.lit(grouping).alias("grouping"), pl.col(part.columns[2]).alias("subset")
        )
        for grouping, part in parts.items()
    ).sort(*frame, "grouping", "subset")


def groups_of_clips(key_frames: pl.DataFrame, clips: pl.DataFrame) -> pl.DataFrame:
    """`GROUPS` for `OpenWorldRun`: each clip's groups are those of the key frames inside it.

    `key_frames` as `ava_groups` gives them; `clips` has sample_id, youtube_id, time_start and
    time_end. A clip without a key frame is N/A in every grouping.
    """
    inside = pl.col("second").is_between(pl.col("time_start"), pl.col("time_end"))
    groups = (
        clips.select("sample_id", "youtube_id", "time_start", "time_end")
        .join(key_frames, left_on="youtube_id", right_on="video_id")
        .filter(inside)
        .select(list(GROUPS))
        .unique()
    )
    rest = clips.select("sample_id").join(groups, on="sample_id", how="anti")
    absent = rest.join(pl.DataFrame({"grouping": list(AVA_GROUPINGS)}), how="cross")
    absent = absent.with_columns(pl.lit(NOT_ANNOTATED).alias("subset"))
    return pl.concat([groups, absent]).sort(list(GROUPS))
