"""Test files of the published layout: out of a data directory, into immutable `TestFile`s.

`<root>/<PROTOCOL>/<domain>/` holds `test_ids.csv`, `<test>_single_df.csv` (ground truth) and
`<test>_metadata.json` (CONDDA rule 3). A test id is looked up in the listing of a folder and
never joined to a path, so no id can point outside it. Files are read when first asked for and again
when their size or modification time changed.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import polars as pl

from schemas.errors import ChangedSource, SourceError
from schemas.tables import PLAIN
from tasks.condda.domains import DOMAINS, PROTOCOLS, RED_LIGHT, Domain, domain_named

TRUTH = "_single_df.csv"
METADATA = "_metadata.json"
FEATURES = "features"
# Characters that do not make an instance id: a row of nothing else is dropped, as published.
_BLANK = "\n\t\"',."
# Characters that may stand around a value and are no part of it.
CELL_EDGES = " \"'"
_Content = TypeVar("_Content")


def protocol_name(protocol: str, domain: str, test: str) -> str:
    """A test as a protocol of the shared tables."""
    return f"{protocol}/{domain}/{test}"


def features_file(test: str) -> str:
    """Where the features of a test are, below the folder of tests."""
    return str(PurePosixPath(FEATURES) / f"{test}.npz")


def _is_whole(value: object) -> bool:
    """A whole number, which older files have as text."""
    if isinstance(value, str):
        return value.strip().removeprefix("-").isdecimal()
    return isinstance(value, int) and not isinstance(value, bool)


_WHOLE = ("a whole number", _is_whole)
_METADATA_TYPES: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("round_size", "known_classes", "nonnovel_classes"), _WHOLE),
    **dict.fromkeys(
        ("feedback_max_ids", "max_detection_feedback_ids", "max_novel_classes"), _WHOLE
    ),
    RED_LIGHT: ("an instance id", lambda value: isinstance(value, str) or _is_whole(value)),
    "feedback_constrained": ("true or false", lambda value: isinstance(value, bool)),
    "known_class_names": ("a list of names", lambda value: isinstance(value, list)),
    "novel_class_names": ("names by label", lambda value: isinstance(value, dict)),
}


@dataclass(frozen=True)
class TestFile:
    """One test: instance ids in the order of serving, their ground truth, the test's metadata."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    test_id: str
    protocol: str
    domain: Domain
    ids: tuple[str, ...]
    truth: pl.DataFrame
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The test as a protocol of the shared tables."""
        return protocol_name(self.protocol, self.domain.name, self.test_id)

    @property
    def red_light(self) -> str | None:
        """Name of the instance with which the world changes; public files have numbers too."""
        given = self.metadata.get(RED_LIGHT)
        return None if given is None else str(given).strip(CELL_EDGES)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Ids without the blanks and quotes that they may be served with: what is compared."""
        return tuple(name.strip(CELL_EDGES) for name in self.ids)

    @cached_property
    def labels(self) -> np.ndarray:
        """Class of each row, int64."""
        return self.truth[self.domain.label].to_numpy()

    @property
    def disturbed(self) -> np.ndarray:
        """Rows that are shown in another view than their samples', bool."""
        if "view" not in self.truth.columns:
            return np.zeros(len(self.ids), bool)
        return (self.truth["view"].fill_null(PLAIN) != PLAIN).to_numpy()

    def rows(self, ids: Sequence[str]) -> list[int]:
        """Row of each of `ids`, -1 where the test has no such instance."""
        row_of = self._row_of
        return [row_of.get(name.strip(CELL_EDGES), -1) for name in ids]

    @cached_property
    def _row_of(self) -> Mapping[str, int]:
        """Row of each name; the first one of a name that stands twice."""
        return {name: row for row, name in reversed(list(enumerate(self.names)))}


@dataclass(frozen=True)
class _Folder:
    """Files of a domain by test; of a folder that is not there, none."""

    stamp: int = 0
    truth: Mapping[str, Path] = field(default_factory=dict)
    metadata: Mapping[str, Path] = field(default_factory=dict)
    test_ids: Path | None = None


class TestLibrary:
    """All tests below one data directory; threads that ask at once may each read a new file."""

    __test__ = False

    def __init__(self, root: Path):
        if not Path(root).is_dir():
            raise SourceError(f"test data {root} is not a folder; name the one that holds OND/")
        self.root = Path(root)
        self._folders: dict[str, _Folder] = {}
        self._tests: dict[Path, tuple[tuple[int, ...], TestFile]] = {}

    def protocols(self) -> list[str]:
        """Protocols that have a folder, sorted."""
        return sorted(_folders(str(self.root)))

    def domains(self, protocol: str) -> list[str]:
        """Domains of a protocol, sorted; none if there is no such protocol."""
        folder = _folders(str(self.root)).get(protocol)
        return [] if folder is None else sorted(_folders(folder))

    def test_ids(self, protocol: str, domain: str) -> list[str]:
        """Tests offered: what `test_ids.csv` lists, else every test with ground truth."""
        folder = self._offering(protocol, domain)
        if folder.test_ids is None:
            return sorted(folder.truth)
        lines = _text(folder.test_ids, "utf-8-sig").splitlines()
        return [name for line in lines if (name := line.strip(CELL_EDGES + ","))]

    def test_list(self, protocol: str, domain: str) -> bytes:
        """The same as a file: `test_ids.csv` byte for byte, else one id a line."""
        folder = self._offering(protocol, domain)
        if folder.test_ids is None:
            return "".join(f"{test}\n" for test in sorted(folder.truth)).encode()
        return _read(folder.test_ids, Path.read_bytes)

    def _offering(self, protocol: str, domain: str) -> _Folder:
        if domain not in self.domains(protocol):
            raise SourceError(f"domain {domain} for {protocol} not configured")
        return self._folder(protocol, domain)

    def has_tests(self) -> bool:
        """Whether there is any test that a session can be opened for."""
        return any(self._folder(*place).truth for place in product(PROTOCOLS, DOMAINS))

    def has_metadata(self, test_id: str, protocol: str, domain: str) -> bool:
        """Whether the test has a metadata file."""
        return test_id in self._folder(protocol, domain).metadata

    def has_truth(self, test_id: str, protocol: str, domain: str) -> bool:
        """Whether the test has a ground-truth file."""
        return test_id in self._folder(protocol, domain).truth

    def load(self, test_id: str, protocol: str, domain: str) -> TestFile:
        """Read a test, or give the one read before if its two files are the same still."""
        folder = self._folder(protocol, domain)
        if test_id not in folder.truth or test_id not in folder.metadata:
            raise SourceError(
                f"test {test_id!r} has no ground truth and metadata below {protocol}/{domain}"
            )
        truth, metadata = folder.truth[test_id], folder.metadata[test_id]
        stamp = _stamp(truth) + _stamp(metadata)
        known = self._tests.get(truth)
        if known is not None and known[0] == stamp:
            return known[1]
        test = _read_test(test_id, protocol, domain_named(domain), truth, metadata)
        self._tests[truth] = (stamp, test)
        return test

    def _folder(self, protocol: str, domain: str) -> _Folder:
        parent = _folders(str(self.root)).get(protocol)
        path = None if parent is None else _folders(parent).get(domain)
        if path is None:
            return _Folder()
        stamp = os.stat(path).st_mtime_ns
        known = self._folders.get(path)
        if known is None or known.stamp != stamp:
            known = self._folders[path] = _list_folder(path, stamp)
        return known


def _folders(path: str) -> dict[str, str]:
    with os.scandir(path) as entries:
        return {entry.name: entry.path for entry in entries if entry.is_dir()}


def _list_folder(path: str, stamp: int) -> _Folder:
    with os.scandir(path) as entries:
        files = {entry.name: Path(entry.path) for entry in entries if entry.is_file()}

    def ending(suffix: str) -> dict[str, Path]:
        return {
            name.removesuffix(suffix): file
            for name, file in files.items()
            if name.endswith(suffix) and name != suffix
        }

    return _Folder(stamp, ending(TRUTH), ending(METADATA), files.get("test_ids.csv"))


def _read(path: Path, reader: Callable[[Path], _Content]) -> _Content:
    try:
        return reader(path)
    except OSError as error:
        raise ChangedSource(str(path), f"cannot be read: {error.strerror}") from error


def _stamp(path: Path) -> tuple[int, int]:
    state = _read(path, os.stat)
    return state.st_mtime_ns, state.st_size


def _text(path: Path, encoding: str) -> str:
    try:
        # Line ends stay: a quoted text may hold one, the csv reader deals with them.
        return _read(path, Path.read_bytes).decode(encoding)
    except UnicodeError as error:
        raise SourceError(f"{path} is not {encoding} text: {error}") from error


def _read_test(
    test_id: str, protocol: str, domain: Domain, truth: Path, metadata: Path
) -> TestFile:
    try:
        settings = json.loads(_text(metadata, "utf-8-sig"))
    except json.JSONDecodeError as error:
        raise SourceError(f"{metadata} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise SourceError(f"{metadata} holds no JSON object, expected keys such as round_size")
    for key, value in settings.items():
        if (kind := _METADATA_TYPES.get(key)) and not kind[1](value):
            raise SourceError(f"{metadata}: {key} is {value!r}, expected {kind[0]}")
    ids, frame = _read_truth(truth, domain)
    return TestFile(test_id, protocol, domain, ids, frame, MappingProxyType(settings))


def _read_truth(path: Path, domain: Domain) -> tuple[tuple[str, ...], pl.DataFrame]:
    encoding = "utf-8-sig" if domain.encoding == "utf-8" else domain.encoding
    lines = io.StringIO(_text(path, encoding), newline="")
    try:
        rows = list(csv.reader(lines, delimiter=",", quotechar=domain.quotechar))[1:]
    except csv.Error as error:
        raise SourceError(f"{path} is not CSV: {error}") from error
    rows = [row for row in rows if row and row[0].strip(_BLANK) != ""]
    width = min(max((len(row) for row in rows), default=domain.required), len(domain.columns))
    short = next((number for number, row in enumerate(rows) if len(row) < domain.required), None)
    if short is not None:
        raise SourceError(
            f"{path}: instance {rows[short][0]!r} has {len(rows[short])} columns, "
            f"{domain.name} needs at least {domain.required}"
        )
    ids = tuple(row[0] for row in rows)
    cells = [[*row[:width], *[None] * (width - len(row))] for row in rows]
    schema = dict.fromkeys(domain.columns[:width], pl.String)
    truth = pl.DataFrame(cells, schema, orient="row")
    values = [name for name in truth.columns[1:] if name not in domain.verbatim]
    truth = truth.with_columns(pl.col(values).str.strip_chars(CELL_EDGES))
    numbers = [name for name in domain.integers if name in truth.columns]
    return ids, truth.with_columns(_integers(truth[name], path) for name in numbers)


def _integers(cells: pl.Series, path: Path) -> pl.Series:
    numbers = cells.cast(pl.Float64, strict=False)
    whole = numbers.is_finite().fill_null(False) & (numbers == numbers.round()).fill_null(False)
    if not whole.all():
        row = int((~whole).arg_max() or 0)
        wrong = f"{cells.name} of row {row} is {cells[row]!r}"
        raise SourceError(f"{path}: {wrong}, expected a whole number")
    return numbers.cast(pl.Int64)
