"""Runs of models, the same in every benchmark: planned, fitted, their samples passed.

Enters: what a user chose, and for each protocol an `Offer`: which samples there are for models.
Leaves: `runs` and `training` with each fitted model and its head as files, then `outputs` and
`predictions` of each sample. What a benchmark adds is `tasks/<benchmark>/samples.py`: `load` gives
the samples of a split as the model takes them.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError
from schemas.manifest import RunMark
from schemas.runs import RunChoices, RunFacts
from schemas.tables import OUTPUTS, PLAIN, PREDICTIONS, RUNS, TRAINING
from storage.pieces import Part, Piece
from storage.raw import RawFile
from tasks import models, networks
from tasks.engine.plugins import put_over
from tasks.engine.stage import Build, Failure, Produced, Shard, stage
from tasks.evaluation.embeddings import FrozenRun, View, embedded, embedding_of, make_embeddings
from tasks.evaluation.passing import (
    LOADER,
    NETWORK,
    DeviceSettings,
    loader_of,
    model_of,
    output_rows,
    use_resources,
)
from tasks.evaluation.runs import run_id, run_mark, run_row
from tasks.evaluation.stages import (
    EVALUATED,
    HEAD,
    PassedRun,
    numbered_labels,
    prediction_rows,
    record_failures,
)
from tasks.learning.compiling import check_compiler
from tasks.learning.devices import with_arithmetic
from tasks.learning.samples import Samples
from tasks.learning.trainer import TRAINER_VERSION, TrainingSettings
from tasks.learning.training import BASE, MODEL, EpochLines, weights_file
from tasks.models.base import Fitting, Model

NO_NETWORK = NO_PRESET = "none"
SAMPLES_PER_PASS = 50_000
"""Of one protocol; what they put out is held in memory until it is written."""
# ---------------------------------------------------------------- choices


@dataclass(frozen=True, eq=False)
class Offer:
    """The samples of one protocol, as something that models can be fitted on.

    `networks` are those to use here, `takes` says whether the samples are enough for a model.
    `adapt` tells settings that the protocol asks for, given those that the preset and the user
    have; what the user changed wins. `loader` is what decides how samples are seen, for the key.
    `builds_on` are protocols of other modalities whose runs are meant as bases; none: all.
    """

    protocol: str
    modality: str
    networks: tuple[str, ...] = ()
    takes: Callable[[type[Model]], bool] = lambda kind: True
    adapt: Callable[[type[Model], Any], Mapping[str, Any]] = lambda kind, settings: {}
    loader: Mapping[str, Any] = field(default_factory=dict)
    builds_on: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ModelRun:
    """One model with all its settings, on one protocol, and the runs that it builds on.

    `network` is what it stands on, or its bases do; only in the first case it has a `shape`.
    """

    offer: Offer
    kind: type[Model]
    network: str | None
    settings: Any
    shape: Settings | None
    changed: Mapping[str, Any]
    seed: int | None
    bases: tuple["ModelRun", ...] = ()

    @property
    def level(self) -> int:
        """0 where it builds on nothing; else one more than what it builds on."""
        return max((base.level + 1 for base in self.bases), default=0)

    @cached_property
    def weights(self) -> tuple[RawFile, ...]:
        """Checkpoint files that it starts from."""
        files = self.kind.weights_files(self.settings)
        return tuple(replace(weights_file(path), name=name) for name, path in files.items())

    def preset(self, name: str) -> str:
        """The preset, where it decides anything about the model or its network."""
        presets = {**self.kind.presets}
        if self.shape is not None and self.network is not None:
            presets |= networks.find(self.network).presets
        return name if presets else NO_PRESET

    def weights_said(self) -> dict[str, str]:
        """Checkpoint files that a setting names, by the start of their SHA-256."""
        fields = type(self.settings).model_fields
        return {file.name: file.digest[:8] for file in self.weights if file.name in fields}

    def values(self) -> dict[str, Any]:
        """All settings as JSON: of the model, its network and its loader."""
        values = self.settings.model_dump(mode="json")
        if self.shape is not None:
            values[NETWORK] = self.shape.model_dump(mode="json")
        return values | ({LOADER: dict(self.offer.loader)} if self.offer.loader else {})

    def versions(self, loader: int) -> dict[str, int]:
        versions = {"model": self.kind.version, "loader": loader}
        if self.shape is not None and self.network is not None:
            versions["network"] = networks.find(self.network).version
        if isinstance(self.settings, TrainingSettings):
            versions["trainer"] = TRAINER_VERSION
        return versions


def choose_models(
    benchmark: str, config: RunChoices, offers: Sequence[Offer]
) -> dict[str, dict[str, Any]]:
    """Models asked for that fit, with the settings that differ; what does not fit is refused.

    `all` means all that fit and have the weights that they need. `train` changes settings of every
    model that has them.
    """
    modalities = list(dict.fromkeys(offer.modality for offer in offers))
    picks = dict(models.selection(config.models))
    for name in list(picks):
        kind = models.find(name)
        fits = kind.modality in modalities
        if fits and (not kind.needs_weights or picks[name].get("weights")):
            continue
        if name in config.models and fits:
            raise ConfigError(
                f"model {name} needs its weights: name their file with --models.{name}.weights"
            )
        if name in config.models:
            raise ConfigError(
                f"model {name} does not fit {benchmark}: it takes samples of modality "
                f"{kind.modality}, {benchmark} has {', '.join(modalities)}"
            )
        del picks[name]
    shared = {name: shared_settings(config, name) for name in picks}
    for setting in config.train:
        if not any(setting in changes for changes in shared.values()):
            among = (
                f"none of the models {', '.join(picks)} has it" if picks else "there is no model"
            )
            raise ConfigError(f"train.{setting}: {among}; `novelty models NAME` lists settings")
    return {name: put_over(shared[name], changes) for name, changes in picks.items()}


def shared_settings(config: RunChoices, model: str) -> dict[str, Any]:
    """What `train` changes of a model."""
    fields = models.find(model).configuration.model_fields
    return {name: value for name, value in config.train.items() if name in fields}


def plan_models(benchmark: str, config: RunChoices, offers: Sequence[Offer]) -> list[ModelRun]:
    """Every run that is asked for and those that they build on, bases first.

    Call it before any work with what can be known by then: a wrong name or setting is refused.
    """
    plan = _Plan(config, offers, choose_models(benchmark, config, offers))
    for name in plan.picks:
        for offer in offers:
            kind = models.find(name)
            if offer.modality == kind.modality and offer.takes(kind):
                plan.runs_of(name, offer)
    runs = [run for some in plan.made.values() for run in some]
    for run in runs:
        run.weights  # noqa: B018  a missing file is to be found now
    if any(getattr(run.settings, "compile", False) for run in runs):
        check_compiler()
    return sorted(runs, key=lambda run: run.level)


class _Plan:
    """Runs by model and protocol, made when they are first asked for."""

    def __init__(
        self, config: RunChoices, offers: Sequence[Offer], picks: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self.config, self.offers, self.picks = config, offers, picks
        self.made: dict[tuple[str, str], list[ModelRun]] = {}

    def runs_of(self, name: str, offer: Offer) -> list[ModelRun]:
        if (name, offer.protocol) not in self.made:
            kind = models.find(name)
            networks_below: tuple[str | None, ...] = (None,)
            if kind.uses_network:
                networks_below = offer.networks
            if not networks_below:
                names = ", ".join(networks.names_of(kind.modality)) or "none"
                raise ConfigError(f"model {name} needs a network: name one of {names}")
            self.made[name, offer.protocol] = [
                run
                for network in networks_below
                for variant in self._variants(kind, network, offer)
                for below in self._networks_of_bases(kind, variant, network, offer)
                for run in self._of_variant(kind, variant, below, offer)
            ]
        return self.made[name, offer.protocol]

    def _variants(
        self, kind: type[Model], network: str | None, offer: Offer
    ) -> list[Mapping[str, Any]]:
        """What differs from the preset, for each run; what the protocol asks for counts too."""
        kind.check_network(network)
        preset, changes = self.config.preset, self.picks.get(kind.name)
        if changes is None:
            # Nobody asked for it by name, another model builds on it.
            changes = shared_settings(self.config, kind.name)
        adapted = offer.adapt(kind, kind.resolve(preset, changes, network))
        names = tuple(name for name in self.picks if offer.takes(models.find(name)))
        return kind.variants(preset, put_over(adapted, changes), network, names)

    def _networks_of_bases(
        self, kind: type[Model], variant: Mapping[str, Any], network: str | None, offer: Offer
    ) -> tuple[str | None, ...]:
        """What builds on models with a network has a run for each network, as they have."""
        bases = kind.bases_of(kind.resolve(self.config.preset, variant, network))
        below = any(models.find(base.model).uses_network for base in bases)
        return offer.networks if below and network is None else (network,)

    def _of_variant(
        self, kind: type[Model], variant: Mapping[str, Any], network: str | None, offer: Offer
    ) -> list[ModelRun]:
        preset = self.config.preset
        plain_shape = shape = None
        if network is not None and kind.uses_network:
            shape = kind.network_settings(network, preset, self.config.networks.get(network, {}))
            plain_shape = kind.network_settings(network, preset)
        plain = kind.resolve(preset, {}, network)
        before = kind.resolve(preset, offer.adapt(kind, plain), network)
        # What the preset and the user say decides what the protocol asks for.
        adapted = offer.adapt(kind, kind.resolve(preset, variant, network))
        settings = kind.resolve(preset, put_over(adapted, variant), network)
        before, settings = (with_arithmetic(one, self.config.device) for one in (before, settings))
        changed = differing(settings, before)
        if shape is not None and plain_shape is not None and shape != plain_shape:
            changed[NETWORK] = differing(shape, plain_shape)
        runs = []
        for seed in self.config.seeds if kind.seeded else (None,):
            bases = tuple(
                self._base(kind, base.model, base.settings, network, seed, offer)
                for base in kind.bases_of(settings)
            )
            runs.append(ModelRun(offer, kind, network, settings, shape, changed, seed, bases))
        return runs

    def _base(
        self,
        kind: type[Model],
        model: str,
        values: Mapping[str, Any],
        network: str | None,
        seed: int | None,
        offer: Offer,
    ) -> ModelRun:
        """The one run of `model` that a run of `kind` builds on."""
        modality = models.find(model).modality
        places = [offer]
        if modality != offer.modality:
            names = offer.builds_on
            places = [place for place in self.offers if not names or place.protocol in names]
        runs = [
            run
            for place in places
            if place.modality == modality
            for run in self.runs_of(model, place)
            if run.seed in (seed, None) and (network is None or run.network in (network, None))
        ]
        fitting = [
            run
            for run in runs
            if all(getattr(run.settings, name, None) == value for name, value in values.items())
        ]
        if len(fitting) != 1:
            which = "".join(f" with {name} {value}" for name, value in values.items())
            raise ConfigError(
                f"model {kind.name} builds on one run of {model}{which}, found {len(fitting)} "
                f"among {len(runs)}; set models.{model} or models.{kind.name} so that one is meant"
            )
        return fitting[0]


def differing(settings: Settings, before: Settings) -> dict[str, Any]:
    """Settings that are not as before, as JSON; of nested ones those inside."""

    def left(values: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: left(value, plain[name])
            if isinstance(value, dict) and isinstance(plain[name], dict)
            else value
            for name, value in values.items()
            if value != plain[name]
        }

    return left(settings.model_dump(mode="json"), before.model_dump(mode="json"))


# ---------------------------------------------------------------- plans


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run with all its facts, before it is made."""

    run: ModelRun
    facts: RunFacts
    mark: RunMark
    bases: tuple["PlannedRun", ...] = ()

    @property
    def embedding(self) -> RunFacts | None:
        """The frozen run that serves it, where its model embeds."""
        return embedding_of(self.run.kind, self.facts)

    @property
    def name(self) -> str:
        """Name of its shards."""
        return f"{self.facts.model}-{self.mark.run_id}"


def plan_facts(
    benchmark: str, config: RunChoices, runs: Sequence[ModelRun], keys: Mapping[str, Any]
) -> list[PlannedRun]:
    """The facts of each run, bases first; `keys` are those of the protocols."""
    version = loader_of(benchmark).LOADER_VERSION
    planned: dict[int, PlannedRun] = {}
    for run in runs:
        protocol = run.offer.protocol
        if protocol not in keys:
            raise ConfigError(
                f"model {run.kind.name}: protocol {protocol} has no samples in this source"
            )
        bases = tuple(planned[id(base)] for base in run.bases)
        facts = RunFacts(
            benchmark=benchmark,
            protocol=protocol,
            model=run.kind.name,
            network=run.network or NO_NETWORK,
            preset=run.preset(config.preset),
            settings=run.values(),
            changed={**run.changed, **run.weights_said()},
            seed=run.seed,
            origin=run.kind.origin_of(run.settings),
            base_runs=tuple(base.mark.run_id for base in bases),
            versions=run.versions(version),
            weights={file.name: file.digest for file in run.weights},
            precision=getattr(run.settings, "precision", "float32"),
            fit_key=keys[protocol]["fit_key"],
        )
        embedding = embedding_of(run.kind, facts)
        if embedding is not None:
            facts = facts.model_copy(update={"base_runs": (run_id(embedding),)})
        mark = run_mark(facts, keys[protocol]["data_key"])
        planned[id(run)] = PlannedRun(run, facts, mark, bases)
    return list(planned.values())


def make_runs(
    build: Build,
    planned: Sequence[PlannedRun],
    parts_of: Callable[[PlannedRun], tuple[Part, ...]],
    config: RunChoices,
    views: Sequence[View] = (View(),),
) -> list[PassedRun]:
    """Fit every model and pass its samples, what one builds on before it.

    `parts_of` are the parts that a run's samples are loaded from, `splits` among them. A run that
    fails is recorded with its reason and stops no other.
    """
    _check_classes(planned, parts_of)
    how = DeviceSettings.of(config)
    fitted: dict[str, Piece] = {}
    passed: dict[str, list[tuple[Shard, Piece]]] = {}
    features = make_embeddings(build, _to_embed(planned, parts_of), how, views)
    for level in sorted({run.run.level for run in planned}):
        wave = [
            run for run in planned if run.run.level == level and _stands_on_all(build, run, fitted)
        ]
        shards = [
            _training_shard(run, _parts(run, parts_of(run), features), fitted, passed)
            for run in wave
        ]
        done = build.run_each(train_model, shards, how)
        fitted |= {shard.run.run_id: piece for shard, piece in done if shard.run is not None}
        passes = [
            one
            for shard, piece in done
            for view in views
            for one in pass_shards(shard, piece, view)
        ]
        for shard, piece in build.run_each(pass_samples, passes, how):
            assert shard.run is not None
            passed.setdefault(shard.run.run_id, []).append((shard, piece))
    record_failures(build)
    samples = build.table("samples")
    return [
        passed_run(run, shown, fitted[run.mark.run_id], samples)
        for run in planned
        for view in views
        if (shown := _shown(passed.get(run.mark.run_id, ()), view))
    ]


def _check_classes(
    planned: Sequence[PlannedRun], parts_of: Callable[[PlannedRun], tuple[Part, ...]]
) -> None:
    """Refuse weights of other classes than a protocol's before anything is trained."""
    columns = ["protocol", "split", "class", "label"]
    checked = set()
    for run in planned:
        kind, protocol = run.run.kind, str(run.facts.protocol)
        what = kind.name, protocol, *run.facts.weights.values()
        if not kind.needs_weights or what in checked:
            continue
        splits = [part.read(columns) for part in parts_of(run) if part.table == "splits"]
        rows = pl.concat(splits).filter(protocol=protocol)
        kind.check_classes(run.run.settings, len(numbered_labels(rows)[1]), f"protocol {protocol}")
        checked.add(what)


def _shown(passed: Sequence[tuple[Shard, Piece]], view: View) -> list[tuple[Shard, Piece]]:
    """The passes of one view; none if one of its shares is lacking."""
    shown = [(shard, piece) for shard, piece in passed if shard.about["view"] == view.name]
    return shown if shown and len(shown) == shown[0][0].about.get("share", (0, 1))[1] else []


def _to_embed(
    planned: Sequence[PlannedRun], parts_of: Callable[[PlannedRun], tuple[Part, ...]]
) -> dict[str, FrozenRun]:
    """What is embedded once for several runs, by the id of the frozen run."""
    frozen_runs: dict[str, FrozenRun] = {}
    for run in planned:
        if (facts := run.embedding) is not None:
            new = FrozenRun(facts, run.run.weights, threads_of(run.run.settings))
            frozen_runs.setdefault(run_id(facts), new).add(run.facts.protocol, parts_of(run))
    return frozen_runs


def _parts(
    run: PlannedRun, parts: tuple[Part, ...], features: Mapping[str, tuple[Part, ...]]
) -> tuple[Part, ...]:
    """What a run's samples are loaded from: features in the place of what was embedded."""
    if run.embedding is None:
        return parts
    splits = tuple(part for part in parts if part.table == "splits")
    return splits + features[run_id(run.embedding)]


def _load(shard: Shard, facts: RunFacts, split: str, model: Model) -> Samples:
    """The samples of a split, with frozen features where the model embeds."""
    samples = loader_of(facts.benchmark).load(shard, facts, split, model)
    embedding = embedding_of(type(model), facts)
    if embedding is None:
        return samples
    parts = [part for part in shard.parts if part.table == "outputs"]
    features = embedded(parts, embedding, samples.ids, shard.about.get("view", PLAIN))
    return replace(samples, arrays={"features": features})


def _stands_on_all(build: Build, run: PlannedRun, fitted: Mapping[str, Piece]) -> bool:
    """Whether all that a run builds on is there; if not, the run has failed with it."""
    lost = [base.name for base in run.bases if base.mark.run_id not in fitted]
    if lost and build.dry is None:
        shard = Shard(run.name, about=run.facts.model_dump(mode="json"), run=run.mark)
        reason = f"it builds on {', '.join(lost)}, which failed"
        build.failures.append(Failure(shard, train_model.name, reason))
    return not lost


def _training_shard(
    run: PlannedRun,
    parts: tuple[Part, ...],
    fitted: Mapping[str, Piece],
    passed: Mapping[str, Sequence[tuple[Shard, Piece]]],
) -> Shard:
    """What a model is fitted from; only its facts are in the key."""
    files = {file.name: file for one in (*run.bases, run) for file in one.run.weights}
    needs = run.run.kind.bases_of(run.run.settings)
    for base, need in zip(run.bases, needs, strict=True):
        if need.reads == "model":
            parts += (replace(fitted[base.mark.run_id].file(MODEL), table=BASE),)
        else:
            parts += tuple(piece.part("outputs") for _, piece in passed[base.mark.run_id])
    return Shard(
        run.name,
        files=tuple(files.values()),
        parts=parts,
        about=run.facts.model_dump(mode="json"),
        depends={"run": run.mark.run_id},
        run=run.mark,
        threads=threads_of(run.run.settings),
    )


def threads_of(settings: Any) -> int:
    """Cores that a model with these settings takes on a CPU."""
    return int(getattr(settings, "cpu_threads", 1)) * int(getattr(settings, "processes", 1))


def pass_shards(shard: Shard, piece: Piece, view: View) -> list[Shard]:
    """The shard of a training with the model that came of it; test rows count too.

    A protocol with many samples is passed in several shards, so that no process holds all outputs.
    """
    assert shard.run is not None
    splits = [part for part in shard.parts if part.table == "splits"]
    rows = sum(part.rows for part in splits)
    if rows > SAMPLES_PER_PASS:
        protocol = shard.run.protocol
        rows = sum(part.read(["protocol"]).filter(protocol=protocol).height for part in splits)
    count = max(1, math.ceil(rows / SAMPLES_PER_PASS))
    whole = replace(
        shard,
        name=f"{shard.name}/{view.name}",
        files=(),
        parts=(*shard.parts, piece.file(MODEL)),
        about={"facts": shard.about, "view": view.name, "view_settings": dict(view.settings)},
        depends={"run": shard.run.run_id, "rows": shard.run.data_key},
    )
    if count == 1:
        return [whole]
    return [
        replace(
            whole,
            name=f"{whole.name}/{place:04d}_of_{count:04d}",
            about={**whole.about, "share": [place, count]},
            depends={**whole.depends, "share": [place, count]},
        )
        for place in range(count)
    ]


def passed_run(
    run: PlannedRun,
    shown: Sequence[tuple[Shard, Piece]],
    fitted: Piece | None,
    samples: tuple[Part, ...],
) -> PassedRun:
    """What the scores of a run are planned from."""
    heads = [file.file for file in fitted.manifest.files if file.file == HEAD] if fitted else []
    shard = shown[0][0]
    return PassedRun(
        run.facts,
        run.mark,
        tuple(piece.part("outputs") for _, piece in shown),
        tuple(part for part in shard.parts if part.table == "splits"),
        samples,
        fitted.file(HEAD) if fitted is not None and heads else None,
        view=shard.about["view"],
    )


# ---------------------------------------------------------------- stages


def kept_epoch(epoch: int) -> str:
    """Name of the file with the model as that epoch left it."""
    return f"epoch-{epoch:04d}.safetensors"


def _save_epoch(work: Path, model: Model, epoch: int) -> None:
    model.save(work / kept_epoch(epoch))


@stage(writes=(RUNS, TRAINING), version=1, tags=("gpu",), apart=True)
def train_model(shard: Shard, settings: DeviceSettings) -> Produced:
    """Fit one model; a killed run goes on from its last checkpoint."""
    facts = RunFacts.model_validate(shard.about)
    paths = {file.name: str(file.path) for file in shard.files}
    model = model_of(facts, paths)
    use_resources(model, settings, shard)
    train, valid = (_load(shard, facts, split, model) for split in ("train", "valid"))
    bases = _bases(shard, settings, paths)
    work = shard.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    network = "" if facts.network == NO_NETWORK else f" {facts.network}"
    fitting = Fitting(
        seed=facts.seed or 0,
        device=settings.device,
        work=work,
        progress=EpochLines(f"{facts.protocol} {facts.model}{network} {facts.seed}"),
        keep=partial(_save_epoch, work),
    )
    history = model.fit(train, valid, fitting, bases)
    model.save(work / MODEL)
    files = {
        path.name: path for path in (work / MODEL, *sorted(work.glob(kept_epoch(0)[:6] + "*")))
    }
    head = model.head()
    if head is not None:
        files[HEAD] = work / HEAD
        head.save(files[HEAD])
    tables = {
        "runs": run_row(facts, device=model.device.partition(":")[0]),
        "training": training_rows(facts, history),
    }
    return Produced(tables, 1, files=files)


def training_rows(facts: RunFacts, history: pl.DataFrame) -> pl.DataFrame:
    """Rows of `training`; of an ensemble, whose members count epochs alike, `member_1/loss`."""
    if "epoch" not in history.columns:
        history = history.with_row_index("epoch")
    members = [name for name in ("member",) if name in history.columns]
    numbers = history.select("epoch", pl.selectors.numeric().exclude("epoch").cast(pl.Float64))
    rows = numbers.unpivot(index=["epoch", *members], variable_name="measure", value_name="value")
    if members:
        member = pl.col("member").cast(pl.Int64).cast(pl.String)
        measure = pl.concat_str(pl.lit("member_"), member, pl.lit("/"), "measure")
        rows = rows.with_columns(measure.alias("measure"))
    return rows.select(
        pl.lit(run_id(facts)).alias("run_id"),
        "epoch",
        "measure",
        pl.when(pl.col("value").is_finite()).then(pl.col("value")).alias("value"),
    ).drop_nulls("value")


@stage(writes=(OUTPUTS, PREDICTIONS), version=1, tags=("gpu",), apart=True)
def pass_samples(shard: Shard, settings: DeviceSettings) -> Produced:
    """What a fitted model puts out for each sample of its protocol.

    Training samples are passed where scores can learn from them: from logits or features.
    """
    facts = RunFacts.model_validate(shard.about["facts"])
    model = fitted_model(shard, settings)
    splits = shard.read("splits").filter(pl.col("protocol") == facts.protocol)
    frames = [OUTPUTS.empty()]
    classes: dict[int, str] = {}
    for split in EVALUATED if model.gives == {"novelty"} else ("train", *EVALUATED):
        samples = _load(shard, facts, split, model)
        classes = classes or dict(enumerate(samples.classes))
        if "share" in shard.about:
            place, count = shard.about["share"]
            bounds = (len(samples) * place // count, len(samples) * (place + 1) // count)
            samples = samples.take(np.arange(*bounds))
        if len(samples):
            rows = output_rows(facts, samples.ids, model.outputs(samples), classes)
            frames.append(rows.with_columns(pl.lit(shard.about["view"]).alias("view")))
    outputs = pl.concat(frames)
    tables = {"outputs": outputs}
    if "logits" in model.gives:
        rows = outputs.drop("run_id", "predicted").join(splits, on="sample_id")
        tables["predictions"] = prediction_rows(facts, rows, classes)
    return Produced(tables, outputs.height)


def fitted_model(shard: Shard, settings: DeviceSettings, file: str = MODEL) -> Model:
    """The fitted model among a shard's parts, ready to put out."""
    bases = _bases(shard, settings, {})
    model = models.load_model(shard.part(file).path, device=settings.device, bases=bases)
    use_resources(model, settings, shard)
    return model


def _bases(shard: Shard, settings: DeviceSettings, files: Mapping[str, str]) -> tuple[Model, ...]:
    """Fitted models that this one starts from, with the checkpoints that they started from."""
    bases = tuple(
        models.load_model(part.path, device=settings.device)
        for part in shard.parts
        if part.table == BASE
    )
    for base in bases:
        paths = {n: Path(p) for n, p in files.items() if n in type(base.settings).model_fields}
        base.settings = base.settings.model_copy(update=paths)
    return bases
