"""3DOS: meshes and scans to point clouds, lists to open-set tracks, networks to scores."""

from flows.runner import benchmark_flow, publish_report
from schemas.config import Settings
from schemas.threedos import Config
from storage.layout import lake_root
from storage.raw import RawSource
from tasks.engine.stage import Build
from tasks.evaluation.model_runs import make_runs, plan_facts
from tasks.evaluation.protocols import key_protocols, plan_protocols, protocol_keys
from tasks.evaluation.stages import ScoreChoice, chosen_scores, measure_runs
from tasks.ingest.raw_files import ARCHIVE_LIMITS
from tasks.threedos.ingest import plan_shape_shards, sample_shapes
from tasks.threedos.runs import (
    BENCHMARK,
    CONVENTIONS,
    density_views,
    plan_runs,
    track_parts,
    trainable,
)
from tasks.threedos.sources import KINDS, Listing, list_shapes
from tasks.threedos.splits import plan_members, plan_splits, read_members, split_track
from tasks.threedos.tracks import Track, built_in_tracks, choose_tracks, read_tracks


@benchmark_flow
def build(config: Config) -> None:
    """Shapes to clouds, lists to tracks, networks to scores (3DOS sections 3 and 4)."""
    lake = lake_root(config.lake)
    declared = built_in_tracks() + (read_tracks(config.track_file) if config.track_file else ())
    tracks = choose_tracks(config.tracks, declared)
    run_tracks = choose_tracks(config.protocols, tracks)
    scores = chosen_scores(config.scores, config.preset)
    plan_runs(config, run_tracks)  # a wrong choice is said before any work
    with Build(BENCHMARK, lake, config, config.max_reject_share) as build:
        sources = {
            name: build.source(path, limits=ARCHIVE_LIMITS) for name, path in config.source.items()
        }
        lists = build.source(config.lists) if config.lists else None
        listed = plan_members(lists, sources, config.listing)
        if listed:
            build.run(read_members, listed, config.listing)

        listings = [shapes_of(build, config, name, source) for name, source in sources.items()]
        if listings:
            build.run(sample_shapes, plan_shape_shards(listings), config.shapes)

        members = build.table("members") + build.table("shapes")
        build.run(split_track, plan_splits(members, tracks), config.splits)
        definitions = {
            track.name: track.model_dump(mode="json") | config.splits.model_dump(mode="json")
            for track in tracks
        }
        planned = plan_protocols(build.table("splits"), build.table("samples"), definitions)
        build.run(key_protocols, planned, Settings())

        if config.models:
            build.publish()
            run_models(build, run_tracks, scores, config)
    publish_report(lake, BENCHMARK)


def shapes_of(build: Build, config: Config, name: str, source: RawSource) -> Listing:
    """What one source holds; a name that is no kind is a folder of one's own."""
    kind = name if name in KINDS else "folder"
    members = build.read("members") if build.table("members") else None
    return list_shapes(kind, source, config.shapes, name=name, members=members)


def run_models(
    build: Build, tracks: tuple[Track, ...], scores: list[ScoreChoice], config: Config
) -> None:
    """Train on known classes, pass every cloud once, score and evaluate (3DOS section 4)."""
    clouds = build.read("samples")["sample_id"]
    ready = trainable(tracks, build.read("splits"), clouds, config.protocols)
    tables = {name: build.table(name) for name in ("splits", "point_clouds")}
    parts = track_parts(ready, tables)
    runs = plan_facts(BENCHMARK, config, plan_runs(config, ready), protocol_keys(build))
    passed = make_runs(
        build,
        runs,
        lambda run: parts[run.run.offer.protocol],
        config,
        density_views(config.points),
    )
    measure_runs(build, passed, scores, lambda _: CONVENTIONS, selection=config.scores)
