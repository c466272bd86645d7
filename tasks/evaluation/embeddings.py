"""Frozen features, computed once for all protocols, seeds and uses of a model that `embeds`.

Enters: planned runs and the parts that their samples are loaded from. Leaves: `outputs` of a frozen
run without a protocol, a piece for each part and view, of the samples that those runs have. The run
is keyed by the settings that decide the features, by weights and by how samples are loaded. What a
view changes is told to the model in `about` of the samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from schemas.config import Settings
from schemas.errors import LakeError
from schemas.manifest import RunMark
from schemas.runs import RunFacts
from schemas.tables import OUTPUTS, PLAIN
from storage.layout import content_key
from storage.pieces import Part, Piece
from storage.raw import RawFile
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.evaluation.passing import (
    LOADER,
    DeviceSettings,
    loader_of,
    model_of,
    output_rows,
    use_resources,
)
from tasks.evaluation.runs import run_id, run_mark
from tasks.evaluation.stages import PassedRun, plan_records, record_run
from tasks.learning.memory import new_array
from tasks.models.base import Model
from tasks.scores.base import Outputs


def embedding_of(kind: type[Model], facts: RunFacts) -> RunFacts | None:
    """The frozen run that a run of this kind stands on, if it embeds."""
    if not kind.embeds:
        return None
    names = (*kind.embeds, LOADER)
    settings = {name: value for name, value in facts.settings.items() if name in names}
    weights = {name: digest[:8] for name, digest in facts.weights.items() if name in facts.changed}
    return RunFacts(
        benchmark=facts.benchmark,
        protocol=None,
        model=facts.model,
        settings=settings,
        changed=weights,
        origin="frozen",
        versions={name: facts.versions[name] for name in ("model", "loader")},
        weights=facts.weights,
        precision=facts.precision,
        fit_key="none",
    )


@dataclass(frozen=True)
class View:
    """A way of showing samples to a fitted model, such as a density of clouds."""

    name: str = PLAIN
    settings: Mapping[str, Any] = field(default_factory=dict)


class FrozenRun:
    """What is to be embedded: a frozen run, its weights, parts, and the protocols that need it."""

    def __init__(self, facts: RunFacts, weights: tuple[RawFile, ...], threads: int) -> None:
        self.facts, self.weights, self.threads = facts, weights, threads
        self.parts: dict[str, Part] = {}
        self.protocols: set[str | None] = set()

    @property
    def mark(self) -> RunMark:
        return run_mark(self.facts, "none")

    def add(self, protocol: str | None, parts: Sequence[Part]) -> None:
        self.protocols.add(protocol)
        self.parts |= {part.sha256: part for part in parts if part.table != "splits"}

    def shards(
        self,
        splits: pl.DataFrame,
        digests: Mapping[str, str],
        earlier: Mapping[str, Piece],
        view: View,
    ) -> list[Shard]:
        """One for each part with samples of those protocols, as the view shows them.

        Samples that an earlier command embedded stay, as long as a protocol has them.
        """
        ids = splits.filter(pl.col("protocol").is_in(list(self.protocols)))["sample_id"].unique()
        reader = loader_of(self.facts.benchmark)
        shards = []
        for part in self.parts.values():
            part_ids = reader.ids_of(part).to_frame("sample_id")
            names = part_ids.join(ids.to_frame("sample_id"), on="sample_id", how="semi")
            name = f"{self.mark.run_id}/{part.shard}"
            about: dict[str, Any] = {"facts": self.facts.model_dump(mode="json")}
            depends = {"run": self.mark.run_id}
            if view.name != PLAIN:
                name = f"{name}/{view.name}"
                about |= {"view": view.name, "view_settings": dict(view.settings)}
                depends["view"] = view.name
            shard_ids = set(names["sample_id"])
            if (piece := earlier.get(name)) is not None:
                earlier_ids = piece.part(OUTPUTS.name).read(["sample_id"])
                remaining = earlier_ids.join(splits, on="sample_id", how="semi")
                shard_ids |= set(remaining.join(part_ids, on="sample_id", how="semi")["sample_id"])
            if not shard_ids:
                continue
            content = content_key([[one, digests.get(one)] for one in sorted(shard_ids)])
            shards.append(
                Shard(
                    name,
                    files=self.weights,
                    parts=(part,),
                    about=about | {"ids": sorted(shard_ids)},
                    depends=depends | {"samples": content},
                    run=self.mark,
                    threads=self.threads,
                )
            )
        return shards


def make_embeddings(
    build: Build, runs: Mapping[str, FrozenRun], how: DeviceSettings, views: Sequence[View]
) -> dict[str, tuple[Part, ...]]:
    """Parts of `outputs` by the id of the frozen run."""
    if not runs:
        return {}
    splits = build.read("splits").select("protocol", "sample_id")
    earlier = build.earlier(embed_samples, how)
    digests = dict(build.read("samples").select("sample_id", "digest").iter_rows())
    shards = {
        key: [shard for view in views for shard in one.shards(splits, digests, earlier, view)]
        for key, one in runs.items()
    }
    pieces = iter(
        build.run(embed_samples, [s for run_shards in shards.values() for s in run_shards], how)
    )
    parts = {
        key: tuple(next(pieces).part("outputs") for _ in run_shards)
        for key, run_shards in shards.items()
    }
    frozen = [PassedRun(one.facts, one.mark, parts[key], (), ()) for key, one in runs.items()]
    build.run(record_run, plan_records(frozen), Settings())
    return parts


@stage(writes=(OUTPUTS,), version=1, tags=("gpu",), apart=True)
def embed_samples(shard: Shard, settings: DeviceSettings) -> Produced:
    """Features of some samples of one part in one view."""
    facts = RunFacts.model_validate(shard.about["facts"])
    model = model_of(facts, {file.name: str(file.path) for file in shard.files})
    model.prepare(device=settings.device)
    use_resources(model, settings, shard)
    (part,) = shard.parts
    samples = loader_of(facts.benchmark).load_part(part, shard.about["ids"], facts)
    about = {**samples.about, **shard.about.get("view_settings", {})}
    outputs = Outputs(features=model.embed(replace(samples, about=about)))
    rows = output_rows(facts, samples.ids, outputs, {})
    rows = rows.with_columns(pl.lit(shard.about.get("view", PLAIN)).alias("view"))
    return Produced({OUTPUTS.name: rows}, rows.height)


def embedded(parts: Sequence[Part], facts: RunFacts, ids: Sequence[str], view: str) -> np.ndarray:
    """Features (N, D) of these samples in a view, out of the parts of a frozen run."""
    keys = pl.DataFrame({"sample_id": list(ids)}, schema={"sample_id": pl.String})
    keys = keys.with_columns(pl.lit(run_id(facts)).alias("run_id"), pl.lit(view).alias("view"))
    array, missing = read_features(parts, keys, ("run_id", "sample_id", "view"))
    if missing:
        raise LakeError(f"{missing} samples have no features of run {run_id(facts)}")
    return array


def read_features(
    parts: Sequence[Part], keys: pl.DataFrame, on: Sequence[str]
) -> tuple[np.ndarray, int]:
    """Features (N, D) of the rows of `outputs` that have these keys, in their order.

    They are read row group by row group, into memory or a file (`new_array`). How many keys have
    none is told too; their rows are undefined.
    """
    array: np.ndarray | None = None
    numbered = keys.select(on).with_row_index("row")
    all_rows = pl.concat([part.read(list(on)) for part in parts]).with_row_index("place")
    # One join of all parts: one for each would cost the square of their number.
    matches = all_rows.join(numbered, on=list(on)).sort("place")
    places, rows = (matches[column].to_numpy() for column in ("place", "row"))
    first = 0
    for part in parts:
        for group in part.row_groups(["features"]):
            low, high = np.searchsorted(places, (first, first + group.height))
            if low < high:
                vectors = group["features"].gather(places[low:high] - first)
                values = vectors.explode().to_numpy().reshape(high - low, -1)
                if array is None:
                    array = new_array((keys.height, values.shape[1]), np.float32)
                array[rows[low:high]] = values
            first += group.height
    if array is None:
        array = np.empty((keys.height, 0), np.float32)
    return array, keys.height - len(rows)
