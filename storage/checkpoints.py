"""Checkpoints of unfinished shards: no manifest names them, so each carries its own SHA-256."""

import hashlib
from pathlib import Path

from schemas.errors import LakeError
from storage.atomic import write_bytes


def write_checkpoint(path: Path, data: bytes) -> None:
    """Replace `path` atomically."""
    write_bytes(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def read_checkpoint(path: Path) -> bytes:
    """What was written there; damage is a LakeError that names the file and its cure."""
    digest, _, data = path.read_bytes().partition(b"\n")
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise damaged_checkpoint(path)
    return data


def damaged_checkpoint(path: Path) -> LakeError:
    return LakeError(
        f"{path} is damaged: it does not fit its own sha256; delete {path.parent} and run the same "
        "command again, which begins this shard anew"
    )
