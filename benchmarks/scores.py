"""Post-hoc scores of 3DOS's test shapes, and the nearest training sample: one run, as ratios.

`python -m benchmarks.scores` on one thread, in seconds of CPU time:
- `per score`: DGCNN of the paper's size at batch 1, the network run anew for every score as the
  released evaluation does it (one pass a score): MSP with MLS, nearest, ODIN (two forward
  passes and a backward one), energy, GradNorm (a backward one), ReAct.
- `forward only`: one forward pass at batch 1 for each of ten scores, then closed forms.
- `cached` (ours): one forward pass, these scores from its logits and features;
  timed before and after the others, the mean counts. All must agree. Shapes are random clouds,
  weights are random; training outputs are given to all sides.
- nearest training sample, 10,260 x 7,342 x 256, against scikit-learn; both must name the same rows.
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from tasks import networks
from tasks.learning.neighbours import nearest
from tasks.networks import heads
from tasks.scores import find
from tasks.scores.base import Head, Outputs, Reference

SHAPES, TRAIN, POINTS, CLASSES, BATCH = 48, 64, 512, 18, 4
SCORES = ("cosine", "energy", "entropy", "gradnorm", "mahalanobis", "mls", "msp", "nearest")
SCORES += ("odin_without_step", "react")
TEST_ROWS, TRAIN_ROWS, WIDTH = 10_260, 7_342, 256
Scores = dict[str, np.ndarray]


class Classifier(nn.Module):
    """DGCNN with 3DOS's head; gives logits f and penultimate features g."""

    def __init__(self) -> None:
        super().__init__()
        settings = heads.HeadSettings()
        self.network = networks.find("dgcnn")(networks.find("dgcnn").resolve("paper"))
        self.layers = self.network.layers
        slope = self.network.slope
        self.embedding = heads.embedding(self.network.width, settings, slope)
        self.classifier = heads.classifier(CLASSES, settings, slope)

    def forward(self, clouds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        g = self.embedding(self.network.encode(clouds))
        return self.classifier(g), g

    def head(self) -> Head:
        return Head.of(self.classifier[-1], self.classifier[0], self.network.slope)


def outputs_of(model: Classifier, clouds: torch.Tensor, batch: int) -> Outputs:
    with torch.inference_mode():
        parts = [model(block) for block in clouds.split(batch)]
    logits, features = (torch.cat(arrays).numpy() for arrays in zip(*parts, strict=True))
    return Outputs(logits, features)


def cached(model: Classifier, clouds: torch.Tensor, reference: Reference, batch: int) -> Scores:
    return scores_of(outputs_of(model, clouds, batch), reference)


def scores_of(outputs: Outputs, reference: Reference) -> Scores:
    found = {}
    for name in SCORES:
        score = find(name)()
        score.fit(reference)
        found[name] = score.score(outputs)
    return found


def forward_per_score(model: Classifier, clouds: torch.Tensor, reference: Reference) -> Scores:
    """A forward pass at batch 1 for each score, then its closed form."""
    found = {}
    for name in SCORES:
        score = find(name)()
        score.fit(reference)
        found[name] = score.score(outputs_of(model, clouds, 1))
    return found


def per_score(model: Classifier, clouds: torch.Tensor, reference: Reference) -> Scores:
    """As the released evaluation: batch 1, the network anew for each score, autograd."""
    train = torch.from_numpy(reference.train.features)
    threshold = float(np.percentile(reference.valid.features, 90))
    last = model.classifier[-1].weight

    def every(score: Callable[[torch.Tensor], list[torch.Tensor]]) -> np.ndarray:
        rows = [torch.stack(score(cloud)).detach() for cloud in clouds.split(1)]
        return -torch.stack(rows).double().numpy().T

    @torch.no_grad()
    def of_logits(cloud: torch.Tensor) -> list[torch.Tensor]:
        logits = model(cloud)[0][0]
        return [logits.softmax(0).max(), logits.max()]

    @torch.no_grad()
    def distance(cloud: torch.Tensor) -> list[torch.Tensor]:
        return [-(model(cloud)[1] - train).norm(dim=1).min()]

    def odin(cloud: torch.Tensor) -> list[torch.Tensor]:
        cloud = cloud.clone().requires_grad_()
        logits = model(cloud)[0] / 1000
        loss = nn.functional.cross_entropy(logits, logits.argmax(1))
        (gradient,) = torch.autograd.grad(loss, cloud)
        with torch.no_grad():
            stepped = model(cloud - 0.0 * gradient.sign())[0] / 1000
        return [stepped.softmax(1).max()]

    @torch.no_grad()
    def energy(cloud: torch.Tensor) -> list[torch.Tensor]:
        return [model(cloud)[0].logsumexp(1)[0]]

    def gradnorm(cloud: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (-model(cloud)[0].log_softmax(1)).sum().backward()
        return [last.grad.abs().sum()]

    @torch.no_grad()
    def react(cloud: torch.Tensor) -> list[torch.Tensor]:
        g = model(cloud)[1].clamp(max=threshold)
        return [model.classifier(g).logsumexp(1)[0]]

    msp, mls = every(of_logits)
    passes = {"nearest": distance, "odin_without_step": odin, "energy": energy}
    passes |= {"gradnorm": gradnorm, "react": react}
    return {"msp": msp, "mls": mls} | {name: every(score)[0] for name, score in passes.items()}


def timed(work: Callable[[], object], repeats: int) -> tuple[float, object]:
    best, found = float("inf"), None
    for _ in range(repeats):
        started = time.process_time()
        found = work()
        best = min(best, time.process_time() - started)
    return best, found


def compare_scores() -> None:
    torch.manual_seed(0)
    model = Classifier().eval()
    generator = torch.Generator().manual_seed(1)
    clouds = torch.randn(SHAPES + TRAIN, POINTS, 3, generator=generator)
    clouds *= torch.rand(len(clouds), 1, 3, generator=generator) + 0.2
    test, train = clouds.split((SHAPES, TRAIN))
    known = outputs_of(model, train, BATCH)
    reference = Reference(known, np.arange(TRAIN) % CLASSES, known, model.head())

    before, scores = timed(lambda: cached(model, test, reference, BATCH), 1)
    plain, again = timed(lambda: forward_per_score(model, test, reference), 1)
    theirs, released = timed(lambda: per_score(model, test, reference), 1)
    after, _ = timed(lambda: cached(model, test, reference, BATCH), 1)
    ours = (before + after) / 2
    outputs = outputs_of(model, test, BATCH)
    closed, _ = timed(lambda: scores_of(outputs, reference), 3)
    for side in (released, again):
        for name, values in side.items():
            if not np.allclose(scores[name], values, rtol=1e-4, atol=1e-6):
                off = np.abs(scores[name] - values).max()
                sys.exit(f"the sides disagree on {name} by {off}")
    print(f"scores of {SHAPES} clouds of {POINTS} points, DGCNN; equal values")
    rows = {
        f"per score, {len(released)} scores as released": theirs,
        f"forward only, {len(again)} scores": plain,
        f"cached, {len(scores)} scores": ours,
    }
    for name, seconds in rows.items():
        print(f"{name:36}{seconds:8.2f} s{seconds / ours:8.1f} x")
    print(f"{'  of these the scores alone':36}{closed:8.4f} s")


def compare_nearest() -> None:
    from sklearn.neighbors import NearestNeighbors

    random = np.random.default_rng(0)
    centres = random.normal(0, 2, (CLASSES, WIDTH))

    def features(rows: int) -> np.ndarray:
        near = centres[random.integers(0, CLASSES, rows)]
        return (near + random.normal(size=(rows, WIDTH))).astype(np.float32)

    train, test = features(TRAIN_ROWS), features(TEST_ROWS)

    def scikit() -> tuple[np.ndarray, np.ndarray]:
        return NearestNeighbors(n_neighbors=1, algorithm="brute").fit(train).kneighbors(test)

    theirs, (distance, index) = timed(scikit, 3)
    ours, found = timed(lambda: nearest(test, train), 3)
    if not np.array_equal(found.index, index):
        sys.exit(f"{int((found.index != index).sum())} nearest rows differ from scikit-learn's")
    exact = np.linalg.norm(test.astype(np.float64) - train[index[:, 0]], axis=1)
    print(f"nearest of {TRAIN_ROWS:,} for {TEST_ROWS:,} samples in {WIDTH} dimensions; same rows")
    for name, seconds, value in (
        ("scikit-learn", theirs, distance),
        ("ours", ours, found.distance),
    ):
        off = np.abs(value[:, 0] / exact - 1).max()
        print(f"{name:36}{seconds:8.2f} s, distances within {off:.0e}")
    print(f"{'ratio':36}{theirs / ours:8.2f}")


def main() -> None:
    from threadpoolctl import threadpool_limits

    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        compare_scores()
        compare_nearest()


if __name__ == "__main__":
    main()
