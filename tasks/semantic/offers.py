"""Which trials there are for models: the user's choice checked, and an offer for each trial.

Enters: the choice, subsets, splits and parts of tables. Leaves: offers for
tasks/evaluation/model_runs.py. A wrong name or setting is said before anything is read.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl

from schemas.errors import ConfigError, SourceError
from schemas.semantic import Config
from storage.pieces import Part
from tasks import models, networks
from tasks.engine.plugins import ALL
from tasks.engine.stage import Build
from tasks.evaluation.model_runs import Offer, plan_models, shared_settings
from tasks.evaluation.stages import check_scores, chosen_scores
from tasks.learning.devices import choose_device
from tasks.models.base import Model
from tasks.models.classifier import Classifier
from tasks.models.odin import Odin
from tasks.models.pictures import PictureClassifier
from tasks.models.pixel_gaussian import PixelGaussian, shrunk_side
from tasks.semantic.trials import KNOWN, KnownSet, Subset, parts_of, protocol_of

log = logging.getLogger(__name__)

BENCHMARK, MODALITY = "semantic", "image"
# The longest side of pictures that each network is for.
SIDES = {"cifar": 48, "stl": 128}
AUTO = "auto"


# ---------------------------------------------------------------- what is asked for


def with_own_models(config: Config) -> Config:
    """Add what nobody has to name: the trivial baseline, and a network for ODIN alone."""
    choices = dict(config.models)
    if config.trivial_baseline:
        choices.setdefault(PixelGaussian.name, {})
    if set(choices) - {PixelGaussian.name} == {Odin.name} and "base" not in choices[Odin.name]:
        choices[Classifier.name] = {}
    return config.model_copy(update={"models": choices})


def check_choice(config: Config, declared: Sequence[Subset]) -> None:
    """Names and settings that can be known to be wrong before anything is read."""
    datasets = [source.partition(".")[0] for source in config.source]
    subset_names = list(dict.fromkeys([*(subset.name for subset in declared), *datasets]))
    for option, names in (("subsets", config.subsets), ("known", (config.known,))):
        for name in names:
            if name is not None and name not in subset_names:
                raise ConfigError(
                    f"{option}: {name!r} is unknown; there are {', '.join(subset_names)}"
                )
    available = list(config.subsets) or subset_names
    if config.known is not None:
        available = [*config.subsets, f"{KNOWN}{config.known}"]
    for name in config.protocols:
        subset, slash, _ = name.partition("/")
        if slash and subset not in available:
            raise ConfigError(
                f"protocols: {name!r} is of no subset that is built; there are "
                f"{', '.join(available)}"
            )
    if config.predictors:
        raise ConfigError("semantic has no predictors, as nothing in it goes over time")
    network_names = [name for name in chosen_networks(config.networks) if name != AUTO]
    offer = Offer("any trial", MODALITY, tuple(network_names) or networks.names_of(MODALITY))
    runs = plan_models(BENCHMARK, with_own_models(config), [offer])
    if config.device != "auto":
        choose_device(config.device)
    chosen_scores(config.scores, config.preset)
    check_scores(config.scores, {run.kind.name: run.kind.gives for run in runs})


def chosen_networks(choice: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Networks by name. `auto` goes by the size of the pictures; nothing and `all` mean `auto`."""
    names = networks.names_of(MODALITY)
    for name, changes in choice.items():
        if name not in (*names, AUTO, ALL):
            raise ConfigError(f"no network {name!r}; there are: {', '.join((AUTO, *names))}")
        if changes and name in (AUTO, ALL):
            raise ConfigError(f"networks.{name} has no settings; name one of {', '.join(names)}")
    chosen_names = [AUTO if name == ALL else name for name in choice]
    return list(dict.fromkeys(chosen_names)) or [AUTO]


def network_for(name: str, side: int) -> str:
    """The network named, or with `auto` the one for pictures of this side."""
    if name != AUTO:
        return name
    return next((network for network, most in SIDES.items() if side <= most), "imagenet")


# ---------------------------------------------------------------- trials


@dataclass(frozen=True)
class Trial:
    """One protocol with what its runs read; sides are the least and most pixels of a picture."""

    protocol: str
    subset: Subset
    member: str
    splits: Part
    pictures: tuple[Part, ...]
    sides: tuple[int, int]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.splits, *self.pictures


def all_trials(
    build: Build, subsets: Sequence[Subset], known_side: int | None = None
) -> list[Trial]:
    """Every trial of this build; `known_side` is that of trials with novel sets."""
    splits = {part.shard: part for part in build.table("splits")}
    sample_ids = build.read("splits")["sample_id"].unique()
    tables = build.table("pictures")
    sides = {
        dataset: picture_sides(parts_of((dataset,), tables), sample_ids)
        for dataset in {subset.dataset for subset in subsets}
    }
    trials = []
    for subset in subsets:
        limits = sides[subset.dataset]
        if isinstance(subset, KnownSet):
            side = known_side or limits[0]
            if known_side is None and limits[0] != limits[1]:
                raise ConfigError(
                    f"pictures of {subset.dataset} have sides from {limits[0]} to {limits[1]}; "
                    "name the one that models are to see with --known-side"
                )
            limits = side, side
        for name in subset.trials:
            protocol = protocol_of(subset, name)
            parts = parts_of(subset.datasets(name), tables)
            trials.append(Trial(protocol, subset, name, splits[protocol], parts, limits))
    return trials


def picture_sides(pictures: Iterable[Part], sample_ids: pl.Series) -> tuple[int, int]:
    """The shortest and the longest side of those pictures that are in a trial."""
    sizes = pl.concat(
        part.read(["sample_id", "width", "height"]).filter(
            pl.col("sample_id").is_in(sample_ids.implode())
        )
        for part in pictures
    )
    ends = sizes.select(
        pl.min_horizontal("width", "height").min().alias("least"),
        pl.max_horizontal("width", "height").max().alias("most"),
    )
    least, most = ends.row(0)
    return least or 1, most or 1


def chosen_trials(names: Sequence[str], trials: Sequence[Trial]) -> list[Trial]:
    """Trials by protocol, subset or held-out member; ConfigError names one that is not there."""
    words = [{trial.protocol, trial.subset.name, trial.member} for trial in trials]
    for name in names:
        if not any(name in trial_words for trial_words in words):
            protocols = ", ".join(trial.protocol for trial in trials)
            raise ConfigError(f"protocols: no trial {name!r}; there are {protocols}")
    name_set = set(names)
    return [
        t
        for t, trial_words in zip(trials, words, strict=True)
        if not name_set or trial_words & name_set
    ]


def trainable(trials: Sequence[Trial], splits: pl.DataFrame) -> list[Trial]:
    """Trials with a training image of two classes or more and both roles in test."""
    ready = {}
    for (protocol,), rows in splits.group_by("protocol"):
        labels = set(rows.filter(split="train")["label"])
        test = rows.filter(split="test")
        ready[protocol] = (
            len(labels) > 1
            and labels == set(range(len(labels)))
            and set(test["label"].drop_nulls()) <= labels
            and set(test["role"]) == {"known", "novel"}
        )
    for trial in trials:
        if not ready.get(trial.protocol):
            log.info(
                f"  {trial.protocol}: no network, as a class has no training image, or test has no "
                "known or no novel one"
            )
    usable = [trial for trial in trials if ready.get(trial.protocol)]
    if not usable:
        raise SourceError("no trial has pictures enough for a network; name more sources")
    return usable


# ---------------------------------------------------------------- offers


def offers_of(config: Config, trials: Sequence[Trial], splits: pl.DataFrame) -> list[Offer]:
    """What models there may be of each trial; `config` is `with_own_models`.

    `trivial_baseline` makes the baseline for every trial. If it is only named among the models, it
    is made for the trials that are named.
    """
    selection = chosen_trials(config.protocols, trials)
    train, test = (image_counts(splits, split) for split in ("train", "test"))
    ready = [t for t in trials if train.get(t.protocol, 0) >= 2 and test.get(t.protocol, 0) >= 1]
    fewest: dict[str, int] = {}
    for trial in ready:
        count = train[trial.protocol]
        fewest[trial.subset.name] = min(count, fewest.get(trial.subset.name, count))
    baseline, others = set(), set()
    if config.models.keys() & {PixelGaussian.name, ALL}:
        baseline_trials = trials if config.trivial_baseline else selection
        baseline = {trial.protocol for trial in baseline_trials if trial in ready}
        _say_lacking([trial.protocol for trial in baseline_trials if trial not in ready])
    if config.models.keys() - {PixelGaussian.name}:
        others = {trial.protocol for trial in trainable(selection, splits)}
    names = chosen_networks(config.networks)
    return [
        Offer(
            trial.protocol,
            MODALITY,
            tuple(dict.fromkeys(network_for(name, trial.sides[1]) for name in names)),
            partial(
                _takes,
                trial.protocol in baseline,
                trial.protocol in others,
                frozenset(unfit_models(config, trial) if trial.protocol in others else ()),
            ),
            partial(_adapt, trial, fewest.get(trial.subset.name, 0)),
            {"side": trial.sides[0]} if isinstance(trial.subset, KnownSet) else {},
        )
        for trial in trials
        if trial.protocol in baseline | others
    ]


def image_counts(splits: pl.DataFrame, split: str) -> dict[str, int]:
    """Images of that split by protocol."""
    return dict(splits.filter(split=split).group_by("protocol").len().iter_rows())


def _say_lacking(protocols: Sequence[str]) -> None:
    if protocols:
        log.info(
            f"  {', '.join(protocols)}: no baseline, as less than 2 training images or no test "
            "image are there"
        )


def unfit_models(config: Config, trial: Trial) -> Iterator[str]:
    """Models of `all` that cannot learn from the pictures; `_adapt` refuses those named."""
    for name in set(models.selection(config.models)) - set(config.models):
        kind = models.find(name)
        if not issubclass(kind, PictureClassifier):
            continue
        for choice in chosen_networks(config.networks):
            network = network_for(choice, trial.sides[1])
            settings = kind.resolve(config.preset, shared_settings(config, name), network)
            if reason := kind.unfit(settings, *trial.sides):
                log.info(f"  {trial.protocol}: no {name}, as {reason}")
                yield name
                break


def _takes(baseline: bool, others: bool, unfit: frozenset[str], kind: type[Model]) -> bool:
    return baseline if kind is PixelGaussian else others and kind.name not in unfit


def _adapt(trial: Trial, images: int, kind: type[Model], settings: Any) -> dict[str, Any]:
    """The baseline sees all trials of a subset at the side that the smallest one allows.

    A model that cannot learn from the pictures is refused here, before anything is trained.
    """
    if issubclass(kind, PictureClassifier) and (reason := kind.unfit(settings, *trial.sides)):
        raise ConfigError(f"model {kind.name} on {trial.protocol}: {reason}")
    if kind is not PixelGaussian:
        return {}
    return {"side": shrunk_side(min(settings.side, trial.sides[0]), images)}
