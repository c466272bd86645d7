"""How generators write: files that are equal are left alone."""

from pathlib import Path

from storage.atomic import write_bytes


def put(path: Path, data: bytes) -> None:
    """Write atomically; a file that already holds these bytes is left alone."""
    if not (path.is_file() and path.read_bytes() == data):
        write_bytes(path, data)
