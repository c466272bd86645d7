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
    use_threads_of,
)
from tasks.evaluation.runs import run_id, run_mark
from tasks.evaluation.stages import PassedRun, plan_records, record_run
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


class Wanted:
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
        found = []
        for part in self.parts.values():
            there = reader.ids_of(part).to_frame("sample_id")
            names = there.join(ids.to_frame("sample_id"), on="sample_id", how="semi")
            name = f"{self.mark.run_id}/{part.shard}"
            about: dict[str, Any] = {"facts": self.facts.model_dump(mode="json")}
            depends = {"run": self.mark.run_id}
            if view.name != PLAIN:
                name = f"{name}/{view.name}"
                about |= {"view": view.name, "view_settings": dict(view.settings)}
                depends["view"] = view.name
            own = set(names["sample_id"])
            if (piece := earlier.get(name)) is not None:
                before = piece.part(OUTPUTS.name).read(["sample_id"])
                still = before.join(splits, on="sample_id", how="semi")
                own |= set(still.join(there, on="sample_id", how="semi")["sample_id"])
            if not own:
                continue
            content = content_key([[one, digests.get(one)] for one in sorted(own)])
            found.append(
                Shard(
                    name,
                    files=self.weights,
                    parts=(part,),
                    about=about | {"ids": sorted(own)},
                    depends=depends | {"samples": content},
                    run=self.mark,
                    threads=self.threads,
                )
            )
        return found


def make_embeddings(
    build: Build, wanted: Mapping[str, Wanted], how: DeviceSettings, views: Sequence[View]
) -> dict[str, tuple[Part, ...]]:
    """Parts of `outputs` by the id of the frozen run."""
    if not wanted:
        return {}
    splits = build.read("splits").select("protocol", "sample_id")
    earlier = build.earlier(embed_samples, how)
    digests = dict(build.read("samples").select("sample_id", "digest").iter_rows())
    shards = {
        key: [shard for view in views for shard in one.shards(splits, digests, earlier, view)]
        for key, one in wanted.items()
    }
    pieces = iter(build.run(embed_samples, [s for some in shards.values() for s in some], how))
    parts = {key: tuple(next(pieces).part("outputs") for _ in some) for key, some in shards.items()}
    frozen = [PassedRun(one.facts, one.mark, parts[key], (), ()) for key, one in wanted.items()]
    build.run(record_run, plan_records(frozen), Settings())
    return parts


@stage(writes=(OUTPUTS,), version=1, tags=("gpu",), apart=True)
def embed_samples(shard: Shard, settings: DeviceSettings) -> Produced:
    """Features of some samples of one part in one view."""
    facts = RunFacts.model_validate(shard.about["facts"])
    model = model_of(facts, {file.name: str(file.path) for file in shard.files})
    model.prepare(device=settings.device)
    use_threads_of(model)
    (part,) = shard.parts
    samples = loader_of(facts.benchmark).load_part(part, shard.about["ids"], facts)
    about = {**samples.about, **shard.about.get("view_settings", {})}
    outputs = Outputs(features=model.embed(replace(samples, about=about)))
    rows = output_rows(facts, samples.ids, outputs, {})
    rows = rows.with_columns(pl.lit(shard.about.get("view", PLAIN)).alias("view"))
    return Produced({OUTPUTS.name: rows}, rows.height)


def embedded(parts: Sequence[Part], facts: RunFacts, ids: Sequence[str], view: str) -> np.ndarray:
    """Features (N, D) of these samples in a view, out of the parts of a frozen run."""
    wanted = pl.DataFrame({"sample_id": list(ids)}, schema={"sample_id": pl.String})
    columns = ["run_id", "sample_id", "view", "features"]
    own = (pl.col("run_id") == run_id(facts)) & (pl.col("view") == view)
    rows = [part.read(columns).filter(own).drop("run_id", "view") for part in parts]
    width = next(len(row) for part in rows for row in part["features"].head(1))
    every = pl.concat([part.join(wanted, on="sample_id", how="semi") for part in rows])
    found = wanted.join(every, on="sample_id", how="left", maintain_order="left")["features"]
    if found.null_count():
        raise LakeError(f"{found.null_count()} samples have no features of run {run_id(facts)}")
    return found.explode().to_numpy().astype(np.float32).reshape(len(ids), width)
