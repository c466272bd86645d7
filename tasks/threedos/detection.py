"""Train, one forward pass, score: 3DOS's downstream stages (3DOS section 4, spec threedos 1.4-1.6).

Enters: splits, shapes and clouds. Leaves: `training` with each fitted network as a safetensors
file, `outputs` (one pass over every split) and `scores`: every score of the cached outputs
and the method's own. The shared stage `evaluate_scores` makes metrics and curves of them.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import ConfigError, SourceError
from schemas.older_tables import SCORES, TRAINING
from schemas.threedos import OUTPUTS, DetectionChoice
from storage.pieces import Part, Piece
from tasks import scores
from tasks.detection import BASE, MODEL, EvaluateSettings, print_epoch
from tasks.scores.base import Outputs, Reference, Score
from tasks.stage import Produced, Shard, stage
from tasks.threedos import methods, networks
from tasks.threedos.clouds import TrackClouds, label_names, load_clouds, require_training
from tasks.threedos.lists import DATASETS
from tasks.threedos.methods.presets import Setup, setup_of
from tasks.threedos.tracks import Track

SPLITS = ("train", "valid", "test")
CONVENTIONS = ("threedos", "threedos-first-threshold", "openood")
# Tracks with scans augment as the paper's do (turns, jitter), others as its synthetic track.
SCANS = "scanobjectnn"
# Where scans are tested the release passes all of their points, and learns from as many of scans.
SCAN_POINTS = 2048
OWN = "own"
NONE = "none"


class TrainingChoice(Settings):
    """How networks are trained."""

    preset: str
    epochs: int | None
    label_smoothing: float | None = None
    device: str


class ScoreChoice(Settings):
    """Which scores are made of the outputs."""

    scores: tuple[str, ...]


def training_choice(choice: DetectionChoice) -> TrainingChoice:
    return TrainingChoice(
        **choice.model_dump(include={"preset", "epochs", "label_smoothing", "device"})
    )


def score_choice(choice: DetectionChoice) -> ScoreChoice:
    return ScoreChoice(
        scores=tuple(
            sorted(set(scores.names() if "all" in choice.scores else choice.scores) - {OWN})
        )
    )


def check_names(choice: DetectionChoice) -> None:
    """Refuse networks and scores that do not exist before anything is made."""
    for name in choice.networks:
        if name not in networks.NAMES:
            networks.find(name)  # says so
    for name in score_choice(choice).scores:
        scores.find(name)


def evaluation(tracks: Iterable[Track]) -> EvaluateSettings:
    """Every convention for each track, and for each of its unknown sets apart."""
    names = [
        name
        for track in tracks
        for name in (track.name, *(against(track.name, group.set) for group in track.unknown))
    ]
    return EvaluateSettings(conventions=dict.fromkeys(names, CONVENTIONS))


def chosen_methods(names: Sequence[str]) -> list[str]:
    """Methods asked for and those they start from."""
    wanted = list(methods.NAMES) if "all" in names else list(names)
    for name in list(wanted):
        required = methods.find(name).requires
        if required and required not in wanted:
            wanted.append(required)
    return sorted(set(wanted))


def waves(names: Sequence[str]) -> list[list[str]]:
    """Methods in an order in which what one starts from comes before it."""
    first = [name for name in names if methods.find(name).requires is None]
    second = [name for name in names if name not in first]
    return [wave for wave in (first, second) if wave]


# ---------------------------------------------------------------- plans


def trainable(
    tracks: Sequence[Track], splits: pl.DataFrame, clouds: pl.Series, asked: Collection[str] = ()
) -> list[Track]:
    """Tracks with training and test shapes that have a cloud, and two labels at the least.

    One that was asked for by name must be among them, and there must be one.
    """
    there = splits.filter(pl.col("sample_id").is_in(clouds.implode()))
    lacking = {}
    for track in tracks:
        rows = there.filter(track=track.name)
        labels = rows.filter(split="train")["label"].n_unique()
        counts = {
            "two labels with training shapes": labels - 1,
            "known test shapes": rows.filter(split="test", role="known").height,
            "unknown test shapes": rows.filter(split="test", role="unknown").height,
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


def plan_networks(
    names: Sequence[str],
    choice: DetectionChoice,
    tracks: Sequence[Track],
    data: dict[str, tuple[Part, ...]],
    trained: Sequence[Piece] = (),
) -> Iterator[Shard]:
    """One shard per track, method, network and seed, with the clouds of the track's sources."""
    models = {piece.shard: piece.file(MODEL) for piece in trained}
    for track in tracks:
        parts = tuple(part for part in data["splits"] if part.shard == track.name)
        for table in ("shapes", "point_clouds"):
            parts += tuple(
                part
                for part in data[table]
                if DATASETS.get(source := part.shard.partition("/")[0], source) in track.sources
            )
        for method in names:
            kind = methods.find(method)
            for network in choice.networks if kind.uses_network else (NONE,):
                for seed in choice.seeds:
                    about = {
                        "track": track.name,
                        "method": method,
                        "network": network,
                        "seed": seed,
                        "augmentation": "rw" if SCANS in track.sources else "st",
                        "scans": [role for role in SPLITS if _of_scans(track, role)],
                    }
                    base: tuple[Part, ...] = ()
                    if kind.requires:
                        start = _name(about | {"method": kind.requires})
                        base = (replace(models[start], table=BASE),)
                    yield Shard(_name(about), parts=parts + base, about=about)


def _of_scans(track: Track, role: str) -> bool:
    """Whether the shapes of that split are scans; those held out for validation are as train."""
    sources = {"train": track.train, "valid": track.valid or track.train, "test": track.test}
    return set(sources[role]) == {SCANS}


def _name(about: dict) -> str:
    return f"{about['track']}/{about['method']}/{about['network']}/{about['seed']}"


def plan_outputs(shards: Sequence[Shard], trained: Sequence[Piece], points: Sequence[int]):
    """The shards of training with the network that came of each, once for each density."""
    for shard, piece in zip(shards, trained, strict=True):
        parts = tuple(part for part in shard.parts if part.table != BASE)
        for count in points or (0,):
            yield replace(
                shard,
                name=f"{shard.name}/{count}" if count else shard.name,
                parts=(*parts, piece.file(MODEL)),
                about={**shard.about, "points": count},
            )


def plan_scores(shards: Sequence[Shard], passed: Sequence[Piece]) -> list[Shard]:
    """The shards of the forward passes, each with its outputs and its network."""
    return [
        Shard(shard.name, parts=(piece.part("outputs"), shard.part(MODEL)), about=shard.about)
        for shard, piece in zip(shards, passed, strict=True)
    ]


# ---------------------------------------------------------------- stages


def training_setup(about: Mapping[str, Any], settings: TrainingChoice) -> tuple[str | None, Setup]:
    """The network, if the method takes one, and the preset with what the choice changes."""
    network = None if about["network"] == NONE else about["network"]
    setup = setup_of(about["method"], network, settings.preset)
    changes: dict[str, object] = {}
    if setup.training.augmentation != "none":
        # Clouds are upright by now.
        changes = {"augmentation": about["augmentation"], "up": "y"}
    if settings.preset == "paper" and "train" in about["scans"]:
        changes["points"] = SCAN_POINTS
    if settings.epochs:
        changes["epochs"] = settings.epochs
    method = setup.method
    if settings.label_smoothing is not None and hasattr(method, "smoothing"):
        method = method.model_copy(update={"smoothing": settings.label_smoothing})
    training = setup.training.model_copy(update=changes)
    return network, setup.model_copy(update={"training": training, "method": method})


def _clouds(shard: Shard, wanted: Sequence[str]) -> dict[str, TrackClouds]:
    """The wanted splits; of other clouds no more than a part at a time is in memory."""
    splits, shapes = shard.read("splits"), shard.read("shapes", ["sample_id", "source"])
    names = label_names(splits.join(shapes, on="sample_id", how="semi"))
    chosen = splits.filter(pl.col("split").is_in(wanted))["sample_id"].unique()
    clouds = pl.concat(
        part.read(["sample_id", "normalisation", "count", "points"]).filter(
            pl.col("sample_id").is_in(chosen.implode())
        )
        for part in shard.parts
        if part.table == "point_clouds"
    )
    return {split: load_clouds(splits, shapes, clouds, names, split) for split in wanted}


@stage(writes=(TRAINING,), version=3, tags=("gpu",), alone=True)
def train_network(shard: Shard, settings: TrainingChoice) -> Produced:
    """Train one network on the known classes of one track; a killed run goes on."""
    from tasks.threedos.training import load, train

    about = shard.about
    found = _clouds(shard, ["train"])["train"]
    require_training(found, about["track"])
    network, setup = training_setup(about, settings)
    base = [part for part in shard.parts if part.table == BASE]
    work = shard.work or Path(mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    model = train(
        about["method"],
        network,
        setup,
        found.clouds,
        found.labels,
        seed=about["seed"],
        work=work,
        device=settings.device,
        base=load(base[0].path, device=settings.device) if base else None,
        progress=print_epoch(shard.name),
    )
    rows = model.history.unpivot(index="epoch", variable_name="measure", value_name="value").select(
        pl.lit(about["method"]).alias("detector"),
        pl.lit(f"{about['track']} {about['network']} {settings.preset}").alias("variant"),
        pl.lit(about["seed"]).alias("seed"),
        "epoch",
        "measure",
        "value",
    )
    return Produced({"training": rows}, rows.height, files={MODEL: work / MODEL})


@stage(writes=(OUTPUTS,), version=3, tags=("gpu",), alone=True)
def pass_clouds(shard: Shard, settings: TrainingChoice) -> Produced:
    """One forward pass over every split: logits and features for all scores at once."""
    from tasks.threedos.training import load, outputs

    about = shard.about
    model = load(shard.part(MODEL).path, device=settings.device)
    frames = [OUTPUTS.empty()]
    for split, rows in _clouds(shard, SPLITS).items():
        if not len(rows.clouds):
            continue
        points = about["points"] or model.setup.training.points
        if settings.preset == "paper" and split in about["scans"] and not about["points"]:
            points = SCAN_POINTS
        points = min(points, rows.clouds.shape[1])
        found = outputs(model, rows.clouds, points=points, normalisation=rows.normalisation)
        arrays = {
            name: pl.Series(found[name].astype(np.float32)).cast(pl.List(pl.Float32))
            if name in found
            else pl.lit(None, pl.List(pl.Float32))
            for name in ("logits", "features")
        }
        own = pl.Series(found["novelty"].astype(np.float64)) if "novelty" in found else None
        frames.append(
            OUTPUTS.conform(
                rows.about.select(
                    pl.lit(about["track"]).alias("track"),
                    pl.lit(about["method"]).alias("method"),
                    pl.lit(about["network"]).alias("network"),
                    pl.lit(about["seed"]).alias("seed"),
                    pl.lit(points).alias("points"),
                    pl.lit(split).alias("split"),
                    "sample_id",
                    "class",
                    "group",
                ).with_columns(
                    pl.Series("label", rows.labels).replace(-1, None).alias("label"),
                    *(values.alias(name) for name, values in arrays.items()),
                    (pl.lit(None, pl.Float64) if own is None else own).alias("novelty"),
                )
            )
        )
    table = pl.concat(frames)
    return Produced({"outputs": table}, table.height)


@stage(writes=(SCORES,), version=2)
def score_outputs(shard: Shard, settings: ScoreChoice) -> Produced:
    """Every score of one network from its cached outputs."""
    from tasks.threedos.training import load

    about = shard.about
    rows = {split: part for (split,), part in shard.read("outputs").group_by("split")}
    test = rows["test"].sort("sample_id")
    cached = {split: _arrays(part.sort("sample_id")) for split, part in rows.items()}
    names = dict(rows["train"].select("label", "class").unique().iter_rows())
    head = load(shard.part(MODEL).path, device="cpu").method.head()
    labels = rows["train"].sort("sample_id")["label"].to_numpy().astype(np.int64)
    reference = Reference(cached["train"], labels, cached.get("valid"), head)
    scored, left_out = [], []
    for name in settings.scores:
        score = scores.find(name)()
        if not _applies(score.needs, cached["test"], reference):
            left_out.append(name)
            continue
        score.fit(reference)
        predicted = None
        if cached["test"].logits is not None or type(score).predicted is not Score.predicted:
            predicted = score.predicted(cached["test"])
        scored.append(_scores(test, about, name, score.score(cached["test"]), predicted, names))
    if test["novelty"].null_count() == 0:
        scored.append(_scores(test, about, OWN, test["novelty"].to_numpy(), None, names))
    if left_out:
        print(f"  {shard.name} has no outputs for {', '.join(left_out)}", file=sys.stderr)
    if not scored:
        raise ConfigError(
            f"none of the scores {', '.join(settings.scores)} applies to {shard.name}"
        )
    table = pl.concat([_with_sets_apart(frame, test, about["track"]) for frame in scored])
    return Produced({"scores": SCORES.conform(table)}, table.height)


def _arrays(rows: pl.DataFrame) -> Outputs:
    def array(name: str) -> np.ndarray | None:
        if rows[name].null_count():
            return None
        return rows[name].list.to_array(rows[name].list.len()[0]).to_numpy()

    return Outputs(array("logits"), array("features"))


def _applies(needs: frozenset[str], outputs: Outputs, reference: Reference) -> bool:
    there = {name for name in ("logits", "features") if getattr(outputs, name) is not None}
    there |= {name for name in ("train", "valid", "head") if getattr(reference, name) is not None}
    return needs <= there


def _scores(
    test: pl.DataFrame,
    about: dict,
    name: str,
    score: np.ndarray,
    predicted: np.ndarray | None,
    names: dict[int, str],
) -> pl.DataFrame:
    told = pl.lit(None, pl.String)
    if predicted is not None:
        told = pl.Series([names[int(label)] for label in predicted], dtype=pl.String)
    backbone = f"{about['network']} {about['method']}"
    if about["points"]:
        backbone += f" {about['points']} points"
    return test.select(
        pl.lit(about["track"]).alias("protocol"),
        pl.lit(name).alias("detector"),
        pl.lit(backbone).alias("backbone"),
        pl.lit(about["seed"], pl.Int32).alias("seed"),
        pl.lit("test").alias("split"),
        pl.col("sample_id").alias("sample_id"),
        "class",
        pl.col("label").is_null().alias("novel"),
    ).with_columns(pl.Series("score", score), told.alias("predicted"))


def _with_sets_apart(scores: pl.DataFrame, test: pl.DataFrame, track: str) -> pl.DataFrame:
    """The whole track, and each unknown set of several by itself: `SN1 against SN2`."""
    groups = test.filter(pl.col("label").is_null())["group"].unique().sort().to_list()
    parts = [scores]
    for group in groups if len(groups) > 1 else ():
        kept = (test["label"].is_not_null() | (test["group"] == group)).alias("kept")
        parts.append(
            scores.filter(kept).with_columns(pl.lit(against(track, group)).alias("protocol"))
        )
    return pl.concat(parts)


def against(track: str, group: str) -> str:
    return f"{track} against {group}"
