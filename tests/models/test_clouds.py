"""Training of point networks: methods learn, models are kept, resuming changes nothing."""

import math
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from schemas.errors import ConfigError, TrainingError
from tasks.scores import nearest
from tasks.scores.base import Outputs, Reference
from tasks.threedos import methods, networks, training
from tasks.threedos.formats import surface_of
from tasks.models import (
    arpl,
    cosine_proto,
    cross_entropy,
    flow,
    outlier_exposure,
    subcenter_arcface,
    supcon,
    vae,
)
from tasks.models.base import TrainingSettings
from tasks.models.setups import Setup, setup_of
from tasks.networks import dgcnn
from tasks.threedos.sampling import make_cloud, sample_surface, shape_rng
from tasks.threedos.text_meshes import read_off
from tests.shared import shared_path

torch.set_num_threads(1)

HEAD = {"hidden": 16, "features": 8, "dropout": 0.1}
METHODS = {
    "cross_entropy": cross_entropy.Configuration(**HEAD),
    "cosine_proto": cosine_proto.Configuration(**HEAD),
    "subcenter_arcface": subcenter_arcface.Configuration(**HEAD),
    "supcon": supcon.Configuration(**HEAD),
    "arpl": arpl.Configuration(
        **HEAD, noise=4, generator=(16,), discriminator=(16, 16), generated_points=32
    ),
    "outlier_exposure": outlier_exposure.Configuration(**HEAD),
    "flow": flow.Configuration(**HEAD, blocks=3, inner=16, flow_rate=3e-3),
    "vae": vae.Configuration(
        k=4,
        local=(16,),
        graph=(16, 32),
        latent=4,
        folding=32,
        reconstruction_points=48,
        divergence=0.01,
    ),
}
NETWORK = dgcnn.Configuration(k=6, widths=(8, 16), fused=16)
CLASSIFYING = ["cross_entropy", "cosine_proto", "subcenter_arcface", "arpl", "flow"]


def shapes(count: int = 24, points: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Balls, rods and discs."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 3
    stretch = np.array([[1, 1, 1], [0.15, 0.15, 1], [1, 1, 0.1]])[labels]
    clouds = rng.normal(size=(count, points, 3)) * stretch[:, None]
    clouds /= np.linalg.norm(clouds, axis=2).max(1)[:, None, None]
    return clouds.astype(np.float32), labels.astype(np.int64)


def setup(method: str, **changes: object) -> Setup:
    loop = {
        "epochs": 6,
        "batch_size": 8,
        "points": 48,
        "optimizer": "adam",
        "learning_rate": 3e-3,
        "initial_weights": "torch",
        "checkpoint_every": 2,
    }
    sizes = METHODS[method].model_dump(exclude_unset=True)
    return Setup(
        model=type(METHODS[method])(**sizes | loop | changes),
        network=NETWORK if methods.find(method).uses_network else None,
    )


def fit(method: str, work: Path, *, seed: int = 0, **changes: object) -> training.Model:
    progress = changes.pop("progress", None)
    base = None
    if methods.find(method).requires:
        base = fit(methods.find(method).requires, work / "base", epochs=1)
    network = "dgcnn" if methods.find(method).uses_network else None
    return training.train(
        method,
        network,
        setup(method, **changes),
        *shapes(),
        seed=seed,
        work=work,
        device="cpu",
        base=base,
        progress=progress,
    )


def weights(model: training.Model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.method.layers.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("method", methods.names())
def test_a_method_learns_and_comes_back_from_disk(method: str, tmp_path: Path) -> None:
    model = fit(method, tmp_path)
    losses = model.history["loss"]
    assert losses[-2:].mean() < losses[:2].mean()
    assert model.history["epoch"].to_list() == [1, 2, 3, 4, 5, 6]
    clouds, _ = shapes()
    found = training.outputs(model, clouds)
    assert all(
        len(v) == 24 and np.isfinite(v).all() and v.dtype == np.float32 for v in found.values()
    )
    head = {"head"} if model.method.head() is not None else set()
    assert found.keys() | head == methods.find(method).gives
    again = training.load(tmp_path / training.MODEL, device="cpu")
    assert again.setup.values() == model.setup.values() and same(weights(again), weights(model))
    for name, value in training.outputs(again, clouds).items():
        assert np.array_equal(value, found[name])
    assert not (tmp_path / training.CHECKPOINT).exists()


@pytest.mark.parametrize("method", CLASSIFYING)
def test_classes_are_told_apart(method: str, tmp_path: Path) -> None:
    model = fit(method, tmp_path, epochs=15, learning_rate=2e-2)
    clouds, labels = shapes()
    logits = training.outputs(model, clouds)["logits"]
    assert logits.shape == (24, 3)
    assert (logits.argmax(1) == labels).mean() >= 0.8


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", ["cross_entropy", "arpl", "flow", "outlier_exposure"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_killed_training_ends_with_the_same_weights(
    method: str, optimizer: str, tmp_path: Path
) -> None:
    whole = fit(method, tmp_path / "whole", optimizer=optimizer)

    def kill(epoch: int, *_: object) -> None:
        if epoch == 5:
            raise Killed

    with pytest.raises(Killed):
        fit(method, tmp_path / "cut", optimizer=optimizer, progress=kill)
    seen: list[int] = []
    resumed = fit(
        method, tmp_path / "cut", optimizer=optimizer, progress=lambda epoch, *_: seen.append(epoch)
    )
    assert seen == [5, 6]
    assert same(weights(whole), weights(resumed))
    assert whole.history.equals(resumed.history)
    files = [tmp_path / name / training.MODEL for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_trained_model_is_not_trained_again(tmp_path: Path) -> None:
    first = fit("cross_entropy", tmp_path, epochs=1)
    seen: list[int] = []
    second = fit("cross_entropy", tmp_path, epochs=1, progress=lambda e, *_: seen.append(e))
    assert not seen and same(weights(first), weights(second))
    with pytest.raises(ConfigError, match="another training"):
        fit("cross_entropy", tmp_path, epochs=1, seed=1)


def test_seeds_decide_the_weights(tmp_path: Path) -> None:
    a, b, c = (
        weights(fit("cross_entropy", tmp_path / str(n), seed=seed, epochs=1))
        for n, seed in enumerate((0, 0, 1))
    )
    assert same(a, b) and not same(a, c)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    def kill(epoch: int, *_: object) -> None:
        if epoch == 3:
            raise Killed

    with pytest.raises(Killed):
        fit("cross_entropy", tmp_path, progress=kill)
    with pytest.raises(ConfigError, match="another training"):
        fit("cross_entropy", tmp_path, learning_rate=1e-3)


def test_the_flow_is_trained_at_every_step_and_leaves_the_network_alone(tmp_path: Path) -> None:
    model = fit("flow", tmp_path, epochs=1)
    method, (clouds, labels) = model.method, shapes()
    batch, targets = torch.from_numpy(clouds), torch.from_numpy(labels)
    optimizers = method.optimizers(setup("flow", learning_rate=1e-9).model)
    method.layers.eval()
    before = weights(model)
    novelty = [float(training.outputs(model, clouds)["novelty"].mean())]
    for _ in range(5):
        last = {name: v for name, v in weights(model).items() if name.startswith("flow.")}
        method.step(batch, targets, optimizers, "plain")
        novelty.append(float(training.outputs(model, clouds)["novelty"].mean()))
        now = weights(model)
        assert all(not torch.equal(now[name], value) for name, value in last.items())
    # Mean log-likelihood of the training shapes rises, and only the flow has moved.
    assert all(later < earlier for earlier, later in pairwise(novelty))
    moved = max(
        float((now[name] - value).abs().max())
        for name, value in before.items()
        if not name.startswith("flow.")
    )
    assert moved < 1e-6


def test_vae_reconstructs_what_it_has_seen_better(tmp_path: Path) -> None:
    model = fit("vae", tmp_path, epochs=40, augmentation="none")
    clouds, _ = shapes()
    corner = np.sign(clouds) * np.float32(0.577)
    seen = training.outputs(model, clouds)["novelty"]
    assert training.outputs(model, corner)["novelty"].mean() > 1.5 * seen.mean()


@pytest.mark.parametrize("method", ["cross_entropy", "flow"])
def test_the_head_makes_the_logits_of_the_features(method: str, tmp_path: Path) -> None:
    model = fit(method, tmp_path, epochs=2)
    clouds, labels = shapes()
    found = training.outputs(model, clouds)
    outputs = Outputs(found["logits"], found["features"])
    head = model.method.head()
    made = head(torch.from_numpy(found["features"])).numpy()
    assert np.allclose(made, found["logits"], atol=1e-5)
    assert (found["features"] < 0).any() and head.slope == 0.2
    Reference(outputs, labels, None, head)


def test_outputs_of_a_shape_do_not_depend_on_batch_or_order(tmp_path: Path) -> None:
    model = fit("cross_entropy", tmp_path, epochs=2)
    clouds, _ = shapes()
    found = training.outputs(model, clouds)["features"]
    order = np.random.default_rng(1).permutation(24)
    other = training.outputs(model, clouds[order], batch_size=5)["features"]
    assert np.allclose(other, found[order], atol=1e-5)
    fewer = training.outputs(model, clouds, points=20)["features"]
    assert not np.allclose(fewer, found, atol=1e-3)


def test_votes_are_means_over_places_that_do_not_repeat(tmp_path: Path) -> None:
    places = training.vote_places(64, 20, 7)
    assert [len(np.unique(np.concatenate(places[n : n + 3]))) for n in (0, 3)] == [60, 60]
    assert len(places) == 7 and not np.array_equal(places[0], places[3])
    assert [len(p) for p in training.vote_places(8, 20, 2)] == [8, 8]
    clouds, _ = shapes()
    voting = fit("cross_entropy", tmp_path / "3", epochs=2, votes=3, points=20)
    single = fit("cross_entropy", tmp_path / "1", epochs=2, votes=1, points=20)
    rows = [training.outputs(single, clouds[:, p])["features"] for p in places[:3]]
    found = training.outputs(voting, clouds)
    assert np.allclose(found["features"], np.mean(rows, 0), atol=1e-5)
    made = voting.method.head()(torch.from_numpy(found["features"])).numpy()
    assert np.allclose(made, found["logits"], atol=1e-5)


def test_outlier_exposure_starts_from_its_base(tmp_path: Path) -> None:
    clouds, labels = shapes()
    args = ("outlier_exposure", "dgcnn", setup("outlier_exposure", epochs=1), clouds, labels)
    with pytest.raises(ConfigError, match="starts from a fitted cross_entropy, found none"):
        training.train(*args, seed=0, work=tmp_path)
    base = fit("cross_entropy", tmp_path / "base", epochs=2)
    slow = setup("outlier_exposure", epochs=1, learning_rate=1e-9, final_rate=0)
    model = training.train(*args[:2], slow, clouds, labels, seed=9, work=tmp_path, base=base)
    weight = "embedding.0.weight"
    assert torch.allclose(weights(model)[weight], weights(base)[weight], atol=1e-7)
    other = fit("cross_entropy", tmp_path / "other", epochs=1)
    with pytest.raises(ConfigError, match="another training"):
        training.train(*args[:2], slow, clouds, labels, seed=9, work=tmp_path, base=other)


def test_rates_follow_the_cosine_and_the_warm_up() -> None:
    plain = TrainingSettings()
    assert training.rate_at(plain, 1) == 0.1
    assert math.isclose(training.rate_at(plain, 126), (0.1 + 1e-4) / 2)
    assert training.rate_at(plain, 250) < 2e-4
    warm = setup_of("supcon", "dgcnn", "paper").model
    assert training.rate_at(warm, 1) == 1e-5
    assert math.isclose(training.rate_at(warm, 51), (1e-5 + 0.05) / 2)
    assert math.isclose(
        training.rate_at(warm, 201),
        1e-4 + (0.05 - 1e-4) * (1 + math.cos(math.pi * 200 / 2000)) / 2,
    )


def test_paper_presets_are_those_of_the_specification() -> None:
    def values(method: str, network: str | None) -> tuple[object, ...]:
        t = setup_of(method, network, "paper").model
        return t.optimizer, t.learning_rate, t.final_rate, t.weight_decay, t.epochs, t.batch_size

    assert values("cross_entropy", "dgcnn") == ("sgd", 0.1, 1e-4, 1e-4, 250, 64)
    assert values("cross_entropy", "pointnet2") == ("adam", 1e-3, 1e-5, 1e-4, 250, 64)
    assert values("subcenter_arcface", "dgcnn") == ("sgd", 0.1, 1e-4, 1e-4, 500, 64)
    assert values("outlier_exposure", "dgcnn") == ("sgd", 1e-3, 1e-6, 1e-4, 100, 64)
    assert values("outlier_exposure", "pointnet2") == ("adam", 1e-5, 1e-6, 1e-4, 100, 64)
    assert values("supcon", "dgcnn")[:2] == ("sgd", 0.05)
    assert values("vae", None) == ("adam", 1e-3, 1e-3, 1e-6, 300, 100)


@pytest.mark.parametrize("network", networks.names())
@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("preset", ["paper", "small"])
def test_every_preset_can_be_built(network: str, method: str, preset: str) -> None:
    kind = methods.find(method)
    chosen = setup_of(method, network if kind.uses_network else None, preset)
    assert Setup.model_validate(chosen) == chosen
    built = networks.find(network)(chosen.network) if chosen.network else None
    if preset == "small":
        kind(chosen.model, built, 4).optimizers(chosen.model)


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    clouds, labels = shapes()

    def start(clouds: np.ndarray, labels: np.ndarray, network: str | None = "dgcnn") -> None:
        chosen = setup("cross_entropy")
        training.train("cross_entropy", network, chosen, clouds, labels, seed=0, work=tmp_path)

    with pytest.raises(ConfigError, match=r"clouds are float64 .* expected float32"):
        start(clouds.astype(np.float64), labels)
    with pytest.raises(ConfigError, match=r"labels are \[0, 2\], expected 0 to 1 without gaps"):
        start(clouds, np.where(labels == 1, 2, labels))
    with pytest.raises(ConfigError, match="one int64"):
        start(clouds, labels[:-1])
    with pytest.raises(ConfigError, match="network is None, expected one of dgcnn"):
        start(clouds, labels, None)
    with pytest.raises(ConfigError, match="no preset 'tiny'"):
        setup_of("cross_entropy", "dgcnn", "tiny")
    with pytest.raises(ConfigError, match="no model of point clouds 'bert'"):
        setup_of("bert", "dgcnn", "paper")
    with pytest.raises(TrainingError, match="diverged in epoch 1"):
        broken = clouds.copy()
        broken[0] = np.nan
        start(broken, labels)


def modelnet(sets: tuple[dict[str, int], ...]) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """For each set of classes the clouds and labels of train and test, from real meshes."""
    members = {name: n for n, labels in enumerate(sets) for name in labels}
    rows: list[dict[str, list[tuple[np.ndarray, int]]]] = [{"train": [], "test": []} for _ in sets]
    with zipfile.ZipFile(shared_path("shapes/ModelNet40_mini.zip")) as archive:
        for name in sorted(archive.namelist()):
            _, kind, *rest = name.split("/")
            if kind not in members or not name.endswith(".off"):
                continue
            surface = surface_of(read_off(archive.read(name)))
            rng = shape_rng(0, name)
            candidates = sample_surface(surface.corners, surface.areas, 8192, rng)
            cloud = make_cloud(candidates, 2048, "unit_sphere").points
            number = members[kind]
            rows[number][rest[0]].append((cloud, sets[number][kind]))
    return [
        {s: (np.stack([c for c, _ in r]), np.array([k for _, k in r])) for s, r in one.items()}
        for one in rows
    ]


SR1 = {"chair": 0, "bookshelf": 1, "door": 2, "sink": 3, "sofa": 4}
SR2 = {"bed": 0, "toilet": 1, "desk": 2, "monitor": 3, "table": 2}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_small_dgcnn_knows_unknown_furniture(tmp_path: Path) -> None:
    known, unknown = modelnet((SR1, SR2))
    clouds, labels = known["train"]
    model = training.train(
        "cross_entropy", "dgcnn", "small", clouds, labels, seed=0, work=tmp_path, device="cpu"
    )
    rows = [known["train"][0], known["test"][0], unknown["test"][0]]
    train, inside, outside = (
        Outputs(features=training.outputs(model, r)["features"]) for r in rows
    )
    score = nearest.Nearest()
    score.fit(Reference(train=train))
    novelty = np.concatenate([score.score(inside), score.score(outside)])
    truth = np.repeat([0, 1], [len(inside), len(outside)])
    # A hand-made histogram with the same nearest distance gets 0.899.
    assert roc_auc_score(truth, novelty) >= 0.9
