"""Whether the names of instances tell their truth: an agent sees them, as it needs them to load
pictures, so published tests keep theirs and the operator is warned.
"""

import logging
import re
from itertools import product
from pathlib import Path

import numpy as np

from schemas.errors import NoveltyError
from tasks.condda.domains import DOMAINS, PROTOCOLS
from tasks.condda.export import instance_rows
from tasks.condda.test_files import TestFile, TestLibrary

log = logging.getLogger(__name__)

# Shorter names of classes stand in random names by chance.
_SHORTEST_NAME = 4


def names_tell(test: TestFile) -> bool:
    """Whether most names hold their class, or what names have in common, their folders at any depth
    or all but their last number, separates novel instances from known ones."""
    rows = instance_rows(test)
    novel = (rows["role"] == "novel").to_numpy()
    if not novel.any() or novel.all():
        return False
    held = [
        len(word) >= _SHORTEST_NAME and word.lower() in name.lower()
        for name, word in zip(test.names, rows["class"], strict=True)
    ]
    if np.mean(held) > 0.5:
        return True
    paths = [name.split("/")[:-1] for name in test.names]
    depths = range(1, max(map(len, paths)) + 1)
    commons = [["/".join(path[:depth]) for path in paths] for depth in depths]
    commons.append([re.sub(r"\d+\D*$", "", name) for name in test.names])
    # What is finer than classes, or hardly stands twice, separates by chance: an episode, a name.
    most = min(rows["class"].n_unique(), len(novel) / 2)
    for common in map(np.array, commons):
        of_novel, of_known = set(common[novel]), set(common[~novel])
        if not of_novel & of_known and len(of_novel | of_known) <= most:
            return True
    return False


def warn_of_telling_names(tests: Path) -> None:
    """Warn once if names of instances tell the truth of tests that an evaluation would serve."""
    if not tests.is_dir():
        return
    library, telling = TestLibrary(tests), 0
    for protocol, domain in product(PROTOCOLS, DOMAINS):
        if domain not in library.domains(protocol):
            continue
        for test in library.test_ids(protocol, domain):
            try:
                telling += names_tell(library.load(test, protocol, domain))
            except NoveltyError:
                continue  # a session cannot be opened for it
    if telling:
        log.warning(
            f"{telling} {'tests have' if telling > 1 else 'test has'} instance names that tell an "
            "agent what is novel, such as a folder of novel classes: results mean little; "
            "novelty condda make-tests gives instances names of no meaning"
        )
