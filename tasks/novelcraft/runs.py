"""Which runs a build is to make: models with resolved settings, their protocols and their bases.

Enters: the configuration. Leaves: `ModelChoice`s before any work, so that a wrong name or setting
is refused at once; then, when the protocols have keys, `PlannedRun`s with all facts of each run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError
from schemas.manifest import RunMark
from schemas.novelcraft import Config
from schemas.runs import RunFacts
from tasks import scores as score_files
from tasks.detectors import chosen_detectors, find_detector
from tasks.detectors.base import Detector
from tasks.engine.plugins import ALL
from tasks.evaluation.runs import run_id, run_mark
from tasks.evaluation.stages import ScoreChoice, chosen_scores
from tasks.learning.loop import TRAINER_VERSION, TrainingSettings
from tasks.learning.training import weights_file
from tasks.novelcraft.samples import LOADER_VERSION, PROTOCOL_OF
from tasks.novelcraft.windows import PROTOCOL as WINDOWS_PROTOCOL

CONVENTIONS: Mapping[str, tuple[str, ...]] = {
    "visual": ("novelcraft-2022", "novelcraft-tmlr", "openood"),
    "symbolic": ("openood",),
    WINDOWS_PROTOCOL: ("novelcraft-symbolic", "openood"),
    "fused": ("novelcraft-2022", "openood"),
}
"""Protocols, and the conventions that each is measured by."""


@dataclass(frozen=True, eq=False)
class ModelChoice:
    """One model with resolved settings, and the choices that it builds on."""

    kind: type[Detector]
    settings: Any
    preset: str
    bases: tuple["ModelChoice", ...] = ()

    @property
    def protocol(self) -> str:
        return PROTOCOL_OF[self.kind.modality]

    @property
    def level(self) -> int:
        """0 where it builds on nothing; else one more than what it builds on."""
        return max((base.level + 1 for base in self.bases), default=0)

    @cached_property
    def weights(self) -> dict[str, str]:
        """SHA-256 of the checkpoint files that it starts from."""
        files = self.kind.weights_files(self.settings)
        return {name: weights_file(path).digest for name, path in files.items()}

    def changed(self) -> dict[str, Any]:
        """Settings that differ from the preset."""
        before = self.kind.resolve(self.preset).model_dump(mode="json")
        now = self.settings.model_dump(mode="json")
        return {name: value for name, value in now.items() if value != before[name]}

    def versions(self) -> dict[str, int]:
        trained = isinstance(self.settings, TrainingSettings) or self.kind.requires is not None
        trainer = {"trainer": TRAINER_VERSION} if trained else {}
        return {"model": self.kind.version, "loader": LOADER_VERSION, **trainer}


def chosen_models(config: Config) -> list[ModelChoice]:
    """What is asked for and what that builds on, bases first; what does not fit is refused."""
    for field, why in (
        ("networks", "its models bring their own networks"),
        ("predictors", "it has no increments"),
    ):
        if asked := getattr(config, field):
            raise ConfigError(f"{field} {', '.join(asked)} do not fit novelcraft: {why}")
    protocols = chosen_protocols(config)
    asked = dict(chosen_detectors(config.models))
    for name in list(asked):
        if not _fits(find_detector(name), protocols):
            if name in config.models:
                raise ConfigError(_misfit(find_detector(name), protocols))
            del asked[name]
    made: dict[str, list[ModelChoice]] = {}
    for name in asked:
        _add(name, asked, config, made)
    for setting in config.train:
        if not any(setting in find_detector(name).configuration.model_fields for name in made):
            among = f"none of the models {', '.join(made)} has it" if made else "there is no model"
            raise ConfigError(f"train.{setting}: {among}; `novelty models` tells settings")
    found = [choice for choices in made.values() for choice in choices]
    if WINDOWS_PROTOCOL in protocols:
        _check_contexts(found, config)
    for choice in found:
        choice.weights  # noqa: B018  a missing file is to be found now
    return sorted(found, key=lambda choice: choice.level)


def chosen_protocols(config: Config) -> tuple[str, ...]:
    for name in config.protocols:
        if name not in CONVENTIONS:
            there = ", ".join(CONVENTIONS)
            raise ConfigError(f"novelcraft has no protocol {name!r}; there are: {there}")
    return config.protocols or tuple(CONVENTIONS)


def _fits(kind: type[Detector], protocols: Sequence[str]) -> bool:
    protocol = PROTOCOL_OF.get(kind.modality)
    return protocol in protocols or (protocol == "symbolic" and WINDOWS_PROTOCOL in protocols)


def _misfit(kind: type[Detector], protocols: Sequence[str]) -> str:
    if kind.modality not in PROTOCOL_OF:
        return (
            f"model {kind.name} does not fit novelcraft: it takes samples of modality "
            f"{kind.modality}, novelcraft has {', '.join(PROTOCOL_OF)}"
        )
    return (
        f"model {kind.name} has protocol {PROTOCOL_OF[kind.modality]}, which is not among "
        f"{', '.join(protocols)}"
    )


def _check_contexts(choices: Sequence[ModelChoice], config: Config) -> None:
    contexts = config.windows.contexts
    for choice in choices:
        if choice.protocol == "symbolic" and choice.settings.order not in contexts:
            raise ConfigError(
                f"model {choice.kind.name} of order {choice.settings.order} has no windows: "
                f"windows.contexts are {', '.join(map(str, contexts))}; add it there, or name the "
                f"protocols without {WINDOWS_PROTOCOL}"
            )


def _add(
    name: str,
    asked: Mapping[str, Mapping[str, Any]],
    config: Config,
    made: dict[str, list[ModelChoice]],
) -> None:
    """Choices of one model, after those of what it builds on."""
    if name in made:
        return
    kind = find_detector(name)
    fields = kind.configuration.model_fields
    changes = {key: value for key, value in config.train.items() if key in fields}
    if "weights" in fields and config.vgg_weights is not None:
        changes["weights"] = config.vgg_weights
    choices = []
    for settings in kind.variants(config.preset, {**changes, **asked.get(name, {})}):
        bases = []
        for base in kind.bases(settings):
            _add(base.model, asked, config, made)
            bases.append(_base_choice(kind, made[base.model], base.model, base.settings))
        choices.append(ModelChoice(kind, settings, config.preset, tuple(bases)))
    made[name] = choices


def _base_choice(
    kind: type[Detector], choices: Sequence[ModelChoice], model: str, wanted: Mapping[str, Any]
) -> ModelChoice:
    fitting = [
        choice
        for choice in choices
        if all(getattr(choice.settings, name, None) == value for name, value in wanted.items())
    ]
    if len(fitting) != 1:
        which = "".join(f" with {name} {value}" for name, value in wanted.items())
        raise ConfigError(
            f"model {kind.name} builds on one run of {model}{which}, found {len(fitting)} among "
            f"{len(choices)}; set models.{model} or models.{kind.name} so that one is meant"
        )
    return fitting[0]


def fitting_scores(config: Config, models: Sequence[ModelChoice]) -> list[ScoreChoice]:
    """Scores with resolved settings; one asked for by name must fit some model."""
    choices = chosen_scores(config.scores, config.preset)
    given = [model.kind.gives | {"train", "valid"} for model in models]
    for name in config.scores:
        if name != ALL and models and not any(score_files.find(name).needs <= g for g in given):
            needs = ", ".join(sorted(score_files.find(name).needs))
            names = ", ".join(sorted({model.kind.name for model in models}))
            raise ConfigError(f"score {name} fits none of the models {names}: it needs {needs}")
    return choices


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run with all its facts, before it is made."""

    facts: RunFacts
    mark: RunMark
    choice: ModelChoice
    bases: tuple["PlannedRun", ...] = ()

    @property
    def name(self) -> str:
        """Name of its shards."""
        return f"{self.facts.model}-{self.mark.run_id}"


def plan_runs(
    models: Sequence[ModelChoice], seeds: Sequence[int], keys: Mapping[str, Mapping[str, str]]
) -> list[PlannedRun]:
    """A run for each model and seed; one that draws nothing has one run without a seed."""
    planned: dict[tuple[ModelChoice, int | None], PlannedRun] = {}
    for model in models:
        if model.protocol not in keys:
            raise ConfigError(
                f"model {model.kind.name}: protocol {model.protocol} has no samples in this source"
            )
        for seed in seeds if model.kind.seeded else (None,):
            bases = tuple(planned.get((base, seed)) or planned[base, None] for base in model.bases)
            facts = RunFacts(
                benchmark="novelcraft",
                protocol=model.protocol,
                model=model.kind.name,
                preset=model.preset,
                settings=model.settings.model_dump(mode="json"),
                changed=model.changed(),
                seed=seed,
                base_runs=tuple(base.mark.run_id for base in bases),
                versions=model.versions(),
                weights=model.weights,
                fit_key=keys[model.protocol]["fit_key"],
            )
            mark = run_mark(facts, keys[model.protocol]["data_key"])
            planned[model, seed] = PlannedRun(facts, mark, model, bases)
    return list(planned.values())


def plan_window_runs(
    runs: Sequence[PlannedRun], keys: Mapping[str, Mapping[str, str]]
) -> list[PlannedRun]:
    """Runs of windows: the same settings as the symbolic runs of frames that they build on."""
    windows = []
    for run in runs:
        if run.facts.protocol != "symbolic" or WINDOWS_PROTOCOL not in keys:
            continue
        facts = run.facts.model_copy(
            update={"protocol": WINDOWS_PROTOCOL, "base_runs": (run_id(run.facts),)}
        )
        mark = run_mark(facts, keys[WINDOWS_PROTOCOL]["data_key"])
        windows.append(replace(run, facts=facts, mark=mark, bases=(run,)))
    return windows


def weights_path(choice: ModelChoice) -> Path | None:
    """The checkpoint file that the model, or what it builds on, starts from."""
    for one in (choice, *choice.bases):
        path = getattr(one.settings, "weights", None)
        if path is not None:
            return Path(path)
    return None
