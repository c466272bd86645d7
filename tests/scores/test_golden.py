"""Scores of a fixed input: when one changes, its version must be raised with it.

Runs are keyed by the version of each plug-in. A formula that changes under the same version would
leave old numbers in every lake. Six digits are compared, as processors differ beyond.
"""

import hashlib

import pytest

from tasks.scores import find, names
from tests.scores import make_world

GOLDEN: dict[str, tuple[int, str]] = {
    "ash": (1, "a7152812fb0d"),
    "cosine": (1, "85a156fe166a"),
    "dice": (1, "5731c02c38e9"),
    "energy": (1, "7c58c1e203c9"),
    "entropy": (1, "593bf2369712"),
    "fdbd": (1, "e87c889916aa"),
    "gen": (1, "ee304be6cdcf"),
    "gmm": (1, "b282c51a9166"),
    "gradnorm": (1, "f22f09b93802"),
    "kl_matching": (1, "296746e14000"),
    "knn": (1, "c0eb18ffacf5"),
    "mahalanobis": (1, "e0ee68226548"),
    "mls": (1, "7881092f383e"),
    "msp": (1, "12392cf4937b"),
    "nearest": (1, "7dcaeb55578d"),
    "nnguide": (1, "a99d8bbf855a"),
    "odin_without_step": (1, "6e8684a85283"),
    "one_class_svm": (1, "1fac1fb2242c"),
    "openmax": (1, "3300bb32058e"),
    "react": (1, "089f24adbb26"),
    "residual": (1, "5d8c321d4fbd"),
    "rmd": (1, "bd3a67469df0"),
    "scale": (1, "2f2ffc9cd9d7"),
    "she": (1, "bd554a988c14"),
    "temperature": (1, "b8c8afa5e489"),
    "vim": (1, "3112a4b4db3c"),
}


def digest_of(name: str) -> str:
    world = make_world(rows=40)
    score = find(name)()
    score.fit(world.reference)
    text = ",".join(f"{value:.5e}" for value in score.score(world.test))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


OF_NETWORKS = [name for name in names() if "novelty" not in find(name).needs]


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_a_changed_formula_has_another_version(name: str) -> None:
    found = (find(name).version, digest_of(name))
    assert GOLDEN.get(name) == found, (
        f"score {name} gives other values: raise its `version` and put {found} here"
    )
