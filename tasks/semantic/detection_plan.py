"""Which runs are made: what was asked for, checked, and one shard for each run and stage.

Enters: the user's choice, subsets, the splits, parts of tables. Leaves: shards of the stages in
tasks/semantic/detection.py and runs for the shared stages. A wrong name or setting is said before
anything is read.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl

from schemas.config import make_config
from schemas.errors import ConfigError, SourceError
from schemas.manifest import RunMark
from schemas.runs import RunFacts
from schemas.semantic import ODIN_MEASURES, TEST_MEASURES, Config
from storage.pieces import Part, Piece
from tasks import scores
from tasks.engine.plugins import ALL, put_over
from tasks.engine.stage import Build, Shard
from tasks.evaluation.runs import run_mark
from tasks.evaluation.stages import PassedRun, ScoreChoice, chosen_scores
from tasks.semantic import models
from tasks.semantic.models.base import NetworkModel
from tasks.semantic.models.odin import Odin
from tasks.semantic.models.pixel_gaussian import PixelGaussian, shrunk_side
from tasks.semantic.networks import NAMES, VERSION, NetworkSettings
from tasks.semantic.trials import Subset, parts_of, protocol_of

if TYPE_CHECKING:
    from tasks.semantic.presets import Setup

# The longest side of pictures that each network is for.
SIDES = {"cifar": 48, "stl": 128}
AUTO = "auto"
ODIN, GAUSSIAN = Odin.name, PixelGaussian.name


# ---------------------------------------------------------------- what is asked for


def check_choice(config: Config, declared: Sequence[Subset]) -> None:
    """Names and settings that can be known to be wrong before anything is read."""
    datasets = [source.partition(".")[0] for source in config.source]
    there = list(dict.fromkeys([*(subset.name for subset in declared), *datasets]))
    for name in config.subsets:
        if name not in there:
            raise ConfigError(f"subsets: {name!r} is unknown; there are {', '.join(there)}")
    for name in config.protocols:
        subset, slash, _ = name.partition("/")
        if slash and subset not in (config.subsets or there):
            raise ConfigError(
                f"protocols: {name!r} is of no subset that is built; there are "
                f"{', '.join(config.subsets or there)}"
            )
    if config.predictors:
        raise ConfigError("semantic has no predictors, as nothing in it goes over time")
    networks = chosen_networks(config.networks)
    asked = chosen_models(config)
    for name, changes in asked.items():
        for network in [n for n in networks if n != AUTO] or NAMES:
            settings_of(name, network, config, changes)
    if config.device not in ("auto", "cpu"):
        from tasks.learning.devices import choose_device

        choose_device(config.device)
    chosen_scores(config.scores, config.preset)
    given = [models.find(name).gives | {"train", "valid"} for name in asked]
    for name in config.scores:
        if name != ALL and not any(scores.find(name).needs <= one for one in given):
            needs = ", ".join(sorted(scores.find(name).needs))
            raise ConfigError(
                f"score {name} needs {needs}, which none of the models "
                f"{', '.join(asked) or '(none)'} puts out"
            )


def chosen_models(config: Config) -> dict[str, dict[str, Any]]:
    """Models asked for with the settings that differ from the preset; ODIN brings a network."""
    asked = dict(models.chosen(config.models))
    if config.trivial_baseline:
        asked.setdefault(GAUSSIAN, {})
    if ODIN in asked and not any(issubclass(models.find(n), NetworkModel) for n in asked):
        asked["classifier"] = {}
    fields = {name: models.find(name).configuration.model_fields for name in asked}
    for setting in config.train:
        if not any(setting in own for own in fields.values()):
            raise ConfigError(
                f"train.{setting}: none of the models {', '.join(sorted(asked)) or '(none)'} has "
                "this setting; `novelty models NAME` lists those of a model"
            )
    return {
        name: put_over({k: v for k, v in config.train.items() if k in fields[name]}, asked[name])
        for name in sorted(asked)
    }


def chosen_networks(choice: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Networks by name; `auto`, which is also what nothing and `all` mean, goes by the pictures."""
    for name, changes in choice.items():
        if name not in (*NAMES, AUTO, ALL):
            raise ConfigError(f"no network {name!r}; there are: {', '.join((AUTO, *NAMES))}")
        if changes and name in (AUTO, ALL):
            raise ConfigError(f"networks.{name} has no settings; name one of {', '.join(NAMES)}")
    wanted = [AUTO if name == ALL else name for name in choice]
    return list(dict.fromkeys(wanted)) or [AUTO]


def settings_of(
    name: str, network: str, config: Config, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """All settings of a model on a network, resolved, as JSON."""
    kind = models.find(name)
    if not issubclass(kind, NetworkModel):
        return kind.resolve(config.preset, changes).model_dump(mode="json")
    return setup_for(kind, network, config, changes).model_dump(mode="json")


def setup_for(
    kind: type[NetworkModel], network: str, config: Config, changes: Mapping[str, Any]
) -> "Setup":
    """The preset of the network with what was asked to differ; the model's own wins."""
    from tasks.semantic.training import resolved

    shape = config.networks.get(network, {})
    make_config(NetworkSettings, dict(shape))
    asked = put_over({"network": shape} if shape else {}, changes)
    if "network_name" in asked:
        raise ConfigError(f"{kind.name}: choose the network with --networks, not by network_name")
    setup = kind.resolve(config.preset, asked, network)
    assert isinstance(setup, kind.configuration)
    return resolved(setup, kind)


# ---------------------------------------------------------------- trials and their runs


@dataclass(frozen=True)
class Trial:
    """One protocol with what its runs read; sides are the least and most pixels of a picture."""

    protocol: str
    subset: Subset
    member: str
    fit_key: str
    data_key: str
    splits: Part
    pictures: tuple[Part, ...]
    sides: tuple[int, int]


@dataclass(frozen=True)
class Run:
    """A run that is planned, on the trial of its protocol."""

    facts: RunFacts
    trial: Trial

    @cached_property
    def mark(self) -> RunMark:
        return run_mark(self.facts, self.trial.data_key)

    def shard(self, *more: Part, **depends: Any) -> Shard:
        """What a stage makes of the run; only its rows and what `depends` names are in the key."""
        return Shard(
            self.mark.run_id,
            parts=(self.trial.splits, *self.trial.pictures, *more),
            about=self.facts.model_dump(mode="json"),
            depends={"run": self.mark.run_id, **depends},
            run=self.mark,
        )

    def pass_shard(self, *more: Part) -> Shard:
        return self.shard(*more, rows=self.trial.data_key)

    def passed(self, piece: Piece, head: Part | None = None) -> PassedRun:
        return PassedRun(
            self.facts, self.mark, (piece.part("outputs"),), (self.trial.splits,), head=head
        )


def all_trials(
    build: Build, subsets: Sequence[Subset], keys: Mapping[str, Mapping[str, str]]
) -> list[Trial]:
    """Every trial of this build."""
    splits = {part.shard: part for part in build.table("splits")}
    used = build.read("splits")["sample_id"].unique()
    pictures = {
        dataset: parts_of(dataset, build.table("pictures"))
        for dataset in {subset.dataset for subset in subsets}
    }
    sides = {dataset: picture_sides(parts, used) for dataset, parts in pictures.items()}
    return [
        Trial(
            protocol,
            subset,
            member,
            keys[protocol]["fit_key"],
            keys[protocol]["data_key"],
            splits[protocol],
            pictures[subset.dataset],
            sides[subset.dataset],
        )
        for subset in subsets
        for member in subset.members.values()
        for protocol in (protocol_of(subset, member),)
    ]


def picture_sides(pictures: Iterable[Part], used: pl.Series) -> tuple[int, int]:
    """The shortest and the longest side of those pictures that are in a trial."""
    sizes = pl.concat(
        part.read(["sample_id", "width", "height"]).filter(
            pl.col("sample_id").is_in(used.implode())
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
        if not any(name in every for every in words):
            there = ", ".join(trial.protocol for trial in trials)
            raise ConfigError(f"protocols: no trial {name!r}; there are {there}")
    wanted = set(names)
    return [t for t, every in zip(trials, words, strict=True) if not wanted or every & wanted]


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
            print(
                f"  {trial.protocol}: no network, as a class has no training image, or test has no "
                "known or no novel one",
                file=sys.stderr,
            )
    found = [trial for trial in trials if ready.get(trial.protocol)]
    if not found:
        raise SourceError("no trial has pictures enough for a network; name more sources")
    return found


def network_for(name: str, side: int) -> str:
    """The network named, or with `auto` the one for pictures of this side."""
    if name != AUTO:
        return name
    return next((network for network, most in SIDES.items() if side <= most), "imagenet")


def plan_networks(config: Config, trials: Sequence[Trial], splits: pl.DataFrame) -> list[Run]:
    """One run per trial, network, model and seed."""
    from tasks.semantic.training import TRAINER_VERSION, precision_of

    asked = chosen_models(config)
    kinds = {name: models.find(name) for name in asked}
    trained = {name: kind for name, kind in kinds.items() if issubclass(kind, NetworkModel)}
    if not trained:
        return []
    runs = []
    for trial in trainable(chosen_trials(config.protocols, trials), splits):
        names = [network_for(name, trial.sides[1]) for name in chosen_networks(config.networks)]
        for network in dict.fromkeys(names):
            for name, kind in trained.items():
                setup = setup_for(kind, network, config, asked[name])
                settings = setup.model_dump(mode="json")
                plain = setup_for(kind, network, config.model_copy(update={"networks": {}}), {})
                facts = RunFacts(
                    benchmark="semantic",
                    protocol=trial.protocol,
                    model=name,
                    network=network,
                    preset=config.preset,
                    settings=settings,
                    changed=differing(settings, plain.model_dump(mode="json")),
                    versions={
                        "model": kind.version,
                        "network": VERSION,
                        "trainer": TRAINER_VERSION,
                        "odin": Odin.version,
                    },
                    precision=precision_of(setup, config.device),
                    # Test is measured in training, so all rows count (docs/semantic.md, 15).
                    fit_key=trial.data_key,
                )
                runs += [
                    Run(facts.model_copy(update={"seed": seed}), trial) for seed in config.seeds
                ]
    return runs


def differing(settings: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are not those of the preset; of nested ones those inside."""
    return {
        name: differing(value, plain[name]) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value != plain[name]
    }


def plan_odin(config: Config, bases: Sequence[Run]) -> list[Run]:
    """ODIN of each network, from the `odin` settings of the network."""
    asked = chosen_models(config)
    if ODIN not in asked:
        return []
    runs = []
    for base in bases:
        started = base.facts.settings["odin"]
        own = Odin.resolve(None, put_over(started, asked[ODIN])).model_dump(mode="json")
        facts = base.facts.model_copy(
            update={
                "model": ODIN,
                "settings": own | {"threads": base.facts.settings["threads"]},
                "changed": differing(own, started),
                "base_runs": (base.mark.run_id,),
                "versions": {"model": Odin.version},
                "precision": "float32",
            }
        )
        runs.append(Run(facts, base.trial))
    return runs


def plan_gaussians(config: Config, trials: Sequence[Trial], splits: pl.DataFrame) -> list[Run]:
    """The trivial baseline of every trial, or where it is named of those that are named."""
    asked = chosen_models(config)
    if GAUSSIAN not in asked:
        return []
    counts = {
        protocol: (train, test)
        for protocol, train, test in splits.group_by("protocol")
        .agg(*((pl.col("split") == name).sum().alias(name) for name in ("train", "test")))
        .iter_rows()
    }
    ready = [t for t in trials if counts[t.protocol][0] >= 2 and counts[t.protocol][1] >= 1]
    wanted = trials if config.trivial_baseline else chosen_trials(config.protocols, trials)
    if lacking := [trial.protocol for trial in wanted if trial not in ready]:
        print(
            f"  {', '.join(lacking)}: no baseline, as less than 2 training images or no test image "
            "are there",
            file=sys.stderr,
        )
    settings = settings_of(GAUSSIAN, "none", config, asked[GAUSSIAN])
    fewest: dict[str, int] = {}
    for trial in ready:
        count = counts[trial.protocol][0]
        fewest[trial.subset.name] = min(count, fewest.get(trial.subset.name, count))
    return [
        Run(
            RunFacts(
                benchmark="semantic",
                protocol=trial.protocol,
                model=GAUSSIAN,
                preset=config.preset,
                settings={
                    "side": shrunk_side(
                        min(settings["side"], trial.sides[0]), fewest[trial.subset.name]
                    )
                },
                changed=asked[GAUSSIAN],
                seed=seed,
                versions={"model": PixelGaussian.version},
                fit_key=trial.fit_key,
            ),
            trial,
        )
        for trial in ready
        if trial in wanted
        for seed in config.seeds
    ]


def plan_averages(
    networks: Sequence[Run], odins: Sequence[Run], trained: Mapping[str, Piece]
) -> list[Shard]:
    """Numbers over the last epochs: msp of each network, and of ODIN where it is what was measured.

    `trained` are pieces by the run of the network. In training ODIN has the settings of the
    network; a run of ODIN with others has no such number.
    """
    settings = {run.mark.run_id: run.facts.settings["odin"] for run in networks}
    msp, own = described_scores()
    wanted = [(run, run.mark.run_id, msp, TEST_MEASURES) for run in networks]
    for run in odins:
        (base,) = run.facts.base_runs
        if {name: run.facts.settings[name] for name in settings[base]} == settings[base]:
            wanted.append((run, base, own, ODIN_MEASURES))
    return [
        Shard(
            run.mark.run_id,
            parts=(run.trial.splits, trained[base].part("training")),
            about={
                "run_id": run.mark.run_id,
                "protocol": run.facts.protocol,
                "model": run.facts.model,
                "seed": run.facts.seed,
                "score": score.name,
                "score_id": score.score_id,
                "measures": measures,
            },
            depends={"training": trained[base].manifest.key, "rows": run.trial.data_key},
            run=run.mark,
        )
        for run, base, score, measures in wanted
    ]


def described_scores() -> list[ScoreChoice]:
    """The scores that numbers over the last epochs are of: msp and own."""
    return chosen_scores({"msp": {}, "own": {}})
