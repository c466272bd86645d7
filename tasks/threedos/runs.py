"""Runs of 3DOS: train on the known classes of a track, then one pass over every split (section 4).

Enters: `splits`, `samples`, `shapes` and `point_clouds`. Leaves: `runs` and `training` with each
fitted model as a safetensors file, then `outputs` and `predictions`, one view for each density. The
shared stages make scores, metrics and curves of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN, PREDICTIONS, RUNS, TRAINING
from schemas.threedos import Config
from storage.pieces import Part, Piece
from tasks import scores as score_files
from tasks.engine.stage import Produced, Shard, stage
from tasks.evaluation.runs import run_id, run_mark, run_row
from tasks.evaluation.stages import (
    HEAD,
    PassedRun,
    ScoreChoice,
    chosen_scores,
    prediction_rows,
)
from tasks.learning.training import BASE, MODEL, EpochLines
from tasks.threedos import methods, networks
from tasks.threedos.clouds import TrackClouds, label_names, load_clouds, require_training
from tasks.threedos.lists import DATASETS
from tasks.threedos.methods.setups import Setup, setup_of
from tasks.threedos.tracks import Track
from tasks.threedos.training import TRAINER_VERSION, precision_on

BENCHMARK = "threedos"
SPLITS = ("train", "valid", "test")
CONVENTIONS = ("threedos", "threedos-first-threshold", "openood")
# Tracks with scans augment as the paper's do (turns, jitter), others as its synthetic track.
SCANS = "scanobjectnn"
NONE = "none"
_LAYER_SIZES = ("hidden", "features")


class DeviceSettings(Settings):
    """Where networks are trained and passed."""

    device: str = Field("auto", exclude=True)
    """`auto`, `cpu` or `cuda`."""


# ---------------------------------------------------------------- choices


@dataclass(frozen=True)
class RunPlan:
    """Models, networks and scores that a configuration asks for, each with what it changes.

    `models` has those too that a chosen one starts from.
    """

    models: dict[str, dict[str, Any]]
    networks: dict[str, Mapping[str, Any]]
    scores: list[ScoreChoice]
    preset: str
    seeds: tuple[int, ...]
    device: str

    def networks_of(self, model: str) -> tuple[str | None, ...]:
        return tuple(self.networks) if methods.find(model).uses_network else (None,)

    def setup(self, model: str, network: str | None, track: Track) -> Setup:
        """All settings: the preset's, then what the track asks for, then what the user changed."""
        return self._setup(model, network, track, self.models[model], self._sizes(network))

    def changed(self, model: str, network: str | None, track: Track) -> dict[str, Any]:
        """Settings that are not what the preset has on this track."""
        values = self.setup(model, network, track).values()
        preset = self._setup(model, network, track, {}, {}).values()
        return {name: value for name, value in values.items() if value != preset[name]}

    def _sizes(self, network: str | None) -> Mapping[str, Any]:
        return self.networks[network] if network else {}

    def _setup(
        self,
        model: str,
        network: str | None,
        track: Track,
        changes: Mapping[str, Any],
        sizes: Mapping[str, Any],
    ) -> Setup:
        plain = setup_of(model, network, self.preset, changes, sizes).model
        by_track: dict[str, Any] = {}
        if plain.augmentation != "none":
            # Clouds are upright by now.
            augmentation = "rw" if SCANS in track.sources else "st"
            by_track = {"augmentation": augmentation, "up": "y"}
        if plain.scan_points and "train" in scan_splits(track):
            by_track["points"] = plain.scan_points
        return setup_of(model, network, self.preset, {**by_track, **changes}, sizes)


def plan_runs(config: Config, tracks: Sequence[Track]) -> RunPlan:
    """What the configuration asks for; a name or setting that does not fit is refused."""
    if config.predictors:
        raise ConfigError(
            f"predictor {next(iter(config.predictors))} does not fit: 3DOS has no steps over time"
        )
    chosen_models = methods.chosen(config.models)
    bases = {methods.find(name).requires for name in chosen_models} - {None, *chosen_models}
    models = {
        name: {**_shared_settings(name, config.train), **chosen_models.get(name, {})}
        for name in sorted({*chosen_models, *(str(base) for base in bases)})
    }
    for setting in config.train:
        if not any(setting in changes for changes in models.values()):
            there = ", ".join(models) or "none is chosen"
            raise ConfigError(f"train.{setting} is a setting of none of the models ({there})")
    plan = RunPlan(
        models,
        dict(networks.chosen(config.networks)),
        chosen_scores(config.scores, config.preset),
        config.preset,
        config.seeds,
        config.device,
    )
    if models and not config.source:
        raise ConfigError("models need clouds: name sources of shapes with --source")
    if any(methods.find(name).uses_network for name in models) and not plan.networks:
        raise ConfigError(f"models need a network: --networks {','.join(networks.names())}")
    for name in models:
        _check_fit(plan, name, tracks)
    _check_scores(config.scores, models)
    return plan


def _shared_settings(model: str, train: Mapping[str, Any]) -> dict[str, Any]:
    fields = methods.find(model).configuration.model_fields
    return {name: value for name, value in train.items() if name in fields}


def _check_fit(plan: RunPlan, model: str, tracks: Sequence[Track]) -> None:
    """Resolve the settings for every network and track, so that a wrong one is said now."""
    base = methods.find(model).requires
    for network in plan.networks_of(model):
        for track in tracks:
            settings = plan.setup(model, network, track).model
            if base is None:
                continue
            of_base = plan.setup(base, network, track).model
            for name in _LAYER_SIZES:
                if getattr(settings, name) != getattr(of_base, name):
                    raise ConfigError(
                        f"models.{model}.{name} is {getattr(settings, name)}, expected "
                        f"{getattr(of_base, name)} as {base} has, which it starts from"
                    )


def _check_scores(asked: Iterable[str], models: Iterable[str]) -> None:
    """A score named by the user must fit a model that is chosen."""
    given = {name: methods.find(name).gives | {"train", "valid"} for name in models}
    for name in asked:
        if not given or name == "all":
            continue
        needs = score_files.find(name).needs
        if not any(needs <= gives for gives in given.values()):
            raise ConfigError(
                f"score {name} fits none of the models {', '.join(given)}: it needs "
                f"{', '.join(sorted(needs))}"
            )


def scan_splits(track: Track) -> list[str]:
    """Splits whose known shapes are all scans; those held out for validation are as train."""
    sources = {"train": track.train, "valid": track.valid or track.train, "test": track.test}
    return [split for split in SPLITS if set(sources[split]) == {SCANS}]


def trainable(
    tracks: Sequence[Track], splits: pl.DataFrame, clouds: pl.Series, asked: Collection[str] = ()
) -> list[Track]:
    """Tracks with training and test shapes that have a cloud, and two labels at the least.

    One that was asked for by name must be among them, and there must be one.
    """
    with_cloud = splits.filter(pl.col("sample_id").is_in(clouds.implode()))
    lacking = {}
    for track in tracks:
        rows = with_cloud.filter(protocol=track.name)
        labels = rows.filter(split="train")["label"].n_unique()
        counts = {
            "two labels with training shapes": labels - 1,
            "known test shapes": rows.filter(split="test", role="known").height,
            "unknown test shapes": rows.filter(split="test", role="novel").height,
        }
        lacking[track.name] = [what for what, count in counts.items() if count < 1]
    ready = [track for track in tracks if not lacking[track.name]]
    wrong = [name for name in lacking if lacking[name] and (name in asked or not ready)]
    if wrong:
        raise SourceError(
            f"track {wrong[0]} cannot be trained on: among the clouds there are no "
            f"{' and no '.join(lacking[wrong[0]])}; name the sources of its shapes, or other tracks"
        )
    return ready


# ---------------------------------------------------------------- plans


def run_waves(
    plan: RunPlan, tracks: Sequence[Track], keys: Mapping[str, Mapping[str, str]]
) -> list[list[RunFacts]]:
    """Facts of every run; those that others start from come in an earlier wave."""
    waves: list[list[RunFacts]] = [[], []]
    ids: dict[tuple[str, str, str, int], str] = {}
    for model in sorted(plan.models, key=lambda name: methods.find(name).requires is not None):
        base = methods.find(model).requires
        for track in tracks:
            for network in plan.networks_of(model):
                for seed in plan.seeds:
                    facts = _facts(plan, model, network, track, seed, keys[track.name]["fit_key"])
                    place = (track.name, facts.network, seed)
                    if base is not None:
                        facts = facts.model_copy(update={"base_runs": (ids[base, *place],)})
                    ids[model, *place] = run_id(facts)
                    waves[base is not None].append(facts)
    return [wave for wave in waves if wave]


def _facts(
    plan: RunPlan, model: str, network: str | None, track: Track, seed: int, fit_key: str
) -> RunFacts:
    setup = plan.setup(model, network, track)
    versions = {"model": methods.find(model).version, "trainer": TRAINER_VERSION}
    if network:
        versions["network"] = networks.find(network).version
    return RunFacts(
        benchmark=BENCHMARK,
        protocol=track.name,
        model=model,
        network=network or NONE,
        preset=plan.preset,
        settings={**setup.values(), "scan_splits": scan_splits(track)},
        changed=plan.changed(model, network, track),
        seed=seed,
        versions=versions,
        precision=precision_on(setup.model, plan.device),
        fit_key=fit_key,
    )


def plan_training(
    wave: Sequence[RunFacts],
    parts: Mapping[str, tuple[Part, ...]],
    keys: Mapping[str, Mapping[str, str]],
    trained: Sequence[tuple[Shard, Piece]],
) -> tuple[list[Shard], list[tuple[Shard, str]]]:
    """One shard per run with the clouds of its track's sources, and the model it starts from.

    Those whose start is not there come apart, with the reason.
    """
    models = {shard.name: replace(piece.file(MODEL), table=BASE) for shard, piece in trained}
    shards, lost = [], []
    for facts in wave:
        mark = run_mark(facts, keys[str(facts.protocol)]["data_key"])
        bases = tuple(models[base] for base in facts.base_runs if base in models)
        shard = Shard(
            mark.run_id,
            parts=(*parts[str(facts.protocol)], *bases),
            about=facts.model_dump(mode="json"),
            depends={"run": mark.run_id},
            run=mark,
        )
        if len(bases) == len(facts.base_runs):
            shards.append(shard)
        else:
            lost.append((shard, f"run {facts.base_runs[0]}, which it starts from, failed"))
    return shards, lost


def track_parts(
    tracks: Iterable[Track], tables: Mapping[str, tuple[Part, ...]]
) -> dict[str, tuple[Part, ...]]:
    """By track: its splits, and the shapes and clouds of its sources."""
    found = {}
    for track in tracks:
        parts = tuple(part for part in tables["splits"] if part.shard == track.name)
        for table in ("shapes", "point_clouds"):
            parts += tuple(
                part
                for part in tables[table]
                if DATASETS.get(source := part.shard.partition("/")[0], source) in track.sources
            )
        found[track.name] = parts
    return found


def plan_passes(trained: Sequence[tuple[Shard, Piece]], points: Sequence[int]) -> list[Shard]:
    """The shards of training with the model that came of each, once for each density."""
    passes = []
    for shard, piece in trained:
        parts = tuple(part for part in shard.parts if part.table != BASE)
        assert shard.run is not None
        for count in (None, *points):
            view = PLAIN if count is None else f"points_{count}"
            passes.append(
                replace(
                    shard,
                    name=f"{shard.name}/{view}",
                    parts=(*parts, piece.file(MODEL)),
                    about={"facts": shard.about, "view": view, "points": count},
                    depends={"run": shard.run.run_id, "rows": shard.run.data_key},
                )
            )
    return passes


def passed_runs(
    passed: Sequence[tuple[Shard, Piece]],
    trained: Sequence[tuple[Shard, Piece]],
    samples: tuple[Part, ...],
) -> list[PassedRun]:
    """What scores are made of, view by view."""
    heads = {
        shard.name: piece.file(HEAD)
        for shard, piece in trained
        if any(file.file == HEAD for file in piece.manifest.files)
    }
    runs = []
    for shard, piece in passed:
        assert shard.run is not None
        splits = tuple(part for part in shard.parts if part.table == "splits")
        runs.append(
            PassedRun(
                RunFacts.model_validate(shard.about["facts"]),
                shard.run,
                (piece.part("outputs"),),
                splits,
                samples,
                heads.get(shard.run.run_id),
                view=shard.about["view"],
            )
        )
    return runs


# ---------------------------------------------------------------- stages


def _clouds(shard: Shard, wanted: Sequence[str]) -> tuple[dict[str, TrackClouds], dict[int, str]]:
    """The wanted splits, and the trained labels with their names.

    Of other clouds no more than a part at a time is in memory.
    """
    splits, shapes = shard.read("splits"), shard.read("shapes", ["sample_id", "source"])
    names = label_names(splits.join(shapes, on="sample_id", how="semi"))
    sample_ids = splits.filter(pl.col("split").is_in(wanted))["sample_id"].unique()
    clouds = pl.concat(
        part.read(["sample_id", "normalisation", "count", "points"]).filter(
            pl.col("sample_id").is_in(sample_ids.implode())
        )
        for part in shard.parts
        if part.table == "point_clouds"
    )
    return {split: load_clouds(splits, shapes, clouds, names, split) for split in wanted}, names


@stage(writes=(RUNS, TRAINING), version=4, tags=("gpu",), alone=True)
def train_network(shard: Shard, settings: DeviceSettings) -> Produced:
    """Train one network on the known classes of one track; a killed run goes on."""
    from tasks.threedos.training import load, train

    facts = RunFacts.model_validate(shard.about)
    clouds = _clouds(shard, ["train"])[0]["train"]
    require_training(clouds, str(facts.protocol))
    bases = [part for part in shard.parts if part.table == BASE]
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    network = None if facts.network == NONE else facts.network
    values = {name: value for name, value in facts.settings.items() if name != "scan_splits"}
    sizes = values.pop("network", None)
    model = train(
        facts.model,
        network,
        setup_of(facts.model, network, None, values, sizes),
        clouds.clouds,
        clouds.labels,
        seed=int(facts.seed or 0),
        work=work,
        device=settings.device,
        base=load(bases[0].path, device=settings.device) if bases else None,
        progress=EpochLines(f"{facts.protocol} {facts.model} {facts.network} {facts.seed}"),
    )
    files = {MODEL: work / MODEL}
    head = model.method.head()
    if head is not None:
        head.save(work / HEAD)
        files[HEAD] = work / HEAD
    training = model.history.unpivot(
        index="epoch", variable_name="measure", value_name="value"
    ).select(pl.lit(run_id(facts)).alias("run_id"), "epoch", "measure", "value")
    tables = {"runs": run_row(facts, device=model.device), "training": training}
    return Produced(tables, 1, files=files)


@stage(writes=(OUTPUTS, PREDICTIONS), version=4, tags=("gpu",), alone=True)
def pass_clouds(shard: Shard, settings: DeviceSettings) -> Produced:
    """One forward pass over every split: logits and features for all scores at once."""
    from tasks.threedos.training import load, outputs

    facts = RunFacts.model_validate(shard.about["facts"])
    model = load(shard.part(MODEL).path, device=settings.device)
    splits, names = _clouds(shard, SPLITS)
    classes = dict(enumerate(names.values()))
    tables = [OUTPUTS.empty()]
    for split, clouds in splits.items():
        if not len(clouds.clouds):
            continue
        points = shard.about["points"] or model.setup.model.points
        if shard.about["points"] is None and split in facts.settings["scan_splits"]:
            points = model.setup.model.scan_points or points
        points = min(points, clouds.clouds.shape[1])
        arrays = outputs(model, clouds.clouds, points=points, normalisation=clouds.normalisation)
        tables.append(_output_rows(facts, shard.about["view"], clouds.rows, arrays, classes))
    table = pl.concat(tables)
    produced = {"outputs": table}
    if classes and "logits" in methods.find(facts.model).gives:
        rows = pl.concat(clouds.rows for clouds in splits.values())
        joined = table.drop("run_id", "predicted").join(rows, on="sample_id")
        produced["predictions"] = prediction_rows(facts, joined, classes)
    return Produced(produced, table.height)


def _output_rows(
    facts: RunFacts,
    view: str,
    rows: pl.DataFrame,
    arrays: Mapping[str, np.ndarray],
    classes: Mapping[int, str],
) -> pl.DataFrame:
    columns = {
        name: pl.Series(arrays[name].astype(np.float32)).cast(pl.List(pl.Float32))
        if name in arrays
        else pl.lit(None, pl.List(pl.Float32))
        for name in ("logits", "features")
    }
    novelty, predicted = pl.lit(None, pl.Float64), pl.lit(None, pl.String)
    if "novelty" in arrays:
        novelty = pl.lit(pl.Series(arrays["novelty"].astype(np.float64)))
    if "logits" in arrays:
        predicted = pl.lit(pl.Series([classes[int(n)] for n in arrays["logits"].argmax(1)]))
    return OUTPUTS.conform(
        rows.select(
            pl.lit(run_id(facts)).alias("run_id"), "sample_id", pl.lit(view).alias("view")
        ).with_columns(
            *(values.alias(name) for name, values in columns.items()),
            novelty.alias("novelty"),
            predicted.alias("predicted"),
        )
    )
