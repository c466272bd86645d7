"""What models can be fitted on in NovelCraft, how each protocol is measured, and runs of windows.

A run of windows fits nothing: it gives each window the largest novelty of its frames in a symbolic
run, and has that run as its base.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError
from schemas.novelcraft import Config
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN, RUNS
from storage.pieces import Part
from tasks import models, networks
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.model_runs import (
    ModelRun,
    Offer,
    PlannedRun,
    plan_models,
)
from tasks.evaluation.passing import output_rows
from tasks.evaluation.runs import run_mark, run_row
from tasks.evaluation.stages import EVALUATED, PassedRun
from tasks.features.images import ITEM_BAR_ROWS
from tasks.models.base import Model
from tasks.models.odin import Odin
from tasks.models.vgg_classifier import VggClassifier, VggSettings
from tasks.novelcraft.samples import MODALITY_OF, TABLES_OF
from tasks.novelcraft.windows import FRAMES_PROTOCOL, window_scores
from tasks.novelcraft.windows import PROTOCOLS as WINDOW_PROTOCOLS
from tasks.scores.base import Outputs

CONVENTIONS: Mapping[str, tuple[str, ...]] = {
    "visual": ("novelcraft-2022", "novelcraft-tmlr", "openood"),
    "symbolic": ("openood",),
    "symbolic_all": ("openood",),
    **dict.fromkeys(WINDOW_PROTOCOLS, ("novelcraft-symbolic", "openood")),
    "fused": ("novelcraft-2022", "openood"),
}
"""Protocols, and the conventions that each is measured by."""

FUSED = ("visual", "symbolic_all")
"""Protocols whose runs are fused: together they score every frame of `fused`."""

ODIN_NUMBERS = {"temperature", "epsilon"}
"""Settings that are chosen on validation in preset `paper`, unless one is given."""


def chosen_protocols(config: Config) -> tuple[str, ...]:
    for name in config.protocols:
        if name not in CONVENTIONS:
            names = ", ".join(CONVENTIONS)
            raise ConfigError(f"novelcraft has no protocol {name!r}; there are: {names}")
    return config.protocols or tuple(CONVENTIONS)


def chosen_runs(config: Config) -> list[ModelRun]:
    """Every run that is asked for and those that they build on; what does not fit is refused."""
    if config.predictors:
        names = ", ".join(config.predictors)
        raise ConfigError(f"predictors {names} do not fit novelcraft: it has no increments")
    protocols = chosen_protocols(config)
    for name in models.selection(config.models):
        fitting = [p for p, kind in MODALITY_OF.items() if kind == models.find(name).modality]
        if name in config.models and fitting and not any(_is_asked(p, protocols) for p in fitting):
            raise ConfigError(
                f"model {name} has protocol {fitting[0]}, which is not among {', '.join(protocols)}"
            )
    runs = plan_models("novelcraft", config, offers(config))
    if set(WINDOW_PROTOCOLS) & set(protocols):
        _check_contexts(runs, config.windows.contexts)
    return runs


def offers(config: Config) -> list[Offer]:
    """The protocols that models are fitted on, each for one modality."""
    below = tuple(networks.selection(config.networks))
    for name in below:
        if networks.find(name).modality not in MODALITY_OF.values():
            modalities = ", ".join(dict.fromkeys(MODALITY_OF.values()))
            raise ConfigError(
                f"network {name} does not fit novelcraft: it takes samples of modality "
                f"{networks.find(name).modality}, novelcraft has {modalities}"
            )
    protocols = chosen_protocols(config)

    def adapt(kind: type[Model], settings: Any) -> Mapping[str, Any]:
        changes: dict[str, Any] = {}
        if "item_bar_rows" in kind.configuration.model_fields:
            changes["item_bar_rows"] = ITEM_BAR_ROWS
        if isinstance(settings, VggSettings) and config.vgg_weights is not None:
            changes["weights"] = config.vgg_weights
        if kind is Odin:
            changes |= {"base": VggClassifier.name, "space": "pixel1"}
            if config.preset == "paper" and not settings.model_fields_set & ODIN_NUMBERS:
                changes["choose"] = "validation"
            else:
                changes["epsilon"] = 0.0  # what NovelCraft chose of its grid
        return changes

    def offer(protocol: str, modality: str) -> Offer:
        def takes(kind: type[Model]) -> bool:
            """Of all models, those that stand on a network are meant where one is named."""
            possible = bool(below) or not kind.uses_network or kind.name in config.models
            # Unless it is named, only what fused runs build on is made there.
            on_request = protocol != "symbolic_all" or protocol in config.protocols
            return possible and on_request and _is_asked(protocol, protocols)

        fitting = tuple(name for name in below if networks.find(name).modality == modality)
        return Offer(
            protocol, modality, networks=fitting, takes=takes, adapt=adapt, builds_on=FUSED
        )

    return [offer(protocol, modality) for protocol, modality in MODALITY_OF.items()]


def _is_asked(protocol: str, protocols: Sequence[str]) -> bool:
    """Windows are made of symbolic runs."""
    windows = protocol == FRAMES_PROTOCOL and set(WINDOW_PROTOCOLS) & set(protocols)
    return protocol in protocols or bool(windows)


def _check_contexts(runs: Sequence[ModelRun], contexts: Sequence[int]) -> None:
    for run in runs:
        if run.offer.protocol == FRAMES_PROTOCOL and run.settings.context not in contexts:
            raise ConfigError(
                f"model {run.kind.name} of context {run.settings.context} has no windows: "
                f"windows.contexts are {', '.join(map(str, contexts))}; add it there, or name the "
                f"protocols without {', '.join(WINDOW_PROTOCOLS)}"
            )


def sample_parts(build: Build, run: PlannedRun) -> tuple[Part, ...]:
    """The parts that a run's samples are loaded from."""
    tables = ("splits", *TABLES_OF[run.run.kind.modality])
    return tuple(part for table in tables for part in build.table(table))


# ---------------------------------------------------------------- windows


def make_window_runs(
    build: Build,
    runs: Sequence[PassedRun],
    keys: Mapping[str, Mapping[str, str]],
    protocols: Sequence[str],
) -> list[PassedRun]:
    """Runs of windows on each symbolic run, with the same settings."""
    names = [name for name in WINDOW_PROTOCOLS if name in protocols and name in keys]
    shards = [
        plan_windows(build, run, name, keys[name]["data_key"])
        for run in runs
        if run.facts.protocol == FRAMES_PROTOCOL
        for name in names
    ]
    return [
        PassedRun(
            RunFacts.model_validate(shard.about),
            shard.run,
            (piece.part("outputs"),),
            build.table("splits"),
            build.table("samples"),
        )
        for shard, piece in build.run_each(pass_windows, shards, Settings())
        if shard.run is not None
    ]


def plan_windows(build: Build, base: PassedRun, protocol: str, data_key: str) -> Shard:
    facts = base.facts.model_copy(update={"protocol": protocol, "base_runs": (base.mark.run_id,)})
    mark = run_mark(facts, data_key)
    tables = build.table("splits") + build.table("windows") + build.table("frames")
    return Shard(
        f"{facts.model}-{mark.run_id}",
        parts=(*tables, *base.outputs),
        about=facts.model_dump(mode="json"),
        depends={"run": mark.run_id, "rows": mark.data_key, "view": PLAIN},
        run=mark,
    )


@stage(writes=(OUTPUTS, RUNS), version=2)
def pass_windows(shard: Shard, settings: Settings) -> Produced:
    """Give each window of the run's context the largest novelty of its frames."""
    facts = RunFacts.model_validate(shard.about)
    frames = shard.read("frames", ["frame_id", "episode_id", "position"])
    novelty = shard.read("outputs").select("sample_id", pl.col("novelty").alias("score"))
    scored = novelty.join(frames, left_on="sample_id", right_on="frame_id")
    splits = shard.read("splits").filter(
        (pl.col("protocol") == facts.protocol) & pl.col("split").is_in(EVALUATED)
    )
    context, mode = facts.settings["context"], WINDOW_PROTOCOLS[str(facts.protocol)]
    windows = (
        shard.read("windows")
        .filter((pl.col("mode") == mode) & (pl.col("context") == context))
        .join(splits.select("sample_id"), on="sample_id", how="semi")
    )
    largest = window_scores(scored, windows)["score"].to_numpy()
    outputs = output_rows(facts, windows["sample_id"].to_list(), Outputs(novelty=largest), {})
    return Produced({"outputs": outputs, "runs": run_row(facts)}, outputs.height)
