"""Pictures and clouds of generated tests by instance id: written beside the tests, served signed.

Writing: the lake's own table of pictures or clouds in, `<tests>/media/<test>/<instance>.png` or
`.npy` out. Pixels and points are encoded anew, so nothing but them is in a file.

Serving: an agent asks for links to what its session was served, in the order of serving. A link has
an HMAC of session, test, instance and the time until which it holds, under a key of this process.
Whoever follows it gets the file only while the session is open and if its round was served.
"""

import hashlib
import hmac
import io
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from schemas.errors import ConfigError, LakeError, SourceError
from schemas.tables import PLAIN
from storage.atomic import write_bytes
from storage.tables import current_version
from tasks.condda.commands import refused
from tasks.condda.harness import Harness
from tasks.condda.session import lenient_metadata, round_rows, round_size

MEDIA = "media"
TYPES = {".png": "image/png", ".npy": "application/octet-stream"}
LIFETIME = 600
"""Seconds that a link holds."""


# ---------------------------------------------------------------- written


def _picture(row: Mapping[str, Any]) -> bytes:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(row["bytes"], np.uint8), cv2.IMREAD_COLOR)
    done, data = cv2.imencode(".png", pixels) if pixels is not None else (False, None)
    if not done or data is None:
        raise SourceError(f"picture of sample {row['sample_id']!r} cannot be decoded")
    return data.tobytes()


def _cloud(row: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    points = np.array(row["points"], np.float32).reshape(-1, 3)[: row["count"]]
    np.save(buffer, points, allow_pickle=False)
    return buffer.getvalue()


@dataclass(frozen=True)
class Table:
    """Where a benchmark's lake has what its samples look like."""

    name: str
    columns: Mapping[str, str]
    """Columns by the name that `encode` reads them under."""
    suffix: str
    encode: Callable[[Mapping[str, Any]], bytes]


TABLES = {
    "semantic": Table("pictures", {"sample_id": "sample_id", "bytes": "data"}, ".png", _picture),
    "novelcraft": Table("images", {"sample_id": "frame_id", "bytes": "png"}, ".png", _picture),
    "threedos": Table(
        "point_clouds", {name: name for name in ("sample_id", "points", "count")}, ".npy", _cloud
    ),
}


class MediaWriter:
    """Writes the media of one test after the other; says at once if a lake has none."""

    def __init__(self, lake: Path, benchmark: str, out: Path) -> None:
        if benchmark not in TABLES:
            raise ConfigError(
                f"the lake has no pictures or clouds of {benchmark}; --media works for "
                f"{', '.join(TABLES)}"
            )
        self.table, self.out = TABLES[benchmark], Path(out)
        try:
            files = current_version(lake, benchmark, self.table.name).files
        except LakeError as error:
            raise ConfigError(f"--media needs the table {self.table.name}: {error}") from None
        chosen = [pl.col(column).alias(name) for name, column in self.table.columns.items()]
        self.rows = pl.scan_parquet(files).select(chosen)

    def write(self, test: str, truth: pl.DataFrame) -> None:
        """The media of a test's instances; a sample that is shown in another view has none."""
        if (truth["view"] != PLAIN).any():
            raise ConfigError(
                "the lake has no media of transformed views; leave out the scenarios nuisance and "
                "disturbed, or --media"
            )
        names = dict(truth.select("sample_id", "instance_id").iter_rows())
        wanted = pl.col("sample_id").is_in(pl.Series(list(names), dtype=pl.String).implode())
        found = self.rows.filter(wanted).collect()
        lacking = set(names) - set(found["sample_id"])
        if lacking:
            raise SourceError(f"sample {min(lacking)!r} is not in the table {self.table.name}")
        for row in found.iter_rows(named=True):
            path = self.out / MEDIA / test / f"{names[row['sample_id']]}{self.table.suffix}"
            write_bytes(path, self.table.encode(row))


# ---------------------------------------------------------------- served


class MediaLinks:
    """Links to the media of served instances, and what they lead to."""

    def __init__(
        self, harness: Harness, key: bytes | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.harness, self.clock = harness, clock
        self.key = key or secrets.token_bytes(32)

    def served(self, session: str, test: str) -> Sequence[str]:
        """Instances of the rounds that the session was served, in order."""
        self.harness.resume_test(session_id=session, test_id=test)  # refused if it has ended
        with self.harness.state(session) as state:
            rounds = sorted(state.test(test).served)
            file = self.harness.library.load(test, state.protocol, state.domain)
            size = round_size(lenient_metadata(state, file), test)
        return [name for number in rounds for name in file.names[round_rows(file, number, size)]]

    def links(self, session: str, test: str) -> dict[str, Any]:
        """A link for each served instance that has a file; all hold until `expires`."""
        expires = int(self.clock()) + LIFETIME
        files = self._files(test)
        return {
            "expires": expires,
            "links": [
                {
                    "instance_id": name,
                    "type": TYPES[files[name].suffix],
                    "path": f"{name}?expires={expires}&signature="
                    + self._signature(session, test, name, expires),
                }
                for name in self.served(session, test)
                if name in files
            ],
        }

    def read(
        self, session: str, test: str, instance: str, expires: int, signature: str
    ) -> tuple[bytes, str]:
        """Bytes and media type of what a link leads to."""
        right = self._signature(session, test, instance, expires)
        if not hmac.compare_digest(right.encode(), signature.encode()):
            raise refused("LinkInvalid", "this link was not given out here")
        if self.clock() > expires:
            raise refused("LinkExpired", "this link has expired; ask for a new one")
        file = self._files(test).get(instance)
        if instance not in self.served(session, test) or file is None:
            raise refused("result_file_not_found", "there is no such file")
        return file.read_bytes(), TYPES[file.suffix]

    def _files(self, test: str) -> dict[str, Path]:
        """Media of a test by instance id; ids are looked up, never joined to a path."""
        folders = self.harness.library.root / MEDIA
        names = {path.name: path for path in folders.iterdir()} if folders.is_dir() else {}
        if test not in names:
            return {}
        return {path.stem: path for path in names[test].iterdir() if path.suffix in TYPES}

    def _signature(self, session: str, test: str, instance: str, expires: int) -> str:
        text = "\n".join((session, test, instance, str(expires)))
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()
