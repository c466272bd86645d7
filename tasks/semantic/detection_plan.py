"""Which networks are trained: names that were asked for, checked, and one shard for each network.

Enters: the user's choice, subsets, the table TRIALS, parts of trials and pictures. Leaves: shards
of the stages in tasks/semantic/detection.py. A wrong name is said before anything is trained.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl

from schemas.errors import ConfigError, SourceError
from schemas.semantic import DetectionChoice
from storage.pieces import Part, Piece
from tasks import scores
from tasks.detection import MODEL
from tasks.semantic.trials import Subset, parts_of
from tasks.stage import Shard

if TYPE_CHECKING:
    from tasks.semantic.training import Setup

# The longest side of pictures that each network is for.
SIDES = {"cifar": 48, "stl": 128}


# ---------------------------------------------------------------- what is asked for


def chosen_tasks(choice: DetectionChoice) -> list[str]:
    """Auxiliary tasks asked for, in the order of their names, `none` first."""
    from tasks.semantic.auxiliary import NAMES

    wanted = list(NAMES) if "all" in choice.auxiliary else list(choice.auxiliary)
    if unknown := [name for name in wanted if name not in NAMES]:
        raise ConfigError(f"no auxiliary task {unknown[0]!r}; there are: {', '.join(NAMES)}")
    return sorted(set(wanted), key=lambda name: (name != "none", name))


def check_choice(
    choice: DetectionChoice,
    chosen: Sequence[str],
    declared: Sequence[Subset],
    sources: Iterable[str],
) -> None:
    """Names that can be known to be wrong before anything is read."""
    datasets = [source.partition(".")[0] for source in sources]
    there = list(dict.fromkeys([*(subset.name for subset in declared), *datasets]))
    for name in chosen:
        if name not in there:
            raise ConfigError(f"subsets: {name!r} is unknown; there are {', '.join(there)}")
    if not choice.auxiliary:
        return
    chosen_tasks(choice)
    for name in choice.scores:
        if name != "all":
            scores.find(name)
    if not choice.seeds:
        raise ConfigError("detection.seeds is empty; name one seed or more")
    for name in choice.subsets:
        if name not in there:
            raise ConfigError(
                f"detection.subsets: {name!r} is unknown; there are {', '.join(there)}"
            )
        if chosen and name not in chosen:
            raise ConfigError(
                f"detection.subsets: {name!r} is not among the subsets {', '.join(chosen)}; name "
                "it with --subsets too"
            )


def chosen_trials(choice: DetectionChoice, subsets: Sequence[Subset]) -> list[tuple[Subset, str]]:
    """The (subset, held-out member) pairs asked for; ConfigError names one that is not there."""
    if absent := [name for name in choice.subsets if name not in {s.name for s in subsets}]:
        raise ConfigError(
            f"detection.subsets: {absent[0]} has no trials; there are "
            f"{', '.join(subset.name for subset in subsets)}"
        )
    pairs = [
        (subset, member)
        for subset in subsets
        if not choice.subsets or subset.name in choice.subsets
        for member in subset.members.values()
    ]
    if not choice.trials:
        return pairs
    words = [{member, f"{subset.name}/{member}"} for subset, member in pairs]
    for name in choice.trials:
        if not any(name in both for both in words):
            there = ", ".join(f"{subset.name}/{member}" for subset, member in pairs)
            raise ConfigError(f"detection.trials: no trial {name!r}; there are {there}")
    wanted = set(choice.trials)
    return [pair for pair, both in zip(pairs, words, strict=True) if both & wanted]


def trainable(
    pairs: Sequence[tuple[Subset, str]], trials: pl.DataFrame
) -> list[tuple[Subset, str]]:
    """Trials with a training image of two classes or more and both roles in test."""
    ready = {}
    for key, rows in trials.group_by("subset", "trial"):
        labels = set(rows.filter(split="train")["label"])
        test = rows.filter(split="test")
        ready[key] = (
            len(labels) > 1
            and labels == set(range(len(labels)))
            and set(test["label"].drop_nulls()) <= labels
            and set(test["role"]) == {"normal", "anomaly"}
        )
    found = []
    for subset, member in pairs:
        if ready.get((subset.name, member)):
            found.append((subset, member))
        else:
            print(
                f"  {subset.name}/{member}: no network, as a class has no training image, or test "
                "has no normal or no anomalous one",
                file=sys.stderr,
            )
    if not found:
        raise SourceError("no trial has pictures enough for a network; name more sources")
    return found


def network_for(choice: DetectionChoice, pictures: Sequence[Part]) -> str:
    """The network named, or the one for pictures of this size."""
    if choice.network != "auto":
        return choice.network
    side = max(
        int(part.read(["width", "height"]).select(pl.all().max()).max_horizontal()[0])
        for part in pictures
        if part.rows
    )
    return next((name for name, most in SIDES.items() if side <= most), "imagenet")


# ---------------------------------------------------------------- plans


def plan_networks(
    auxiliary: Sequence[str],
    choice: DetectionChoice,
    pairs: Sequence[tuple[Subset, str]],
    trials: Sequence[Part],
    pictures: Sequence[Part],
) -> list[Shard]:
    """One shard per trial, auxiliary task and seed, with the pictures of the trial's data set."""
    by_trial = {part.shard: part for part in trials}
    own = {subset.dataset: parts_of(subset.dataset, pictures) for subset, _ in pairs}
    networks = {dataset: network_for(choice, parts) for dataset, parts in own.items()}
    setups = {
        (network, task): setup_for(network, task, choice).model_dump(mode="json")
        for network in networks.values()
        for task in auxiliary
    }
    return [
        Shard(
            f"{subset.name}/{member}/{task}/{seed}",
            parts=(by_trial[f"{subset.name}/{member}"], *own[subset.dataset]),
            about={
                "subset": subset.name,
                "trial": member,
                "network": networks[subset.dataset],
                "auxiliary": task,
                "seed": seed,
                "preset": choice.preset,
                # All of it, so that networks are trained again when a preset is mended.
                "setup": setups[networks[subset.dataset], task],
            },
        )
        for subset, member in pairs
        for task in auxiliary
        for seed in choice.seeds
    ]


def setup_for(network: str, task: str, choice: DetectionChoice) -> "Setup":
    """The preset of the network with what was asked to differ."""
    from tasks.semantic.auxiliary import find
    from tasks.semantic.training import setup_of

    setup = setup_of(network, choice.preset)
    changes: dict[str, Any] = choice.model_dump(include={"epochs", "evaluations"})
    if find(task).weight(network) > 0:  # else it has no loss of its own
        changes["auxiliary_weight"] = choice.auxiliary_weight
    changes = {name: value for name, value in changes.items() if value is not None}
    odin = setup.odin.model_dump() | choice.odin.model_dump(exclude_none=True)
    return type(setup).model_validate(setup.model_dump() | changes | {"odin": odin})


def plan_averages(shards: Sequence[Shard], trained: Sequence[Piece]) -> list[Shard]:
    """The shards of training, each with what its epochs measured."""
    return [
        replace(shard, parts=(shard.part("trials"), piece.part("training")))
        for shard, piece in zip(shards, trained, strict=True)
    ]


def plan_outputs(shards: Sequence[Shard], trained: Sequence[Piece]) -> list[Shard]:
    """The shards of training, each with the network that came of it."""
    return [
        replace(shard, parts=(*shard.parts, piece.file(MODEL)))
        for shard, piece in zip(shards, trained, strict=True)
    ]


def plan_scores(shards: Sequence[Shard], passed: Sequence[Piece]) -> list[Shard]:
    """The shards of the forward passes, each with its outputs and its network."""
    return [
        replace(shard, parts=(piece.part("outputs"), shard.part(MODEL)))
        for shard, piece in zip(shards, passed, strict=True)
    ]
