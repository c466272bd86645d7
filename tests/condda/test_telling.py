"""Names of instances that tell their truth are found, and said once."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.condda import TestSettings
from tasks.condda.make_tests import planned
from tasks.condda.telling import names_tell, warn_of_telling_names
from tasks.condda.test_files import TestFile, TestLibrary
from tests.condda.small import DOMAIN, write_test
from tests.condda.test_make_tests import pool

# 24 rows, the world changes at row 12; from there every second row is of a novel class.
ROWS = range(24)
CLASSES = [(n % 3 + 1) if n < 12 or n % 2 else -1 - n % 4 // 2 for n in ROWS]
WORDS = {1: "bread", 2: "chair", 3: "apple", -1: "zebra", -2: "tulip"}


def read(folder: Path, name: Callable[[int], str], **metadata: object) -> TestFile:
    lines = [f"{name(n)},{n >= 12:d},{CLASSES[n]}\n" for n in ROWS]
    write_test(
        folder, "T", truth="id,detection,class\n" + "".join(lines), known_classes=4, **metadata
    )
    return TestLibrary(folder).load("T", "OND", DOMAIN)


def side(n: int) -> str:
    return "known_unknown_classes" if CLASSES[n] < 0 else "known_classes"


TELLING = {
    "folder": lambda n: f"{side(n)}/{n:05d}.JPEG",
    "folder below": lambda n: f"data/{side(n)}/{n:05d}/{n}.JPEG",
    "class folder": lambda n: f"{WORDS[CLASSES[n]]}/{n}.png",
    "class before a number": lambda n: f"n{CLASSES[n] + 5:04d}_{n}.JPEG",
}
SILENT = {
    "numbers": lambda n: f"img_{n}.png",
    "one folder": lambda n: f"data/{n}.png",
    "a folder each": lambda n: f"{n}/frame.png",
    "an episode of two": lambda n: f"{n // 2 if n < 12 else n % 2 * 50 + n // 4}/{n}.png",
    "no meaning": lambda n: f"{hash((n, 7)) & (1 << 64) - 1:016x}",
}


@pytest.mark.parametrize("kind", TELLING)
def test_names_that_tell(tmp_path: Path, kind: str) -> None:
    assert names_tell(read(tmp_path, TELLING[kind]))


@pytest.mark.parametrize("kind", SILENT)
def test_names_that_do_not(tmp_path: Path, kind: str) -> None:
    assert not names_tell(read(tmp_path, SILENT[kind]))


def test_names_that_hold_the_name_of_their_class(tmp_path: Path) -> None:
    words = {
        "known_class_names": ["bread", "chair", "apple"],
        "novel_class_names": {"-1": "zebra", "-2": "tulip"},
    }
    assert names_tell(read(tmp_path, lambda n: f"{n:04x}-{WORDS[CLASSES[n]].upper()}-x", **words))
    assert not names_tell(read(tmp_path, lambda n: f"{n:04x}", **words))


def test_the_operator_is_warned_once_with_the_number_of_tests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    telling, silent = tmp_path / "telling", tmp_path / "silent"
    read(telling, TELLING["folder"])
    for test in ("U", "V"):
        text = (telling / "OND" / DOMAIN / "T_single_df.csv").read_text()
        write_test(telling, test, truth=text, known_classes=4)
    write_test(telling, "W", truth="damaged")
    planned(pool(), silent, TestSettings(tests=3, rows=60, round_size=10, seed=1)).write(silent)
    with caplog.at_level(logging.WARNING):
        for folder in (silent, telling, tmp_path / "nothing"):
            warn_of_telling_names(folder)
    [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("3 tests have") and "make-tests" in said
