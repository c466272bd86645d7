"""What stages that train share: weights by content, a crash as a sentence."""

import os
import signal

import pytest

from schemas.config import Settings
from schemas.errors import NativeError, SourceError
from storage.pieces import Part
from tasks.engine.stage import Build, Produced, Shard, stage
from tasks.learning.training import weights_file
from tests.toy import READINGS


def test_weights_count_by_content(tmp_path):
    path = tmp_path / "w.pth"
    path.write_bytes(b"one")
    first = weights_file(path)
    path.write_bytes(b"two")
    assert weights_file(path).digest != first.digest
    with pytest.raises(SourceError, match="does not exist"):
        weights_file(tmp_path / "none.pth")


@stage(writes=(READINGS,), apart=True)
def dies(shard: Shard, settings: Settings) -> Produced:
    """Ends like a crash in native code."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return Produced({}, 0)


def test_a_crash_in_training_is_a_sentence_and_not_the_end_of_the_process(tmp_path):
    with pytest.raises(NativeError, match="x: its process died"):
        with Build("toy", tmp_path) as build:
            build.run(dies, [Shard("x")], Settings())


def test_parts_can_be_any_file(tmp_path):
    part = Part(tmp_path / "m", "0" * 64, 0, 3, "model.safetensors", "s", "toy/train/k")
    assert part.as_input().piece == "toy/train/k"
