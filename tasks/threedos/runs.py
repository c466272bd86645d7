"""Runs of 3DOS: what each track offers to models of point clouds (section 4).

Enters: tracks, `splits`, `samples` and `point_clouds`. Leaves: offers and parts; the shared stages
fit and pass, one view for each density.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl

from schemas.errors import ConfigError, SourceError
from schemas.tables import SPLIT_NAMES
from schemas.threedos import Config
from storage.pieces import Part
from tasks import models, networks
from tasks.evaluation.embeddings import View
from tasks.evaluation.model_runs import ModelRun, Offer, plan_models
from tasks.evaluation.stages import check_scores
from tasks.models.base import Model
from tasks.models.clouds import CloudModel
from tasks.models.released_clouds import fill_released
from tasks.networks.pointnet2 import ADAM
from tasks.threedos.lists import DATASETS
from tasks.threedos.samples import CLOUDS
from tasks.threedos.tracks import Track

BENCHMARK = "threedos"
CLOUD = "cloud"
CONVENTIONS = ("threedos", "threedos-first-threshold", "openood")
# Tracks with scans augment as the paper's do (turns, jitter), others as its synthetic track.
SCANS = "scanobjectnn"
# Settings that say how many points of a cloud are seen.
SEEN = ("points", "scan_points")
# Where the release trains a model otherwise than on the other tracks: preset, model, datasets.
BY_TRACK: dict[tuple[str, str, str], Mapping[str, Any]] = {
    ("paper", "subcenter_arcface", "shapenet"): {"epochs": 500},
    ("paper", "subcenter_arcface", SCANS): ADAM,
}


def plan_runs(config: Config, tracks: Sequence[Track]) -> list[ModelRun]:
    """What the configuration asks for; a name or setting that does not fit is refused."""
    if config.predictors:
        raise ConfigError(
            f"predictor {next(iter(config.predictors))} does not fit: 3DOS has no steps over time"
        )
    if config.models and not config.source:
        raise ConfigError("models need clouds: name sources of shapes with --source")
    below = tuple(
        name
        for name in networks.selection(config.networks)
        if name in config.networks or networks.find(name).modality == CLOUD
    )
    offers = [offer_of(track, config.preset, below) for track in tracks]
    runs = [
        run for choices in by_density(config) for run in plan_models(BENCHMARK, choices, offers)
    ]
    by_name = {track.name: track for track in tracks}
    for run in runs:
        if issubclass(run.kind, CloudModel) and run.settings.weights is not None:
            check_weights(run, len(by_name[run.offer.protocol].known), config.seeds)
    check_scores(config.scores, {run.kind.name: run.kind.gives for run in runs})
    return runs


def check_weights(run: ModelRun, classes: int, seeds: Sequence[int]) -> None:
    """A released checkpoint that does not fit is refused before any work."""
    import torch

    if len(seeds) > 1:
        raise ConfigError(
            f"models.{run.kind.name}.weights is one training, but there are {len(seeds)} seeds; "
            "name one, that of the file"
        )
    model = run.kind(run.settings, run.network, run.shape)
    model.classes = classes
    assert isinstance(model, CloudModel)
    with torch.device("meta"):
        model._make_layers()
    fill_released(model, run.settings.weights)


def by_density(config: Config) -> list[Config]:
    """The configuration once for each density that models are trained and tested at."""
    changes = {"train": config.train, **{f"models.{k}": v for k, v in config.models.items()}}
    twice = [name for name, values in changes.items() if values.keys() & set(SEEN)]
    if config.densities and twice:
        raise ConfigError(
            f"{twice[0]} sets {' or '.join(SEEN)}, and so does densities; leave one of them out"
        )
    kinds = [models.find(name).configuration for name in models.selection(config.models)]
    seen = [name for name in SEEN if any(name in kind.model_fields for kind in kinds)] or SEEN
    return [
        config.model_copy(update={"train": {**config.train, **dict.fromkeys(seen, count)}})
        for count in config.densities
    ] or [config]


def offer_of(track: Track, preset: str, networks_below: tuple[str, ...]) -> Offer:
    """The clouds of a track for models on these networks."""
    return Offer(
        track.name,
        CLOUD,
        networks_below,
        adapt=partial(settings_of_track, track, preset),
        loader={"scan_splits": scan_splits(track)},
    )


def settings_of_track(
    track: Track, preset: str, kind: type[Model], settings: Any
) -> Mapping[str, Any]:
    """What the track asks for, given what the preset and the user have."""
    by_track = dict(BY_TRACK.get((preset, kind.name, "+".join(sorted(track.train))), {}))
    if getattr(settings, "augmentation", "none") != "none":
        # Clouds are upright by now.
        by_track |= {"augmentation": "rw" if SCANS in track.sources else "st", "up": "y"}
    scan_points = getattr(settings, "scan_points", None)
    if scan_points and "train" in scan_splits(track):
        by_track["points"] = scan_points
    return by_track


def scan_splits(track: Track) -> list[str]:
    """Splits whose known shapes are all scans; those held out for validation are as train."""
    sources = {"train": track.train, "valid": track.valid or track.train, "test": track.test}
    return [split for split in SPLIT_NAMES if set(sources[split]) == {SCANS}]


def density_views(points: Sequence[int]) -> list[View]:
    """The density of training, and those met in testing only."""
    return [View(), *(View(f"points_{count}", {"points": count}) for count in points)]


def trainable(
    tracks: Sequence[Track], splits: pl.DataFrame, clouds: pl.Series, choice: Collection[str] = ()
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
    wrong = [name for name in lacking if lacking[name] and (name in choice or not ready)]
    if wrong:
        raise SourceError(
            f"track {wrong[0]} cannot be trained on: among the clouds there are no "
            f"{' and no '.join(lacking[wrong[0]])}; name the sources of its shapes, or other tracks"
        )
    return ready


def track_parts(
    tracks: Iterable[Track], tables: Mapping[str, tuple[Part, ...]]
) -> dict[str, tuple[Part, ...]]:
    """By track: its splits, and the clouds of its sources."""
    parts = {}
    for track in tracks:
        splits = tuple(part for part in tables["splits"] if part.shard == track.name)
        parts[track.name] = splits + tuple(
            part
            for part in tables[CLOUDS]
            if DATASETS.get(source := part.shard.partition("/")[0], source) in track.sources
        )
    return parts
