"""Tests of tasks.kowl; here the nine real lists, read once per module by a fixture."""

from tasks.kowl.lists import ListRead, Release, read_release
from tasks.kowl.policies import KINETICS
from tests.shared import shared_path

ORDER = [release.name for release in KINETICS]


def shared_releases() -> list[Release]:
    """The declared releases with the K400 train list that could be had, which is not complete."""
    k400, *later = KINETICS
    files = {**k400.files, "train": ("kinetics400_train_partial.csv.gz",)}
    return [k400.model_copy(update={"files": files}), *later]


def read_shared_releases() -> list[ListRead]:
    return [
        read_release(release, lambda name: shared_path(f"kinetics/{name}").read_bytes())
        for release in shared_releases()
    ]
