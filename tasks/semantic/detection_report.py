"""Networks of semantic anomalies laid out like the paper's tables, its numbers beside ours.

Enters: the shared tables metrics, runs, protocols and training. Leaves: report sections. Numbers
are percent. A trial's number is the mean over the last epochs that were scored (rule 14 of
docs/semantic.md), then come mean and deviation over seeds, by n - 1; the Average row is the mean
over members, its deviation that over seeds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from schemas.semantic import LAST_EPOCHS, ODIN_MEASURES, TEST_MEASURES
from tasks.evaluation.passing import NETWORK
from tasks.models.odin import Odin
from tasks.models.pictures import PictureTraining
from tasks.models.pixel_gaussian import PixelGaussian
from tasks.report import Html, Read, Section, counted, folded, heading, paragraph, table
from tasks.semantic import training_report
from tasks.semantic.trials import trials_of

CONVENTION = "semantic"
PAPER = Path(__file__).with_name("paper_results.csv")
# The network without an auxiliary task, and its name in the paper's numbers.
PLAIN, PAPER_PLAIN = "classifier", "none"
# Models that are compared with another one: CPC with its own network without the second loss.
PARTNERS = {"cpc": "light_classifier"}
WITHOUT_TASK = (PLAIN, *PARTNERS.values())
# Experiments of the paper in which a model stands beside the plain one; the released code of
# rotation does not rotate, so that both of ours stand beside the same numbers.
EXPERIMENTS = {
    "classifier": "rotation",
    "rotation": "rotation",
    "rotation_released": "rotation",
    "light_classifier": "cpc",
    "cpc": "cpc",
    "centre_mask": "centre_mask",
}
AVERAGE = "Average"
# Runs of the model odin stand among the scores of the network that they go over.
ODIN_STEP = "odin"
# Columns of the paper's tables: how they are called in the csv, score and metric here, title.
COLUMNS = {
    "msp": ("msp", "average_precision", "MSP"),
    "odin": (ODIN_STEP, "average_precision", "ODIN"),
    "accuracy": ("msp", "acc", "accuracy"),
}
MEASURE_NAMES = {
    "msp": "average precision of MSP:",
    "odin": "that of ODIN:",
    "accuracy": "accuracy:",
}
CONFIDENCE = 0.95
FEWEST_PAIRS = 3


def sections(read: Read) -> list[Section]:
    """Tables beside the paper's, what the second task changed, all scores, and training."""
    networks = (pl.col("convention") == CONVENTION) & (pl.col("model") != PixelGaussian.name)
    metrics = read("metrics", None, networks & (pl.col("split") == "test"))
    training, runs, protocols = read("training"), read("runs"), read("protocols")
    if metrics is None or metrics.is_empty() or training is None:
        return []
    if runs is None or protocols is None:
        return []
    run_names = named_runs(runs, protocols)
    numbers = measured(metrics, run_names)
    parts = [
        _beside(numbers, training),
        _changed(numbers),
        _ranking(numbers),
        training_report.section(training.join(run_names, on="run_id")),
    ]
    return [section for section in parts if section is not None]


def named_runs(runs: pl.DataFrame, protocols: pl.DataFrame) -> pl.DataFrame:
    """run_id, subset, member, network, model, score, seed: what a table of the report calls a run.

    `network` has the preset and the settings that differ from it, `model` those that only this
    model has. ODIN stands under the model of its base, and `score` is its name, else null.
    """
    trials = {row["protocol"]: row for row in trials_of(protocols).iter_rows(named=True)}
    by_id = {row["run_id"]: row for row in runs.iter_rows(named=True)}
    rows = []
    for key, run in by_id.items():
        if run["model"] == PixelGaussian.name or run["protocol"] not in trials:
            continue
        base: dict[str, Any] | None = run
        score = None
        if run["model"] == Odin.name:
            base = by_id.get(run["base_runs"][0])
            odin_changes = {n: v for n, v in json.loads(run["changed"]).items() if n != "base"}
            score = ", ".join([ODIN_STEP, *_setting_texts(odin_changes)])
        if base is None:
            continue
        changed = json.loads(base["changed"])
        training_settings = {*PictureTraining.model_fields, NETWORK}
        network_changes = {
            name: value for name, value in changed.items() if name in training_settings
        }
        model_changes = {
            name: value for name, value in changed.items() if name not in network_changes
        }
        trial = trials[run["protocol"]]
        rows.append(
            (
                key,
                trial["subset"],
                trial["member"],
                ", ".join(
                    [f"{base['network']} {base['preset']}", *_setting_texts(network_changes)]
                ),
                ", ".join([base["model"], *_setting_texts(model_changes)]),
                score,
                run["seed"],
            )
        )
    columns = ("run_id", "subset", "member", "network", "model", "score")
    schema = dict.fromkeys(columns, pl.String) | {"seed": pl.Int32}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _setting_texts(changed: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in changed.items():
        if isinstance(value, dict):
            yield from _setting_texts(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} {value}"


def measured(metrics: pl.DataFrame, run_names: pl.DataFrame) -> pl.DataFrame:
    """subset, member, network, model, seed, score, metric, value in percent."""
    return (
        metrics.select("run_id", pl.col("score").alias("score_file"), "metric", "value")
        .join(run_names, on="run_id")
        .select(
            "subset",
            "member",
            "network",
            "model",
            "seed",
            pl.coalesce("score", "score_file").alias("score"),
            "metric",
            (100 * pl.col("value")).alias("value"),
        )
        .sort(pl.all())
    )


def with_average(runs: pl.DataFrame) -> pl.DataFrame:
    """Mean and deviation over seeds for each member, and of the mean over members."""
    key = [name for name in runs.columns if name not in ("member", "seed", "value")]
    average = runs.group_by(*key, "seed", maintain_order=True).agg(
        pl.lit(AVERAGE).alias("member"), pl.col("value").mean()
    )
    return (
        pl.concat([runs, average.select(runs.columns)])
        .group_by(*key, "member", maintain_order=True)
        .agg(
            pl.col("value").mean().alias("mean"),
            pl.col("value").std().alias("deviation"),
            pl.col("seed").n_unique().cast(pl.Int64).alias("seeds"),
        )
    )


def _columns(runs: pl.DataFrame, suffix: str) -> pl.DataFrame:
    """The runs' numbers under the names of the paper's columns, in `column`."""
    parts = [
        runs.filter(score=score, metric=metric + suffix).with_columns(pl.lit(name).alias("column"))
        for name, (score, metric, _) in COLUMNS.items()
    ]
    return pl.concat(parts).drop("score", "metric")


def _mean_text(mean: str = "mean", deviation: str = "deviation") -> pl.Expr:
    text = pl.concat_str(_digits(mean), pl.lit(" ± "), _digits(deviation))
    return pl.when(pl.col(deviation).is_null()).then(_digits(mean)).otherwise(text)


def _digits(name: str) -> pl.Expr:
    return pl.col(name).map_elements(lambda value: f"{value:.2f}", return_dtype=pl.String)


# ---------------------------------------------------------------- beside the paper


def _beside(runs: pl.DataFrame, training: pl.DataFrame) -> Section | None:
    evaluations = evaluations_of(training)
    rule = (
        f"A number is the mean over the last {evaluations} epochs; the paper's over the last 10."
        if evaluations != "1"
        else "A number is that of the network after its last epoch, where the paper takes the mean "
        "over the last 10 (`--train.evaluations 10`)."
    )
    parts: list[Html] = [
        paragraph(
            "Average precision and accuracy of the normal classes in percent, mean ± deviation "
            f"over seeds. {rule} Average: mean over the members, with the deviation of that mean "
            "over seeds. A detector that guesses gets the skew. The paper's networks are "
            "WRN-28-10 trained for 200 epochs on all of the data: beside ours of preset `small`, "
            "or on fewer pictures, they stand for orientation only."
        )
    ]
    skew = runs.filter(metric="skew").group_by("subset", "member").agg(pl.col("value").first())
    last, final = _columns(runs, LAST_EPOCHS), _columns(runs, "")
    for (subset, network), of_network in last.group_by("subset", "network", maintain_order=True):
        parts.append(heading(f"{subset}, network {network}"))
        subset_skew = skew.filter(subset=subset)
        for pair in _pairs(of_network["model"].unique().to_list()):
            parts.append(paper_table(of_network, subset_skew, pair))
            final_numbers = final.filter(subset=subset, network=network)
            if evaluations != "1" and not final_numbers.is_empty():
                final_table = paper_table(final_numbers, subset_skew, pair)
                parts.append(folded("The same of the final networks alone", final_table))
    return Section("Networks beside the paper", parts) if len(parts) > 1 else None


def evaluations_of(training: pl.DataFrame) -> str:
    """How many epochs of each network were scored on test: `10`, or `1 to 10`."""
    counts = (
        training.filter(pl.col("measure").is_in([*TEST_MEASURES, *ODIN_MEASURES]))
        .drop_nulls("value")
        .group_by("run_id", "measure")
        .len()["len"]
    )
    least, most = cast(int, counts.min()), cast(int, counts.max())
    return f"{most}" if least == most else f"{least} to {most}"


def _pairs(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Each model beside the one without its task, as the paper's tables have them."""
    others = sorted(set(names) - set(WITHOUT_TASK))
    paired = {partner_of(name) for name in others}
    unpaired = [name for name in WITHOUT_TASK if name in names and name not in paired]
    pairs = [tuple(n for n in (partner_of(name), name) if n in names) for name in others]
    return pairs + [(name,) for name in unpaired]


def partner_of(model: str) -> str:
    """The model without a second task that one is compared with, whatever settings it names."""
    return PARTNERS.get(model.partition(",")[0], PLAIN)


def paper_table(runs: pl.DataFrame, skew: pl.DataFrame, pair: Sequence[str]) -> Html:
    """For each held-out member and their average a row of ours, and one of the paper's below."""
    ours = with_average(runs.filter(pl.col("model").is_in(pair)))
    experiment = EXPERIMENTS.get(pair[-1], "")
    paper = pl.read_csv(PAPER).rename({"score": "column", "auxiliary": "model"})
    paper = paper.filter(subset=ours["subset"][0], experiment=experiment)
    order = paper["member"].unique(maintain_order=True).to_list()
    if set(order) - set(ours["member"]):  # the paper's mean over all members is not of these
        paper = paper.filter(pl.col("member") != AVERAGE)
    tasks = {name: PAPER_PLAIN if name in WITHOUT_TASK else experiment for name in pair}
    kinds = {
        "ours": _wide(ours, {task: task for task in pair}),
        "paper": _wide(paper, {name: tasks[name] for name in pair}),
    }
    shares = {member: f"{share:.2f}" for member, share in skew.select("member", "value").rows()}
    shares[AVERAGE] = f"{cast(float, skew['value'].mean()):.2f}"
    members = set(ours["member"])
    rows = [
        (member, shares[member], *cells) if kind == "ours" else ("paper", "", *cells)
        for member in sorted(members, key=lambda name: (name == AVERAGE, _place(order, name), name))
        for kind, wide in kinds.items()
        if (cells := wide.get(member)) is not None
    ]
    columns = ["held out", "skew", *(f"{task}/{name}" for task in pair for name in COLUMNS)]
    names = {f"{task}/{name}": title for task in pair for name, (*_, title) in COLUMNS.items()}
    groups = [("", 2), *((task, len(COLUMNS)) for task in pair)]
    frame = pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String), orient="row")
    return table(frame, "", groups, names=names, right=columns[1:])


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _wide(cells: pl.DataFrame, tasks: Mapping[str, str]) -> dict[str, tuple[str | None, ...]]:
    """For each member the texts of its cells, task by task; `tasks` are their names in `cells`."""
    texts: dict[str, dict[tuple[str, str], str]] = {}
    rows = cells.select("member", "model", "column", _mean_text().alias("text"))
    for member, task, column, text in rows.iter_rows():
        texts.setdefault(member, {})[task, column] = text
    return {
        member: tuple(
            cell_texts.get((task, column)) for task in tasks.values() for column in COLUMNS
        )
        for member, cell_texts in texts.items()
    }


# ---------------------------------------------------------------- what the second task changed


def changes(runs: pl.DataFrame) -> pl.DataFrame:
    """For each model: differences to the one without its task, same member and seed, in points.

    subset, network, model, column, pairs, mean, deviation, low, high (the 95 % interval of the
    mean by Student's t), members, gained (members whose mean over seeds rose), verdict.
    """
    from scipy.stats import t

    key = ["subset", "network", "column"]
    last = _columns(runs, LAST_EPOCHS)
    partner = pl.col("model").map_elements(partner_of, pl.String).alias("partner")
    base = last.rename({"value": "base", "model": "partner"})
    pairs = last.with_columns(partner).filter(~pl.col("model").is_in(WITHOUT_TASK))
    pairs = pairs.join(base, on=[*key, "partner", "member", "seed"], how="inner")
    pairs = pairs.with_columns((pl.col("value") - pl.col("base")).alias("change"))
    gained = (
        pairs.group_by(*key, "model", "member")
        .agg(pl.col("change").mean())
        .group_by(*key, "model")
        .agg(
            pl.len().cast(pl.Int64).alias("members"),
            (pl.col("change") > 0).sum().cast(pl.Int64).alias("gained"),
        )
    )
    means = (
        pairs.sort("subset", "network", "model", _in_order("column"), "member", "seed")
        .group_by(*key, "model", maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("pairs"),
            pl.col("change").mean().alias("mean"),
            pl.col("change").std().alias("deviation"),
        )
        .join(gained, on=[*key, "model"], how="left", maintain_order="left")
    )
    count = means["pairs"].to_numpy()
    reach = t.ppf((1 + CONFIDENCE) / 2, np.maximum(count - 1, 1)) / np.sqrt(count)
    half = pl.col("deviation") * pl.Series(reach)
    enough = pl.col("pairs") >= FEWEST_PAIRS
    verdict = (
        pl.when(~enough)
        .then(pl.lit("too few pairs to say"))
        .when(pl.col("low") > 0)
        .then(pl.lit("better"))
        .when(pl.col("high") < 0)
        .then(pl.lit("worse"))
        .otherwise(pl.lit("no clear change"))
    )
    return (
        means.with_columns(
            (pl.col("mean") - half).alias("low"), (pl.col("mean") + half).alias("high")
        )
        .with_columns(verdict.alias("verdict"))
        .select(
            "subset", "network", "model", "column", "pairs", "mean", "deviation",
            "low", "high", "members", "gained", "verdict",
        )
    )  # fmt: skip


def _in_order(column: str) -> pl.Expr:
    """The columns of a table in the order of the paper's, not of their names."""
    return pl.col(column).replace_strict(
        {name: place for place, name in enumerate(COLUMNS)}, return_dtype=pl.Int64
    )


def sentences(changed: pl.DataFrame) -> Iterator[str]:
    """What changed, in words, a sentence for each subset and model."""
    for (subset, _, task), rows in changed.group_by(
        "subset", "network", "model", maintain_order=True
    ):
        phrases = []
        for row in rows.iter_rows(named=True):
            phrases.append(
                f"{MEASURE_NAMES[row['column']]} {row['verdict']} ({row['mean']:+.2f} points, "
                f"{counted(row['pairs'], 'pair')})"
            )
        yield f"{task} against {partner_of(task)} on {subset}: {'; '.join(phrases)}."


def _changed(runs: pl.DataFrame) -> Section | None:
    differences = changes(runs)
    if differences.is_empty():
        return None
    frame = differences.select(
        *("subset", "model"),
        pl.col("column").replace({name: title for name, (*_, title) in COLUMNS.items()}),
        *("verdict", "pairs", "mean", "deviation"),
        pl.concat_str(_digits("low"), pl.lit(" to "), _digits("high")).alias("interval"),
        pl.concat_str("gained", pl.lit(" of "), "members").alias("members gained"),
    )
    return Section(
        "What the auxiliary task changed",
        [
            paragraph(
                "Each network with a task is paired with that without it, of the same settings, "
                "held-out member and seed; the numbers are those of the tables above. Better or "
                f"worse is said where the {CONFIDENCE:.0%} interval of the mean difference "
                f"(Student's t) leaves out zero and there are {FEWEST_PAIRS} pairs or more. Seeds "
                "of a member share their pictures, so the interval speaks of these members, not "
                "of others."
            ),
            *(paragraph(sentence) for sentence in sentences(differences)),
            table(frame, names={"column": "measure"}, right=["interval"]),
        ],
    )


# ---------------------------------------------------------------- every score


def ranking(runs: pl.DataFrame) -> pl.DataFrame:
    """Mean AP over members by subset, score and model (columns), best mean over models first."""
    average = with_average(runs.filter(metric="average_precision")).filter(member=AVERAGE)
    key = ["subset", "network", "score"]
    wide = average.with_columns(_mean_text().alias("text")).pivot(
        "model", index=key, values="text", sort_columns=True
    )
    means = average.group_by(key).agg(pl.col("mean").mean().alias("over all models"))
    return (
        wide.join(means, on=key)
        .sort(
            "subset", "network", "over all models", "score", descending=[False, False, True, False]
        )
        .select(*key, *wide.columns[len(key) :], "over all models")
    )


def _ranking(runs: pl.DataFrame) -> Section | None:
    means = ranking(runs)
    if means.is_empty():
        return None
    parts: list[Html] = [
        paragraph(
            "Average precision in percent of every score of the final networks: mean over the "
            "held-out members, deviation over seeds. Only odin takes a step on the input; the "
            "other scores come from the outputs of one forward pass."
        )
    ]
    tasks = means.columns[3:-1]
    for (subset, network), scores in means.group_by("subset", "network", maintain_order=True):
        skew = runs.filter(subset=subset, metric="skew").group_by("member").first()["value"]
        guessing = cast(float, skew.mean())
        caption = f"{subset}, network {network}; guessing gets {guessing:.2f}"
        columns = [name for name in tasks if scores[name].null_count() < scores.height]
        parts.append(
            table(scores.select("score", *columns, "over all models"), caption, right=columns)
        )
    return Section("Every score of the networks", parts)
