"""The open-world evaluator of KOWL-718: increments in order, before and after feedback.

In: a predictor, features per sample and view, and the rows of a protocol (sample_id, label, split,
step). Out, per increment: confusion counts, measures in long form, which samples got a label, and
of valid and test samples the first predictions and the novelty. Rules: KOWL-718 section 4 and
docs/kowl.md, rules 6 to 13:
- from increment 1 on, every split of the new data is predicted first (phase `before`), after a
  predictor that discovers labels has seen the new train samples (the released code lets it cluster
  validation and test samples as well);
- increment 0 gives all train labels; later the predictor orders the new train samples and the first
  floor(feedback * N) get theirs; the rest stay in its experience without a label;
- the predictor is fitted on all experience (unless feedback is 0) and every split of the increment
  is predicted again (phase `after`).
What is known is judged twice: `novel_to_predictor` by the labels really given so far,
`novel_to_evaluator` by the train labels released so far; before the feedback of an increment both
stand as after the one before. Cumulative numbers add up counts after feedback only, each reduced by
what was known at its time. Samples of an increment, split and view come in an order drawn from the
seed. Views other than `plain` are predicted and never learned from.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.tables import PLAIN
from storage.tensors import read_header, read_tensors, write_tensors
from tasks.evaluation.stages import EVALUATED, ScoreChoice, chosen_scores
from tasks.kowl.confusion import (
    READINGS,
    REDUCTIONS,
    add,
    count,
    measure,
    reaction_time,
    reduce,
    top_k,
)
from tasks.learning.samples import Rows, some_rows
from tasks.predictors import find_predictor
from tasks.predictors.base import KNOWN, UNKNOWN, Examples, Predictor, revive

VERSION = 1
"""Raised when the same predictor on the same rows gives other numbers."""
TRAIN = "train"
VALID = "valid"
PRE, POST = "before", "after"
# Every sample belongs to this subset of this grouping.
ALL, NO_SUBSET = "all", ""

(OWN,) = chosen_scores({"own": {}})
P_UNKNOWN = ScoreChoice(name="p_unknown", version=1, settings={})
"""What a predictor itself says of novelty: before any threshold, and the probability of `unknown`
and all labels that it discovered."""

GROUPS = {"sample_id": pl.String, "grouping": pl.String, "subset": pl.String}
PREDICTIONS = pl.Schema(
    {
        "phase": pl.String,
        "step": pl.Int32,
        "sample_id": pl.String,
        "view": pl.String,
        "rank": pl.Int32,
        "split": pl.String,
        "class": pl.String,
        "predicted": pl.String,
        "probability": pl.Float64,
        "p_unknown": pl.Float64,
    }
)
NOVELTY = pl.Schema(
    {
        "score_id": pl.String,
        "score": pl.String,
        "sample_id": pl.String,
        "view": pl.String,
        "phase": pl.String,
        "step": pl.Int32,
        "split": pl.String,
        "class": pl.String,
        "value": pl.Float64,
        "predicted": pl.String,
    }
)
COUNT_COLUMNS = (
    *("step", "phase", "split", "view", "grouping", "subset"),
    *("rank", "target", "predicted", "count"),
)
MEASURE_COLUMNS = (
    *("step", "phase", "scope", "split", "view", "known_set", "reduction", "grouping", "subset"),
    *("metric", "value", "n"),
)
_EXPERIENCE = {"sample_id": pl.String, "label": pl.String, "split": pl.String, "row": pl.Int64}
# The split's name is part of the draw of its order, and lists call it so.
_DRAWN_AS = {VALID: "validate"}


class EvaluationSettings(Settings):
    """How a predictor is led through the increments."""

    feedback: float = Field(1.0, ge=0, le=1)
    """Share of an increment's train samples whose labels the predictor gets, after increment 0."""
    top_k: int = Field(5, ge=1)
    """Ranks of the ordered confusion counts."""
    experience_limit: int | None = Field(None, ge=1)
    """Most samples of a split that the predictor keeps, the oldest go first (default: all)."""
    experience_per_label: int | None = Field(None, ge=1)
    """Most labelled samples of a label and split that it keeps, the oldest go first."""
    predicted_ranks: int = Field(1, ge=1)
    """Predictions of each valid and test sample that are kept, at most top_k."""
    batch_size: int = Field(8192, ge=1)
    """Samples predicted at a time."""
    seed: int = Field(0, ge=0)
    """Decides the order of samples, the predictor's initial weights and its random choices."""


@dataclass(frozen=True, eq=False)
class Features:
    """One row of `values` (N, D) per sample and view; `values` may be a memory map.

    Without `views` every row is `plain`.
    """

    sample_ids: pl.Series
    values: np.ndarray
    views: pl.Series | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.sample_ids) != len(self.values):
            raise ConfigError(
                f"features: {len(self.sample_ids)} ids, values {self.values.shape}; expected (N, D)"
            )
        if self.rows().select("sample_id", "view").is_duplicated().any():
            raise SourceError("features: a sample stands twice; each must have one vector")

    def rows(self) -> pl.DataFrame:
        """sample_id and view of each row, and its number."""
        view = pl.lit(PLAIN) if self.views is None else pl.lit(self.views)
        return pl.DataFrame({"sample_id": self.sample_ids}).select(
            "sample_id", view.alias("view"), pl.int_range(pl.len(), dtype=pl.Int64).alias("row")
        )


class Step(NamedTuple):
    """What one increment gave. `counts` are raw; `feedback`: step, position, sample_id.

    `predictions` (`PREDICTIONS`) and `novelty` (`NOVELTY`) are of valid and test samples.
    """

    step: int
    counts: pl.DataFrame
    measures: pl.DataFrame
    feedback: pl.DataFrame
    predictions: pl.DataFrame
    novelty: pl.DataFrame


class _Ranked(NamedTuple):
    """Predictions of one split and view: the samples in order, and labels by column number."""

    samples: pl.DataFrame
    labels: tuple[str, ...]
    columns: np.ndarray
    probabilities: np.ndarray
    p_unknown: np.ndarray
    nearest: np.ndarray
    """Column of the most probable known label."""


Guesses = Mapping[tuple[str, str], _Ranked]
"""Predictions by split and view."""


class OpenWorldRun:
    """One predictor on one sequence of increments; `step` does the next one.

    `groups` (sample_id, grouping, subset) adds measures of plain samples by subset, such as
    `ava_groups`; a sample may be in several subsets of one grouping.
    """

    def __init__(
        self,
        predictor: Predictor,
        features: Features,
        splits: pl.DataFrame,
        settings: EvaluationSettings | None = None,
        groups: pl.DataFrame | None = None,
    ) -> None:
        self.predictor = predictor
        self.features = features
        self.settings = settings or EvaluationSettings()
        self.groups = pl.DataFrame(schema=GROUPS) if groups is None else groups.select(*GROUPS)
        self.plan = _plan(splits, features)
        self.steps: list[int] = self.plan["step"].unique().sort().to_list()
        self.parts: Mapping[Any, pl.DataFrame] = self.plan.partition_by(
            "step", "split", "view", as_dict=True
        )
        self.splits: list[tuple[str, str]] = (
            self.plan.select("split", "view").unique().sort("split", "view").rows()
        )
        self.done = 0
        self.predictor_labels: set[str] = set()
        self.experience = pl.DataFrame(schema=_EXPERIENCE)
        self.cumulative: pl.DataFrame | None = None

    def __iter__(self) -> Iterator[Step]:
        while self.done < len(self.steps):
            yield self.step()

    def step(self) -> Step:
        if self.done >= len(self.steps):
            raise ConfigError(f"all {len(self.steps)} increments are done")
        number = self.steps[self.done]
        new = self._part(number, TRAIN)
        counts, measures, predictions = [], [], [pl.DataFrame(schema=PREDICTIONS)]
        novelty = pl.DataFrame(schema=NOVELTY)

        def evaluate(phase: str, guesses: Guesses, released: int) -> None:
            known = {
                "novel_to_predictor": self.predictor_labels,
                "novel_to_evaluator": self._released(released),
            }
            counted = self._counted(guesses)
            reduced = _reduced(counted, known)
            scopes = [("increment", reduced)]
            if phase == POST:
                before = [] if self.cumulative is None else [self.cumulative]
                self.cumulative = add(*before, reduced)
                scopes.append(("cumulative", self.cumulative))
            place = pl.lit(number, pl.Int32).alias("step"), pl.lit(phase).alias("phase")
            counts.append(counted.select(*place, pl.all()))
            for scope, matrices in scopes:
                frame = _measured(matrices, self.settings.top_k).with_columns(
                    *place, pl.lit(scope).alias("scope")
                )
                measures.append(frame.select(MEASURE_COLUMNS))
            reaction = _reactions(guesses, known).with_columns(
                *place, pl.lit("increment").alias("scope")
            )
            measures.append(reaction.select(MEASURE_COLUMNS))
            ranks = self.settings.predicted_ranks
            predictions.extend(
                _predictions(number, phase, place, ranked, ranks)
                for place, ranked in guesses.items()
                if place[0] in EVALUATED
            )

        guesses: Guesses | None = None
        if self.done:
            if self.predictor.discovers:
                rows = np.concatenate([self._unlabelled(), new["row"].to_numpy()])
                self.predictor.discover(self._rows(rows))
            guesses = self._predicted(number)
            evaluate(PRE, guesses, self.done - 1)
            novelty = self._novelty(number, guesses)
        feedback = self._feedback(number, new)
        self._remember(number, new, feedback)
        if self.done == 0 or self.settings.feedback > 0:
            self._fit(number)
            guesses = None
        evaluate(POST, guesses or self._predicted(number), self.done)
        self.done += 1
        return Step(
            number,
            pl.concat(counts).select(COUNT_COLUMNS),
            pl.concat(measures).sort(MEASURE_COLUMNS[:-2]),
            feedback.with_row_index("position").select(
                pl.lit(number, pl.Int32).alias("step"),
                pl.col("position").cast(pl.Int32),
                "sample_id",
            ),
            pl.concat(predictions),
            novelty,
        )

    def _part(self, step: int, split: str, view: str = PLAIN) -> pl.DataFrame:
        """Samples of an increment, split and view, in the order in which they are presented."""
        part = self.parts.get((step, split, view), self.plan.clear())
        drawn_as = _DRAWN_AS.get(split, split) + ("" if view == PLAIN else f"+{view}")
        draws = np.random.default_rng([self.settings.seed, step, *drawn_as.encode()])
        return part[draws.permutation(part.height)]

    def _released(self, place: int) -> set[str]:
        """Train labels of all increments up to the one at `place`."""
        out = (pl.col("step") <= self.steps[place]) & (pl.col("split") == TRAIN)
        return set(self.plan.filter(out)["label"].unique())

    def _unlabelled(self) -> np.ndarray:
        mine = (pl.col("split") == TRAIN) & pl.col("label").is_null()
        return self.experience.filter(mine)["row"].to_numpy()

    def _feedback(self, number: int, new: pl.DataFrame) -> pl.DataFrame:
        """The train samples that get their label, in the order in which they were asked for."""
        if self.done == 0:
            return new
        # 0.29 * 100 must be 29, not 28.
        amount = math.floor(self.settings.feedback * new.height + 1e-9)
        if not amount:
            return new.clear()
        order = self.predictor.feedback_order(
            self._rows(new["row"].to_numpy()), seed=[self.settings.seed, number]
        )
        if sorted(order.tolist()) != list(range(new.height)):
            raise ValueError(f"predictor {self.predictor.name}: feedback order is no permutation")
        return new[order[:amount]]

    def _remember(self, number: int, new: pl.DataFrame, feedback: pl.DataFrame) -> None:
        """Experience grows by the new train samples, labelled or not, and the validation ones."""
        ids = feedback["sample_id"].implode()
        label = pl.when(pl.col("sample_id").is_in(ids)).then(pl.col("label"))
        added = [new.with_columns(label), self._part(number, VALID)]
        experience = pl.concat([self.experience, *(part.select(*_EXPERIENCE) for part in added)])
        self.predictor_labels |= set(feedback["label"].unique())
        # The latest of a label and split, then the latest of a split; rows stand by arrival.
        later = pl.int_range(pl.len()).reverse()
        if self.settings.experience_per_label is not None:
            inside = later.over("split", "label") < self.settings.experience_per_label
            experience = experience.filter(pl.col("label").is_null() | inside)
        if self.settings.experience_limit is not None:
            experience = experience.filter(later.over("split") < self.settings.experience_limit)
        self.experience = experience

    def _fit(self, number: int) -> None:
        train = self.experience.filter(pl.col("split") == TRAIN)
        if train["label"].null_count() == train.height:
            return  # a limit let only samples without a label stay: nothing to learn from
        valid = self.experience.filter(pl.col("split") == VALID)
        # A label that the predictor was never given stays hidden in validation too.
        names = pl.Series(sorted(self.predictor_labels), dtype=pl.String).implode()
        valid = valid.filter(pl.col("label").is_in(names))
        self.predictor.fit(
            self._examples(train),
            self._examples(valid) if valid.height else None,
            seed=[self.settings.seed, number],
        )

    def _examples(self, samples: pl.DataFrame) -> Examples:
        return Examples(self._rows(samples["row"].to_numpy()), samples["label"])

    def _rows(self, rows: np.ndarray) -> Rows:
        """Features of these rows; what lies in a file stays there if the predictor reads blocks."""
        values = self.features.values
        return some_rows(values, rows) if self.predictor.reads_blocks else values[rows]

    def _predicted(self, number: int) -> Guesses:
        guesses = {}
        for place in self.splits:
            samples = self._part(number, *place)
            if samples.height:
                guesses[place] = self._ranked(samples)
        return guesses

    def _ranked(self, samples: pl.DataFrame) -> _Ranked:
        labels: tuple[str, ...] = ()
        columns, probabilities, p_unknown, nearest = [], [], [], []
        for batch in samples.iter_slices(self.settings.batch_size):
            prediction = self.predictor.predict(self.features.values[batch["row"].to_numpy()])
            labels = prediction.labels
            best = top_k(prediction.probabilities, self.settings.top_k)
            columns.append(best)
            probabilities.append(np.take_along_axis(prediction.probabilities, best, 1))
            known = np.isin(labels, self.predictor.known)
            p_unknown.append(prediction.probabilities[:, ~known].sum(1, dtype=np.float64))
            nearest.append(np.where(known, prediction.probabilities, -1).argmax(1))
        parts = (columns, probabilities, p_unknown, nearest)
        return _Ranked(samples, labels, *(np.concatenate(part) for part in parts))

    def _novelty(self, number: int, guesses: Guesses) -> pl.DataFrame:
        """What the predictor says of each valid and test sample before it is given labels."""
        frames = [pl.DataFrame(schema=NOVELTY)]
        for (split, view), ranked in guesses.items():
            if split not in EVALUATED:
                continue
            rows = ranked.samples["row"].to_numpy()
            values = [
                (OWN, self.predictor.novelty(self._rows(rows))),
                (P_UNKNOWN, ranked.p_unknown),
            ]
            frames += [
                pl.DataFrame(
                    {
                        "score_id": choice.score_id,
                        "score": choice.name,
                        "sample_id": ranked.samples["sample_id"],
                        "view": view,
                        "phase": PRE,
                        "step": number,
                        "split": split,
                        "class": ranked.samples["label"],
                        "value": value,
                        "predicted": pl.Series(ranked.labels).gather(ranked.nearest),
                    }
                ).cast(NOVELTY)
                for choice, value in values
            ]
        return pl.concat(frames)

    def _counted(self, guesses: Guesses) -> pl.DataFrame:
        """Raw counts of every split and view: all samples, then each subset of plain ones."""
        counted = []
        for (split, view), ranked in guesses.items():
            place = ranked.samples.select(
                pl.int_range(pl.len()).alias("place"),
                "sample_id",
                pl.lit(split).alias("split"),
                pl.lit(view).alias("view"),
                pl.lit(ALL).alias("grouping"),
                pl.lit(NO_SUBSET).alias("subset"),
            )
            groups = self.groups if view == PLAIN else self.groups.clear()
            grouped = place.drop("grouping", "subset").join(
                groups, on="sample_id", maintain_order="left_right"
            )
            every = pl.concat([place, grouped.select(place.columns)])
            rows = every["place"].to_numpy()
            counted.append(
                count(
                    ranked.samples["label"].gather(rows),
                    ranked.columns[rows],
                    ranked.labels,
                    every.select("split", "view", "grouping", "subset"),
                )
            )
        return pl.concat(counted)

    def save(self, path: Path) -> None:
        """One file that holds the run as it stands after the latest increment."""
        learned = self.predictor.state() if self.done else {}
        tensors = {f"predictor.{name}": value for name, value in learned.items()}
        tensors["experience"] = _packed(self.experience.drop("row"))
        if self.cumulative is not None:
            tensors["cumulative"] = _packed(self.cumulative)
        header = {
            "run": {
                "settings": self.settings.model_dump_json(),
                "inputs": self._inputs(),
                "done": self.done,
                "given": sorted(self.predictor_labels),
            },
            "predictor": self.predictor.header(),
        }
        write_tensors(path, tensors, header)

    @classmethod
    def resume(
        cls,
        path: Path,
        features: Features,
        splits: pl.DataFrame,
        groups: pl.DataFrame | None = None,
        *,
        device: str = "auto",
    ) -> OpenWorldRun:
        """The run that `save` wrote; it goes on as if it had never stopped."""
        header = read_header(path)
        if not {"run", "predictor"} <= header.keys():
            raise SourceError(f"{path} is no saved run; name the file that a run was saved to")
        tensors = read_tensors(path)
        state = header["run"]
        weights = {
            name.removeprefix("predictor."): value
            for name, value in tensors.items()
            if name.startswith("predictor.")
        }
        kind = find_predictor(header["predictor"]["predictor"])
        run = cls(
            revive(kind, header["predictor"], weights, device=device),
            features,
            splits,
            EvaluationSettings.model_validate_json(state["settings"]),
            groups,
        )
        if run._inputs() != state["inputs"]:
            raise ConfigError(
                f"{path} was saved with other features, splits or groups; use the same ones or "
                "start the run anew"
            )
        run.done, run.predictor_labels = state["done"], set(state["given"])
        remembered = _unpacked(tensors["experience"].numpy())
        rows = run.plan.filter(pl.col("view") == PLAIN).select("sample_id", "row")
        run.experience = remembered.join(
            rows, on="sample_id", how="left", maintain_order="left"
        ).select(*_EXPERIENCE)
        if "cumulative" in tensors:
            run.cumulative = _unpacked(tensors["cumulative"].numpy())
        return run

    def _inputs(self) -> dict[str, str]:
        """What must agree between a saved run and the one that takes it up."""
        frames = {"splits": self.plan.drop("row"), "groups": self.groups.sort(list(GROUPS))}
        digests = {
            name: hashlib.sha256(_packed(frame).data).hexdigest() for name, frame in frames.items()
        }
        values = self.features.values
        some = np.ascontiguousarray(
            values[self.plan["row"].to_numpy()[:: self.plan.height // 64 + 1]]
        ).data
        digests["features"] = f"{values.dtype} {values.shape[1]} {hashlib.sha256(some).hexdigest()}"
        return digests


def _plan(splits: pl.DataFrame, features: Features) -> pl.DataFrame:
    """sample_id, label, split, step, view and the row of its features, sorted by id and view.

    Train samples are there as they are; the others under every view.
    """
    needed = ["sample_id", "label", "split", "step"]
    missing = [name for name in needed if name not in splits.columns]
    if missing:
        raise ConfigError(f"evaluator: the splits lack {missing}")
    types = pl.Schema({"step": pl.Int64, **dict.fromkeys(needed[:3], pl.String)})
    plan = splits.select(needed).cast(types).sort("sample_id")
    if plan.null_count().sum_horizontal().item() or plan["sample_id"].is_duplicated().any():
        raise SourceError(
            "evaluator: a row of the splits has an empty field or a sample stands twice; "
            "build the increments again"
        )
    reserved = plan.filter(pl.col("label").is_in([UNKNOWN, KNOWN]))
    if reserved.height:
        raise ConfigError(f"evaluator: a label is called {reserved['label'][0]!r}; rename it")
    rows = features.rows()
    absent = plan.join(rows.filter(pl.col("view") == PLAIN), on="sample_id", how="anti")
    if absent.height:
        raise SourceError(
            f"evaluator: {absent.height} of {plan.height} samples have no features, the first is "
            f"{absent['sample_id'][0]}; extract them or take the samples out of the splits"
        )
    shown = (pl.col("view") == PLAIN) | (pl.col("split") != TRAIN)
    plan = plan.join(rows, on="sample_id").filter(shown).sort("sample_id", "view")
    first = plan.filter(pl.col("step") == pl.col("step").min())
    if TRAIN not in first["split"]:
        raise ConfigError(f"evaluator: the first increment has no {TRAIN} sample to learn from")
    return plan


def _reduced(counted: pl.DataFrame, known: Mapping[str, set[str]]) -> pl.DataFrame:
    """Raw counts of all ranks, and the reductions of the first, with known_set and reduction."""

    def tagged(frame: pl.DataFrame, known_set: str, reduction: str) -> pl.DataFrame:
        return frame.select(
            pl.lit(known_set).alias("known_set"), pl.lit(reduction).alias("reduction"), pl.all()
        )

    first = counted.filter(pl.col("rank") == 1)
    return pl.concat(
        [
            tagged(counted, "none", "raw"),
            *(
                tagged(reduce(first, labels, reduction), name, reduction)
                for name, labels in known.items()
                for reduction in REDUCTIONS
                if reduction != "raw"
            ),
        ]
    )


def _measured(matrices: pl.DataFrame, ranks: int) -> pl.DataFrame:
    # Apart, because only raw counts have further ranks.
    raw = pl.col("reduction") == "raw"
    return pl.concat([measure(matrices.filter(raw), ranks), measure(matrices.filter(~raw), 1)])


def _reactions(guesses: Guesses, known: Mapping[str, set[str]]) -> pl.DataFrame:
    rows = []
    for (split, view), ranked in guesses.items():
        for known_set, labels in known.items():
            names = pl.Series(sorted(labels), dtype=pl.String).implode()
            novel = ~ranked.samples["label"].is_in(names).to_numpy()
            outside = ~pl.Series(ranked.labels).is_in(names).to_numpy()
            flagged = outside[ranked.columns[:, 0]]
            rows += [
                {
                    "split": split,
                    "view": view,
                    "known_set": known_set,
                    "reduction": "detection",
                    "grouping": ALL,
                    "subset": NO_SUBSET,
                    "metric": f"reaction_time_{reading}",
                    "value": reaction_time(novel, flagged, reading),
                    "n": len(novel),
                }
                for reading in READINGS
            ]
    return pl.DataFrame(rows, schema_overrides={"value": pl.Float64, "n": pl.Int64})


def _predictions(
    number: int, phase: str, place: tuple[str, str], ranked: _Ranked, ranks: int
) -> pl.DataFrame:
    columns = ranked.columns[:, :ranks]
    samples, ranks = columns.shape
    row = np.repeat(np.arange(samples), ranks)
    every = ranked.samples[row]
    return pl.DataFrame(
        {
            "phase": phase,
            "step": number,
            "sample_id": every["sample_id"],
            "view": place[1],
            "rank": np.tile(np.arange(1, ranks + 1), samples),
            "split": place[0],
            "class": every["label"],
            "predicted": pl.Series(ranked.labels).gather(columns.ravel()),
            "probability": ranked.probabilities[:, :ranks].ravel(),
            "p_unknown": ranked.p_unknown[row],
        }
    ).cast(PREDICTIONS)


def _packed(frame: pl.DataFrame) -> np.ndarray:
    buffer = io.BytesIO()
    frame.rechunk().write_ipc(buffer)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def _unpacked(data: np.ndarray) -> pl.DataFrame:
    return pl.read_ipc(io.BytesIO(data.tobytes()))
