"""Agents on features of lakes that no setting was fixed on, beside 1-nearest-neighbour and Ward."""

import zipfile
from pathlib import Path

import pytest

from benchmarks.condda_agents import compared, streams
from tests.condda.test_scenarios import put_lake
from tests.shared import shared_path

NOVEL = ("automobile", "dog", "frog", "horse")


def test_the_comparison_in_short(tmp_path: Path) -> None:
    """Gaussian classes far apart: agent and yardstick find all of them."""
    put_lake(tmp_path)
    tests = [(0, test) for test in streams(tmp_path, "kowl", 0, 4)]
    agent, other = compared(tests, "clustering", told=False).rows(named=True)
    assert agent["discovery_accuracy"] >= other["discovery_accuracy"] - 0.1 > 0.3
    assert agent["k_plus_1_accuracy"] >= other["k_plus_1_accuracy"] - 0.05 > 0.5
    assert agent["missed"] == other["missed"] == 0


@pytest.mark.slow
def test_pictures_of_cifar(tmp_path: Path) -> None:
    """EfficientNet's features of six known and four novel classes, three seeds."""
    from flows import semantic
    from schemas.semantic import Config

    for name in ("cifar10_jpeg_train_first1000", "cifar10_jpeg_test"):
        archive = shared_path(f"images/cifar10/{name}.zip")
        with zipfile.ZipFile(archive) as pictures:
            for member in pictures.namelist():
                part, label, file = member.split("/")[-3:]
                if file[:4].isdecimal() and 100 <= int(file[:4]) < 160:
                    side = "novel" if label in NOVEL else "known"
                    path = tmp_path / side / part / label / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(pictures.read(member))
    sources = {side: tmp_path / side for side in ("known", "novel")}
    config = {"source": sources, "known": "known", "novel": ("novel",), "trivial_baseline": False}
    semantic.build.fn(Config(**config, lake=tmp_path / "lake", models={"backbone": {}}))
    tests = [(s, test) for s in range(3) for test in streams(tmp_path / "lake", "semantic", s, 6)]
    agent, other = compared(tests, "clustering", told=False).rows(named=True)
    print(agent, other)
    for name in ("discovery_accuracy", "full_accuracy", "k_plus_1_accuracy"):
        assert agent[name] >= other[name] - 0.03, name
    assert agent["missed"] <= other["missed"] + 0.1
    assert agent["false_alarm"] <= max(other["false_alarm"], 1 / 3)
