"""What a first build has to do, counted before there is any row: by settings and raw files.

One function for each benchmark goes through the stages of its flow in their order. It leaves out
what the settings do not ask for, and estimates shards where only rows would tell them. That no
stage of a flow is forgotten, and that builds make these stages, is tested.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas import condda, kowl, novelcraft, semantic, threedos
from tasks import scores as score_files
from tasks.condda.build import chosen_agents, fitting_scores, is_part_of
from tasks.condda.export import P_UNKNOWN
from tasks.engine.reference import Raw, Work
from tasks.evaluation.model_runs import ModelRun, Offer, plan_models
from tasks.evaluation.stages import ScoreChoice, chosen_scores
from tasks.kowl.evaluator import OWN
from tasks.kowl.evaluator import P_UNKNOWN as KOWL_P_UNKNOWN
from tasks.kowl.features import plan_backbones
from tasks.kowl.videos import CLIPS_PER_SHARD
from tasks.models.pixel_gaussian import PixelGaussian
from tasks.novelcraft.mask_checks import blender_version
from tasks.novelcraft.runs import chosen_protocols, chosen_runs
from tasks.novelcraft.windows import FRAMES_PROTOCOL
from tasks.novelcraft.windows import PROTOCOLS as WINDOW_PROTOCOLS
from tasks.predictors import resolved_predictors
from tasks.semantic import offers
from tasks.semantic.last_epochs import described_scores
from tasks.semantic.trials import (
    CLASS_ORDER,
    KNOWN,
    KnownSet,
    Subset,
    declared_subsets,
    protocol_of,
)
from tasks.threedos.ingest import SHAPES_PER_SHARD
from tasks.threedos.lists import DATASETS
from tasks.threedos.runs import BENCHMARK as THREEDOS
from tasks.threedos.runs import density_views
from tasks.threedos.runs import plan_runs as plan_cloud_runs
from tasks.threedos.tracks import built_in_tracks, choose_tracks, read_tracks

FITTED_ON = frozenset({"train", "valid"})
PLAIN_PRESETS = ("none", "small")
SIDES = {"cifar10": 32, "stl10": 96, "imagenet": 224}
"""Sides of pictures, which decide the network; those of other data sets count as ImageNet's."""
RECORD_BYTES = {"cifar10": 3_073, "stl10": 27_648, "scanobjectnn": 24_600, "sncore": 24_600}
"""Bytes of one sample in sources of files with many."""
CLIP_BYTES = 30
"""Bytes of gzipped Kinetics lists for each clip that they have in common."""


@dataclass
class Works:
    """The work of a build, stage by stage, and the raw files that it is counted by.

    `raw` are the files by shard of each stage whose shards are known, planned or made; `sources`
    those of whole sources.
    """

    raw: Mapping[str, Mapping[str, Raw]]
    sources: Mapping[Path, Raw] = field(default_factory=dict)
    entries: list[Work] = field(default_factory=list)

    def shards(self, stage: str) -> int:
        return len(self.raw.get(stage, ()))

    def files(self, stage: str) -> Raw:
        return Raw.sum(self.raw.get(stage, {}).values())

    def add(
        self, stage: str, shards: int, amount: float | None = None, *, written: float | None = None
    ) -> None:
        """A stage whose time and bytes grow with `amount` (else with its shards)."""
        self.add_of("", stage, shards, amount, written=written)

    def add_of(
        self,
        model: str,
        stage: str,
        shards: int,
        amount: float | None = None,
        *,
        written: float | None = None,
    ) -> None:
        """The same for one model: each has its own pace."""
        if shards:
            amount = amount or float(shards)
            self.entries.append(
                Work(stage, shards, amount, amount if written is None else written, model)
            )


def first_build(
    benchmark: str,
    config: Any,
    raw: Mapping[str, Mapping[str, Raw]],
    sources: Mapping[Path, Raw] | None = None,
) -> list[Work] | None:
    """The work of every stage that the settings ask for; None for one that is not `COUNTED`."""
    if benchmark not in COUNTED:
        return None
    works = Works(raw, sources or {})
    COUNTED[benchmark](works, config)
    return works.entries


# ---------------------------------------------------------------- benchmarks


def of_novelcraft(works: Works, config: novelcraft.Config) -> None:
    episodes, raw = works.shards("ingest_episodes"), works.files("ingest_episodes")
    size = float(raw.files)
    render_shards = episodes if config.targets_csv is None else 0
    has_checks = render_shards and config.checks.share and config.render.renderer == "raycast"
    protocols, runs = chosen_protocols(config), chosen_runs(config)
    works.add("ingest_episodes", episodes, raw.megabytes)
    works.add("read_official_targets", int(config.targets_csv is not None), size)
    works.add("render_targets", render_shards, size)
    works.add("check_frames", int(bool(has_checks and blender_version())), size)
    works.add("compare_targets", int(config.compare_targets is not None), size)
    works.add("split_frames", 1, size)
    works.add("cut_all_windows", 1, size)
    works.add("calibrate_camera", int(bool(config.camera_states and config.camera_masks)))
    works.add("key_protocols", 2, size)
    discoveries = 2 * len(config.seeds) if config.discovery else 0
    works.add("discover_categories", discoveries, discoveries * size)
    if runs:
        fit_models(works, runs, config.preset, lambda run: size, episodes)
        symbolic = [r for r in runs if r.offer.protocol == FRAMES_PROTOCOL]
        of_windows = [r for name in WINDOW_PROTOCOLS if name in protocols for r in symbolic]
        windows = len(of_windows)
        works.add("pass_windows", windows, windows * size)
        scores = chosen_scores(config.scores, config.preset)
        outputs = [(r.kind.gives, size) for r in runs if r.offer.protocol in protocols]
        outputs += [(r.kind.gives, size) for r in of_windows]
        score_runs(works, outputs, scores)


def of_kowl(works: Works, config: kowl.Config) -> None:
    list_megabytes = works.files("read_lists").megabytes
    works.add("read_lists", works.shards("read_lists"), list_megabytes)
    works.add("unify_releases", 1, list_megabytes)
    works.add("cut_increments", 1, list_megabytes)
    backbones, videos, shards = plan_backbones(config), 0.0, 0
    if config.videos:
        planned = "validate_videos" in works.raw
        raw = works.files("validate_videos") if planned else files_in(config.videos)
        videos = float(raw.files)
        clips = works.files("read_lists").bytes / CLIP_BYTES
        shards = works.shards("validate_videos") or power_of_two(clips / CLIPS_PER_SHARD)
        works.add("validate_videos", shards, raw.megabytes)
        works.add("validate_unlisted", works.shards("validate_unlisted") or 1)
    works.add("list_samples", 1, list_megabytes)
    works.add("key_protocols", 1, list_megabytes)
    if not backbones:
        return
    views = len(config.features.transforms)
    for run in backbones:
        works.add_of(label(run, config.preset), "extract_features", shards, views * videos)
    works.add("record_run", 2 * len(backbones))
    predictors = resolved_predictors(config.predictors, config.preset, config.train)
    works.add("group_clips", int(bool(config.evaluation.ava and predictors)))
    evaluations = len(backbones) * len(config.evaluation.feedback) * len(config.seeds)
    for name in predictors:
        title = name if config.preset in PLAIN_PRESETS else f"{name} ({config.preset})"
        works.add_of(title, "evaluate_predictor", evaluations, evaluations * videos)
    scores = [s for s in chosen_scores(config.scores, config.preset) if s.name != OWN.name]
    outputs = [(run.kind.gives, videos) for run in backbones]
    described = [OWN, KOWL_P_UNKNOWN] if predictors else []
    score_runs(works, outputs, scores, described, [videos] * evaluations * len(predictors))


def of_condda(works: Works, config: condda.Config) -> None:
    tests = works.raw.get("read_test", {})
    protocols = [
        name
        for name in tests
        if not config.protocols or any(is_part_of(name, one) for one in config.protocols)
    ]
    size = works.files("read_test").megabytes / max(1, len(tests))
    works.add("read_test", len(tests), len(tests) * size)
    works.add("key_protocols", len(tests), len(tests) * size)
    works.add("pass_features", len(protocols), len(protocols) * size)
    scores, agents = fitting_scores(config), chosen_agents(config)
    works.add("describe_scores", len({s.score_id for s in (*scores, P_UNKNOWN)}))
    scored = len(protocols) * len(scores)
    works.add("score_outputs", scored, scored * size)
    ways = 2 if config.run.red_light == "both" else 1
    for agent in agents:
        runs = len(protocols) * ways
        title = agent.model
        title += "" if agent.preset in PLAIN_PRESETS else f" ({agent.preset})"
        works.add_of(title, "run_agent", runs, runs * size)
        scored += runs
    works.add("export_session", int(config.state is not None))
    works.add("evaluate_scores", scored, scored * size)
    works.add("measure_program", 1)


def of_semantic(works: Works, config: semantic.Config) -> None:
    images = works.raw.get("read_images", {})
    size = {name: samples_in(name, raw) for name, raw in by_source(images).items()}
    works.add("read_images", len(images), works.files("read_images").megabytes)
    trials = {
        protocol_of(subset, name): (subset, name)
        for subset in possible_subsets(config)
        for name in subset.trials
    }
    sizes = {
        protocol: sum(size.get(dataset, 0.0) for dataset in subset.datasets(name))
        for protocol, (subset, name) in trials.items()
    }
    works.add("make_trial", len(trials), sum(sizes.values()))
    works.add("key_protocols", len(trials), sum(sizes.values()))
    models = offers.with_own_models(config)
    if not models.models:
        return
    words = {p: {p, subset.name, name} for p, (subset, name) in trials.items()}
    selection = {p for p in trials if not config.protocols or words[p] & set(config.protocols)}

    def offer(protocol: str) -> Offer:
        side = SIDES.get(trials[protocol][0].dataset, SIDES["imagenet"])
        networks = [offers.network_for(n, side) for n in offers.chosen_networks(config.networks)]
        return Offer(
            protocol,
            offers.MODALITY,
            tuple(dict.fromkeys(networks)),
            lambda kind: (
                protocol in selection or (kind is PixelGaussian and config.trivial_baseline)
            ),
        )

    runs = plan_models(offers.BENCHMARK, models, [offer(protocol) for protocol in trials])
    shards = works.shards("read_images")
    fit_models(works, runs, config.preset, lambda run: sizes[run.offer.protocol], shards)
    epoch_runs = [run for run in runs if keeps_epochs(run) or any(map(keeps_epochs, run.bases))]
    works.add(
        "measure_epochs", len(epoch_runs), sum(sizes[run.offer.protocol] for run in epoch_runs)
    )
    outputs = [(run.kind.gives, sizes[run.offer.protocol]) for run in runs]
    scores = chosen_scores(config.scores, config.preset)
    score_runs(works, outputs, scores, described_scores())


def of_threedos(works: Works, config: threedos.Config) -> None:
    declared = built_in_tracks() + (read_tracks(config.track_file) if config.track_file else ())
    tracks = choose_tracks(config.tracks, declared)
    works.add("read_members", works.shards("read_members"))
    by_name = by_source(works.raw.get("sample_shapes", {}))
    shards = works.shards("sample_shapes")
    if not shards:
        by_name = {name: works.sources[path] for name, path in config.source.items()}
    size = {name: samples_in(name, raw) for name, raw in by_name.items()}
    shards = shards or sum(math.ceil(count / SHAPES_PER_SHARD) for count in size.values())
    # Farthest points cost more than reading the files.
    works.add("sample_shapes", shards, sum(size.values()) * config.shapes.points / 1000)
    works.add("split_track", len(tracks), len(tracks) * sum(size.values()))
    works.add("key_protocols", len(tracks), len(tracks) * sum(size.values()))
    if not config.models:
        return
    dataset_sizes: dict[str, float] = {}
    for name, samples in size.items():
        dataset = DATASETS.get(name, name)
        dataset_sizes[dataset] = dataset_sizes.get(dataset, 0.0) + samples
    chosen_tracks = choose_tracks(config.protocols, tracks)
    ready = {
        t.name: sum(dataset_sizes[s] for s in t.sources)
        for t in chosen_tracks
        if t.sources <= dataset_sizes.keys()
    }
    views = len(density_views(config.points))
    runs = plan_cloud_runs(config, tuple(track for track in chosen_tracks if track.name in ready))
    fit_models(works, runs, config.preset, lambda run: ready[run.offer.protocol], shards, views)
    outputs = [(run.kind.gives, ready[run.offer.protocol]) for run in runs for _ in range(views)]
    score_runs(works, outputs, chosen_scores(config.scores, config.preset))


COUNTED: dict[str, Callable[[Works, Any], None]] = {
    "novelcraft": of_novelcraft,
    "kowl": of_kowl,
    "condda": of_condda,
    "semantic": of_semantic,
    THREEDOS: of_threedos,
}


# ---------------------------------------------------------------- runs


def fit_models(
    works: Works,
    runs: Sequence[ModelRun],
    preset: str,
    size: Callable[[ModelRun], float],
    shards: int,
    views: int = 1,
) -> None:
    """Runs of models: their features where they are frozen, trainings, and passes.

    Trainings take their time by epoch; what they write does not grow with the samples.
    """
    embedding = {label(run, preset): size(run) for run in runs if run.kind.embeds}
    for model, megabytes in embedding.items():
        works.add_of(model, "embed_samples", views * shards, views * megabytes)
    works.add("record_run", len(embedding))
    by_model: dict[str, list[ModelRun]] = {}
    for run in runs:
        by_model.setdefault(label(run, preset), []).append(run)
    for model, model_runs in by_model.items():
        amount = sum(size(run) * int(getattr(run.settings, "epochs", 1)) for run in model_runs)
        works.add_of(model, "train_model", len(model_runs), amount, written=len(model_runs))
    for model, model_runs in by_model.items():
        amount = views * sum(size(run) for run in model_runs)
        works.add_of(model, "pass_samples", views * len(model_runs), amount)


def score_runs(
    works: Works,
    outputs: Iterable[tuple[frozenset[str], float]],
    scores: Sequence[ScoreChoice],
    described: Sequence[ScoreChoice] = (),
    scored: Sequence[float] = (),
) -> None:
    """Scores and metrics of runs.

    `outputs` are what each run puts out and its number of samples; `scored` are the numbers of
    samples of scores that other stages make.
    """
    fitting = [
        size
        for gives, size in outputs
        for score in scores
        if score_files.find(score.name).needs <= gives | FITTED_ON
    ]
    works.add("describe_scores", len({score.score_id for score in (*scores, *described)}))
    works.add("score_outputs", len(fitting), sum(fitting))
    works.add("evaluate_scores", len(fitting) + len(scored), sum(fitting) + sum(scored))


def label(run: ModelRun, preset: str) -> str:
    """A model as the reference names it: another preset is another pace."""
    name = run.kind.name
    return name if run.preset(preset) in PLAIN_PRESETS else f"{name} ({preset})"


def keeps_epochs(run: ModelRun) -> bool:
    return bool(getattr(run.settings, "evaluations", 0))


# ---------------------------------------------------------------- raw files


def possible_subsets(config: semantic.Config) -> list[Subset]:
    """Subsets that the sources may have images for; which members do, only the rows tell."""
    paths: dict[str, list[Path]] = {}
    for name, path in config.source.items():
        paths.setdefault(name.partition(".")[0], []).append(path)
    declared = declared_subsets(config.subset_file)
    if config.known is not None:
        of_known = {subset.name: subset.dataset for subset in declared}
        dataset = of_known.get(config.known, config.known)
        whole = KnownSet.model_construct(
            name=f"{KNOWN}{config.known}", dataset=dataset, members={}, novel=config.novel
        )
        return [*(s for s in declared if s.name in config.subsets), whole]
    declared_datasets = {subset.dataset for subset in declared}
    whole_sets = [
        Subset.model_construct(
            name=dataset,
            dataset=dataset,
            members={name: name for name in CLASS_ORDER.get(dataset) or classes_in(folders)},
        )
        for dataset, folders in paths.items()
        if dataset not in declared_datasets or dataset in config.subsets
    ]
    return [
        subset
        for subset in (*declared, *whole_sets)
        if subset.dataset in paths and (not config.subsets or subset.name in config.subsets)
    ]


def by_source(raw: Mapping[str, Raw]) -> dict[str, Raw]:
    """Files by data set: shards are named after their sources."""
    by_dataset: dict[str, list[Raw]] = {}
    for shard, files in raw.items():
        by_dataset.setdefault(shard.partition("/")[0].partition(".")[0], []).append(files)
    return {name: Raw.sum(parts) for name, parts in by_dataset.items()}


def samples_in(source: str, raw: Raw) -> float:
    """One in each file, unless the source comes as files of many."""
    return raw.bytes / RECORD_BYTES[source] if source in RECORD_BYTES else float(raw.files)


def files_in(path: Path) -> Raw:
    """A folder, or an archive as one file: nothing is opened."""
    if not path.is_dir():
        return Raw(1, path.stat().st_size)
    return Raw.sum(
        Raw(1, os.stat(os.path.join(folder, name)).st_size)
        for folder, _, names in os.walk(path)
        for name in names
    )


def classes_in(paths: Iterable[Path]) -> set[str]:
    """Names of folders that hold files, the classes of a folder of classes; at the least two."""
    names = {Path(folder).name for path in paths for folder, _, files in os.walk(path) if files}
    return names if len(names) > 1 else {"0", "1"}


def power_of_two(count: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(count, 1))))
