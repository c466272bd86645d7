"""Colour rarity against a direct count."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tasks.learning.samples import Samples
from tasks.models.colour_rarity import ColourRarity, Configuration
from tests.models.synthetic import fit, novelty


def test_score_by_hand():
    known = np.zeros((2, 4, 5, 3), np.uint8)
    known[:, 3] = 255
    seen = Samples(["a", "b"], None, {"images": known})
    model = ColourRarity(Configuration(bits=1, share=0.2, item_bar_rows=1))
    fit(model, seen)
    # The white row is cut off: 30 black pixels, 8 colours.
    assert model.counts.tolist() == [30, 0, 0, 0, 0, 0, 0, 0]
    new = np.zeros((2, 4, 5, 3), np.uint8)
    new[1, 0, :2, 0] = 200
    scores = novelty(model, Samples(["c", "d"], None, {"images": new}))
    common, unseen = -np.log(31 / 38), -np.log(1 / 38)
    np.testing.assert_allclose(scores, [common, (2 * unseen + common) / 3])


@pytest.mark.slow
def test_novel_objects_of_the_sample_are_found():
    from tasks.sample.blockworld import draw
    from tasks.sample.novelcraft import NOVEL_BLOCKS, play

    def frames(name: str, episodes: range) -> np.ndarray:
        """All frames of `normal`, else those with at least 1 % of novel pixels."""
        kept = []
        for frame in (f for episode in episodes for f in play(0, name, episode)[:-1]):
            picture = draw(frame.view())
            rest = {c: b for c, b in frame.cells.items() if b != NOVEL_BLOCKS.get(name)}
            without = draw(replace(frame, cells=rest).view())
            if name == "normal" or (picture != without).any(2).mean() >= 0.01:
                kept.append(picture)
        return np.stack(kept)

    def samples(images: np.ndarray) -> Samples:
        return Samples([str(i) for i in range(len(images))], None, {"images": images})

    model = ColourRarity("small")
    model.fit(samples(frames("normal", range(4))), device="cpu")
    normal = frames("normal", range(4, 6))
    novel = np.concatenate([frames(n, range(2)) for n in ("item_pumpkin", "item_bookshelf")])
    scores = novelty(model, samples(np.concatenate([normal, novel])))
    assert roc_auc_score(np.arange(len(scores)) >= len(normal), scores) >= 0.8
