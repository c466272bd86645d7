"""What the open-world evaluation shows: measures over the increments, feedback, the ablations.

Enters: the tables measures, runs, samples and outputs. Leaves: report sections laid out like the
paper's Figures 7 to 13 and its Table 3, for each protocol.
"""

import json

import numpy as np
import polars as pl

from schemas.tables import PLAIN, SPLIT_NAMES
from tasks.kowl.separation import MOST_SAMPLES, separation
from tasks.report import Html, Read, Section, figure, folded, paragraph, table
from tasks.report.plots import COLOURS, DASHES, bar_panels, line_panels

METRICS = {"accuracy": "Accuracy", "mcc": "Matthews correlation", "nmi": "Mutual information"}
REACTION = {
    "reaction_time_before": "Reaction time, before",
    "reaction_time_inclusive": "Reaction time, inclusive",
}
REDUCTIONS = {
    "classification": "unknown labels merged into one",
    "detection": "known against unknown",
    "recognition": "known labels merged into one, unknown ones kept apart",
}
KNOWN_SETS = {
    "novel_to_evaluator": "what has been released so far counts as known",
    "novel_to_predictor": "what the predictor was given labels of counts as known",
}
# Table 3: Matthews correlation at increment 0 of (train, validation, test).
PAPER_TABLE_3 = {
    ("x3d", "original network"): (0.8701, 0.7067, 0.6893),
    ("x3d", "ann, 1 epoch"): (0.8414, 0.6929, 0.6740),
    ("x3d", "ann, 1 epoch, with evm"): (0.5777, 0.4836, 0.4698),
    ("timesformer", "original network"): (0.8988, 0.7548, 0.7361),
    ("timesformer", "ann, 1 epoch"): (0.8566, 0.7410, 0.7237),
    ("timesformer", "evm"): (0.5552, 0.4995, 0.4938),
}
PAPER_CLASSES = 409


def sections(read: Read) -> list[Section]:
    """Features, predictors over the increments, nuisance transforms and AVA groups."""
    candidates = [_separation(read)]
    measures, runs = read("measures", None, _shown()), predictor_runs(read)
    if measures is not None and measures.height and runs is not None:
        joined = measures.join(runs, on="run_id", maintain_order="left")
        for name, part in by_protocol(joined):
            made = [
                _over_increments(part),
                _at_the_end(part),
                _beside_table_3(part, read),
                _transforms(part),
                _ava(part),
            ]
            candidates += [
                Section(f"{section.title}{name}", section.parts)
                for section in made
                if section is not None
            ]
    return [section for section in candidates if section is not None]


def by_protocol(rows: pl.DataFrame) -> list[tuple[str, pl.DataFrame]]:
    """Rows of each protocol, with what is added to a title where there are several."""
    parts = rows.partition_by("protocol", as_dict=True)
    return [
        (f" ({protocol})" if len(parts) > 1 else "", part)
        for (protocol,), part in sorted(parts.items())
    ]


def predictor_runs(read: Read) -> pl.DataFrame | None:
    """run_id, protocol, extractor, predictor, feedback, seed, line of the predictors' runs.

    A predictor is called by its name and what differs from its preset; `line` has its feedback too.
    """
    runs = read("runs", None, pl.col("network") != "none")
    if runs is None or runs.is_empty():
        return None
    changed = [_settings_text(text) for text in runs["changed"]]
    presets = runs["preset"].n_unique() > 1
    runs = runs.with_columns(
        pl.col("settings").str.json_path_match("$.feedback").cast(pl.Float64).alias("feedback"),
        pl.col("network").alias("extractor"),
        pl.concat_str(
            "model",
            pl.concat_str(pl.lit(" "), "preset") if presets else pl.lit(""),
            pl.Series(changed, dtype=pl.String),
        ).alias("predictor"),
    )
    # Runs that differ in something else are told apart by the first digits of their configuration.
    several = pl.col("config_id").n_unique().over("protocol", "extractor", "predictor", "feedback")
    mark = pl.concat_str(pl.lit(" "), pl.col("config_id").str.slice(0, 6))
    runs = runs.with_columns(
        pl.concat_str("predictor", pl.when(several > 1).then(mark).otherwise(pl.lit("")))
    )
    percent = (pl.col("feedback") * 100).round(1).cast(pl.Int64).cast(pl.String)
    network = pl.concat_str(pl.lit(" on "), "extractor")
    line = pl.concat_str(
        "predictor",
        network if runs["extractor"].n_unique() > 1 else pl.lit(""),
        pl.lit(", feedback "),
        percent,
        pl.lit(" %"),
    )
    return runs.select(
        "run_id", "protocol", "extractor", "predictor", "feedback", "seed", line.alias("line")
    )


def _settings_text(changed: str) -> str:
    """Settings that are not the usual ones, after a name."""
    return "".join(f", {key} {value}" for key, value in json.loads(changed).items())


def _shown() -> pl.Expr:
    """Of the measures those that some section looks at: not groups and transforms at each step."""
    plain = (pl.col("grouping") == "all") & (pl.col("view") == PLAIN)
    ablated = (pl.col("scope") == "cumulative") & (pl.col("reduction") == "classification")
    return plain | ablated


def _styles(measures: pl.DataFrame) -> dict[str, tuple[str, str]]:
    """A colour for each predictor, a dash for each amount of feedback."""
    lines = measures.select("line", "predictor", "feedback").unique().sort("predictor", "feedback")
    predictors = lines["predictor"].unique().sort().to_list()
    amounts = lines["feedback"].unique().sort(descending=True).to_list()
    return {
        line: (
            COLOURS[predictors.index(predictor) % len(COLOURS)],
            DASHES[amounts.index(feedback) % len(DASHES)],
        )
        for line, predictor, feedback in lines.iter_rows()
    }


def _held_out(measures: pl.DataFrame) -> str:
    """The split that most increments have, test before valid; train where no other has features."""
    shown = (pl.col("view") == PLAIN) & (pl.col("scope") == "increment")
    covered = measures.filter(shown).group_by("split").agg(pl.col("step").n_unique())
    order = (pl.col("split") == "train", -pl.col("step").cast(pl.Int64), "split")
    return covered.sort(*order)["split"][0]


def _of(measures: pl.DataFrame, split: str, scope: str) -> pl.DataFrame:
    return measures.filter(
        (pl.col("split") == split)
        & (pl.col("view") == PLAIN)
        & (pl.col("scope") == scope)
        & (pl.col("grouping") == "all")
    )


# ---------------------------------------------------------------- features


def _drawn(clips: pl.DataFrame) -> pl.DataFrame:
    """Clips of labels with two or more, at most as many as `separation` compares."""
    several = clips.filter(pl.len().over("label") > 1)
    if several.height <= MOST_SAMPLES:
        return several
    rows = np.random.default_rng(0).choice(several.height, MOST_SAMPLES, replace=False)
    return several[np.sort(rows)]


def _separation(read: Read) -> Section | None:
    """Of clips the labels by the lists, of other videos those by what lies beside them."""
    samples = read("samples", ["sample_id", "class"], pl.col("digest").is_not_null())
    backbones = read("runs", ["run_id", "model", "changed"], pl.col("protocol").is_null())
    shown = read("outputs", ["run_id", "sample_id"], pl.col("view") == PLAIN)
    if samples is None or backbones is None or shown is None:
        return None
    labels = samples.drop_nulls().rename({"class": "label"})
    rows = []
    for run_id, model, changed in backbones.sort("model", "changed", "run_id").iter_rows():
        ids = shown.filter(pl.col("run_id") == run_id).select("sample_id")
        # A vector has thousands of numbers: only those of the samples that count are read.
        counted = _drawn(ids.join(labels, on="sample_id").sort("sample_id"))
        among = pl.col("sample_id").is_in(counted["sample_id"].implode())
        where = (pl.col("view") == PLAIN) & (pl.col("run_id") == run_id) & among
        features = read("outputs", ["sample_id", "features"], where)
        assert features is not None
        plain = features.join(counted, on="sample_id").sort("sample_id")
        if plain.is_empty():
            continue
        vectors = plain["features"].list.to_array(plain["features"].list.len()[0]).to_numpy()
        measures = separation(vectors, plain["label"])
        if measures:
            rows.append({"extractor": f"{model}{_settings_text(changed)}", **measures._asdict()})
    if not rows:
        return None
    note = paragraph(
        "Before any predictor: how often the nearest other clip (by cosine) has the same label, "
        "by chance and in fact, and how well cosine similarity tells pairs of one class from pairs "
        "of two (AUROC; chance is 0.5). Classes with one clip are left out."
    )
    return Section("Do features separate the classes?", [note, table(pl.DataFrame(rows))])


# ---------------------------------------------------------------- increments


def _over_increments(measures: pl.DataFrame) -> Section:
    split = _held_out(measures)
    styles = _styles(measures)
    rows = _of(measures, split, "increment")
    parts: list[Html] = [
        paragraph(
            f"Clips of the split {split}. Hollow points stand before the feedback of an increment, "
            "full ones after it, half a step later. Every sample has been predicted before any of "
            "its increment's labels were given."
        )
    ]
    for known_set, meaning in KNOWN_SETS.items():
        figures = [
            figure(
                line_panels(_panels(rows, known_set, reduction), styles, "Increment"),
                f"{reduction.capitalize()}: {words}; {meaning}",
            )
            for reduction, words in REDUCTIONS.items()
        ]
        if known_set == "novel_to_evaluator":
            parts += figures
        else:
            parts.append(folded(f"The same where {meaning}", *figures))
    reaction = rows.filter(
        pl.col("metric").is_in(list(REACTION))
        & (pl.col("known_set") == "novel_to_evaluator")
        & (pl.col("phase") == "before")
        & pl.col("value").is_not_null()
    )
    if reaction.height:
        drawn = reaction.select(
            pl.col("metric").replace_strict(REACTION).alias("panel"),
            "line",
            "seed",
            pl.col("step").cast(pl.Float64).alias("x"),
            pl.col("value").alias("y"),
            pl.lit(True).alias("hollow"),
        ).sort("panel", "line", "seed", "x")
        parts.append(
            figure(
                line_panels(drawn, styles, "Increment", 2),
                "Reaction time (equation 1): 0 = the first novel sample was noticed, 1 = none was; "
                "with novel samples before the detection counted, or up to and with it",
            )
        )
    return Section("Predictors over the increments", parts)


def _panels(rows: pl.DataFrame, known_set: str, reduction: str) -> pl.DataFrame:
    after = (pl.col("phase") == "after").cast(pl.Float64) / 2
    return (
        rows.filter(
            (pl.col("known_set") == known_set)
            & (pl.col("reduction") == reduction)
            & pl.col("metric").is_in(list(METRICS))
            & pl.col("value").is_not_null()
        )
        .select(
            pl.col("metric").replace_strict(METRICS).alias("panel"),
            "line",
            "seed",
            (pl.col("step") + after).alias("x"),
            pl.col("value").alias("y"),
            (pl.col("phase") == "before").alias("hollow"),
        )
        .sort("panel", "line", "seed", "x")
    )


def _at_the_end(measures: pl.DataFrame) -> Section:
    """All counts after feedback of all increments, one row a run."""
    last = measures["step"].max()
    wide = (
        measures.filter(
            (pl.col("step") == last)
            & (pl.col("scope") == "cumulative")
            & (pl.col("grouping") == "all")
            & (pl.col("view") == PLAIN)
            & (pl.col("known_set") == "novel_to_evaluator")
            & pl.col("metric").is_in(list(METRICS))
        )
        .group_by("extractor", "predictor", "feedback", "split", "reduction", "metric")
        .agg(pl.col("value").mean())
        .with_columns(pl.concat_str("reduction", pl.lit(" "), "metric").alias("column"))
        .pivot(
            "column",
            index=["extractor", "predictor", "feedback", "split"],
            values="value",
            sort_columns=True,
        )
        .sort("split", "extractor", "predictor", "feedback")
    )
    split = _held_out(measures)
    together = _panels(_of(measures, split, "cumulative"), "novel_to_evaluator", "classification")
    return Section(
        "All increments so far",
        [
            paragraph(
                "Predictions after feedback of all increments up to each one together; known is "
                "what had been released at the time."
            ),
            figure(
                line_panels(together, _styles(measures), "Increment"),
                f"Classification, split {split}, cumulative",
            ),
            table(
                wide,
                "After the last increment, mean over seeds",
                groups=[("", 4), *((name, len(METRICS)) for name in sorted(REDUCTIONS))],
                names={name: name.split(" ")[-1] for name in wide.columns[4:]},
            ),
        ],
    )


def _beside_table_3(measures: pl.DataFrame, read: Read) -> Section | None:
    classes = read("classes", None, pl.col("protocol") == measures["protocol"][0])
    extractors = set(measures["extractor"])
    if classes is None or not extractors & {extractor for extractor, _ in PAPER_TABLE_3}:
        return None
    if (classes["increment_introduced"] == 0).sum() != PAPER_CLASSES:
        return None
    ours = (
        measures.filter(
            (pl.col("step") == 0)
            & (pl.col("scope") == "increment")
            & (pl.col("view") == PLAIN)
            & (pl.col("grouping") == "all")
            & (pl.col("reduction") == "raw")
            & (pl.col("metric") == "mcc")
        )
        .group_by("extractor", "predictor", "split")
        .agg(pl.col("value").mean())
        .pivot("split", index=["extractor", "predictor"], values="value")
        .select("extractor", pl.col("predictor").alias("method"), *SPLIT_NAMES)
    )
    paper = pl.DataFrame(
        [(*key, *row) for key, row in PAPER_TABLE_3.items() if key[0] in extractors],
        schema=["extractor", "method", *SPLIT_NAMES],
        orient="row",
    ).with_columns(pl.concat_str(pl.lit("paper: "), "method").alias("method"))
    both = pl.concat([ours.cast(paper.schema), paper]).sort("extractor", "method")
    return Section("Beside the paper's Table 3", [table(both, "Matthews correlation, increment 0")])


# ---------------------------------------------------------------- ablations


def _colours(measures: pl.DataFrame) -> dict[str, str]:
    return {line: COLOURS[n % len(COLOURS)] for n, line in enumerate(_styles(measures))}


def _ablated(measures: pl.DataFrame) -> pl.DataFrame:
    """Accuracy of classification over all predictions after feedback."""
    return measures.filter(
        (pl.col("step") == measures["step"].max())
        & (pl.col("scope") == "cumulative")
        & (pl.col("reduction") == "classification")
        & (pl.col("known_set") == "novel_to_evaluator")
        & (pl.col("metric") == "accuracy")
    )


def _transforms(measures: pl.DataFrame) -> Section | None:
    rows = _ablated(measures).filter(pl.col("grouping") == "all", pl.col("split") != "train")
    if rows["view"].n_unique() < 2:
        return None
    bars = (
        rows.group_by("split", "view", "line")
        .agg(pl.col("value").mean())
        .sort("split", "view", "line")
        .select(
            pl.col("split").alias("panel"),
            pl.col("view").alias("name"),
            pl.col("line").alias("kind"),
            "value",
        )
    )
    note = paragraph(
        "The same clips under visual transforms, which change no label: predictors learned from "
        "plain clips only. Classification accuracy over all increments."
    )
    drawn = figure(bar_panels(bars, _colours(measures), "Accuracy"), "Accuracy by transform")
    return Section("Nuisance transforms", [note, drawn])


def _ava(measures: pl.DataFrame) -> Section | None:
    rows = _ablated(measures).filter(
        (pl.col("grouping") != "all") & (pl.col("split") == _held_out(measures))
    )
    if rows.is_empty():
        return None
    bars = (
        rows.group_by("grouping", "subset", "line")
        .agg(pl.col("value").mean(), pl.col("n").first())
        .with_columns(
            pl.concat_str(
                "subset", pl.lit(" (n = "), pl.col("n").cast(pl.String), pl.lit(")")
            ).alias("name")
        )
        .sort("grouping", pl.col("subset").cast(pl.Int64, strict=False), "subset", "line")
        .select(
            pl.col("grouping").str.replace_all("_", " ").alias("panel"),
            "name",
            pl.col("line").alias("kind"),
            "value",
        )
    )
    note = paragraph(
        "Clips by what their AVA key frames show (PM person movement, OM object manipulation, PI "
        "person interaction; area of the people in thirds). Classification accuracy over all "
        "increments."
    )
    drawn = figure(bar_panels(bars, _colours(measures), "Accuracy"), "Accuracy by AVA subset")
    return Section("What the clips show", [note, drawn])
