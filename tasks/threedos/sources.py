"""Which shapes a raw source holds: id, class, official split, file, row (rule 1).

Enters: a folder or archive, its kind (`KINDS`) and the members that official lists name
(`tasks.threedos.lists`). Leaves: a `Listing`. No mesh is read; of h5 and npz files only the number
of rows and the labels are, in a child process. Every file ends as a shape, as a known companion
(material, texture, list) or as a refusal: nothing is passed over in silence.

ShapeNet goes by all.csv alone: 1,258 models stand under several synsets in the v2 tree.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import orjson
import polars as pl

from schemas.errors import ConfigError, RecordError, SourceError
from schemas.threedos import ShapeSettings
from storage.raw import RawFile, RawSource
from storage.unchanged import read_unchanged
from tasks.ingest.native.pool import Limits, Outcome, run_batch
from tasks.threedos.lists import SCAN_CLASSES, roles_of, sample_id

log = logging.getLogger(__name__)

MODEL = re.compile(r"(?:.*/)?(?P<synset>\d{8})/(?P<model>[\w-]+)/models/model_normalized\.obj")
MODEL_COMPANION = re.compile(
    r"(?:.*/)?\d{8}/[\w-]+/"
    r"(?:models/model_normalized\.(?:mtl|json|(?:solid\.|surface\.)?binvox)|(?:images|screenshots)/.*)"
)
MOST_LACKING = 20
"""A tree that lacks more listed models, and more than a quarter as many as it has, is a part of
ShapeNet on purpose: what lacks is said once and is no bad record."""
OFF_TREE = re.compile(
    r"(?:.*/)?(?P<class>[^/]+)/(?P<split>train|test)/(?P<stem>(?P=class)_\d{4,})\.off"
)
RESAMPLED = re.compile(r"(?:.*/)?(?P<class>[^/]+)/(?P<stem>(?P=class)_\d{4,})\.txt")
FILE_LIST = re.compile(r"filelist\.txt|modelnet10_\w+\.txt")
SCAN_BIN = re.compile(r"(?:.*/)?(?P<stem>\w+_\d{5})\.bin")
SCAN_COMPANION = re.compile(r"(?:.*/)?\w+_\d{5}(?:_indices\.bin|_part\.bin|_part\.xml|\.xml)")
SCAN_H5 = re.compile(r"(?P<folder>(?:.*/)?)(?P<part>training|test)_objectdataset\.h5")
SCAN_VARIANT = "main_split"
SNCORE_H5 = re.compile(r"(?P<stem>(?:.*/)?sncore_(?P<split>train|val|test)_\d+)_points\.h5")
OFFICIAL = {"train": "train", "training": "train", "val": "valid", "valid": "valid", "test": "test"}
FOLDER_READERS = {
    ".off": "off", ".obj": "obj", ".ply": "ply", ".stl": "stl", ".glb": "glb",
    ".csv": "points", ".xyz": "points",
}  # fmt: skip
COMPANIONS = (".mtl", ".png", ".jpg", ".jpeg", ".bmp", ".tga", ".tif", ".tiff")
MODELNET10 = (
    "bathtub", "bed", "chair", "desk", "dresser", "monitor", "night_stand", "sofa", "table",
    "toilet",
)  # fmt: skip
PROBES = {"h5": "tasks.threedos.scans:probe_h5", "npz": "tasks.threedos.scans:probe_npz"}


class Entry(NamedTuple):
    """A shape to load. `part` is the array of an h5 or npz file, `row` its row there."""

    sample_id: str
    class_: str
    split: str | None
    file: str
    reader: str
    part: str = ""
    row: int | None = None


class Refused(NamedTuple):
    record: str
    rule: str
    message: str


@dataclass(frozen=True)
class Listing:
    """What one source holds. `files` are those that entries name."""

    name: str
    root: str
    entries: tuple[Entry, ...]
    refused: tuple[Refused, ...]
    files: Mapping[str, RawFile] = field(repr=False)


class _Scan:
    """Entries and refusals as they are gathered, and the files not yet accounted for."""

    def __init__(
        self,
        name: str,
        source: RawSource,
        members: pl.DataFrame | None,
        settings: ShapeSettings,
        grid_classes: Sequence[str],
    ):
        self.name, self.source, self.settings = name, source, settings
        self.grid_classes = grid_classes
        self.files = {file.name: file for file in source.files()}
        self.members: dict[str, tuple[str, str]] = {}
        if members is not None:
            self.members = {
                shape: (class_, split)
                for shape, class_, split in members.select("sample_id", "class", "split").rows()
            }
        self.entries: list[Entry] = []
        self.refused = [Refused(s.name, "unreadable", s.reason) for s in source.skipped]
        self.seen: set[str] = set()

    def add(self, entry: Entry) -> None:
        self.seen.add(entry.file)
        self.entries.append(entry)

    def refuse(self, record: str, rule: str, message: str) -> None:
        self.seen.add(record)
        self.refused.append(Refused(record, rule, message))

    def split_of(self, shape: str) -> str | None:
        return self.members[shape][1] if shape in self.members else None

    def listing(self, expected: str, is_companion: Callable[[str], bool]) -> Listing:
        """Refuse ids that come again and files that are nothing we know."""
        first: dict[str, Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: (entry.file, entry.row or 0)):
            if entry.sample_id in first:
                message = f"{place(entry)}: {place(first[entry.sample_id])} has the same id"
                self.refused.append(Refused(entry.sample_id, "duplicate_id", message))
            else:
                first[entry.sample_id] = entry
        for name in sorted(self.files.keys() - self.seen):
            if not is_companion(name) and not roles_of(name):
                message = f"not a shape of this source; expected {expected}"
                self.refused.append(Refused(name, "unrecognised_file", message))
        if not first and not any(refused.rule != "unrecognised_file" for refused in self.refused):
            raise SourceError(
                f"no shape found in {self.source.root}: expected {expected}; name the folder or "
                f"archive that holds them, or another kind of source than {self.name}"
            )
        used = {entry.file for entry in first.values()}
        return Listing(
            self.name,
            self.source.root,
            tuple(first.values()),
            tuple(sorted(self.refused)),
            {name: self.files[name] for name in sorted(used)},
        )


def list_shapes(
    kind: str,
    source: RawSource,
    settings: ShapeSettings,
    *,
    name: str | None = None,
    members: pl.DataFrame | None = None,
    grid_classes: Sequence[str] = MODELNET10,
) -> Listing:
    """The shapes of one source. `members` are those of all lists, `name` another name than `kind`.

    `grid_classes` are the names of the labels in a file of voxel grids.
    """
    if kind not in KINDS:
        raise ConfigError(f"source kind {kind!r} is unknown; there are {', '.join(sorted(KINDS))}")
    return KINDS[kind](_Scan(name or kind, source, members, settings, grid_classes))


def place(entry: Entry) -> str:
    return entry.file if entry.row is None else f"{entry.file}#{entry.row}"


# ---------------------------------------------------------------- meshes and texts


def _list_shapenet(scan: _Scan) -> Listing:
    listed = {shape: row for shape, row in scan.members.items() if shape.startswith("shapenet/")}
    if not listed:
        raise ConfigError(
            "a shapenet source needs the official all.csv, since the tree repeats models under "
            "several synsets; put it in the lists folder or beside the synset folders"
        )
    owner = {shape.rpartition("/")[2]: shape for shape in listed}
    synsets: set[str] = set()
    for name in scan.files:
        match = MODEL.fullmatch(name)
        if match is None:
            continue
        synsets.add(match["synset"])
        shape = sample_id("shapenet", match["synset"], match["model"])
        if shape in listed:
            scan.add(Entry(shape, *listed[shape], name, "obj"))
        elif match["model"] in owner:
            scan.refuse(
                name, "other_synset", f"all.csv lists this model as {owner[match['model']]}"
            )
        else:
            scan.refuse(name, "unlisted_model", "all.csv does not list this model")
    present = {entry.sample_id for entry in scan.entries}
    lacking = {shape: synset for shape, (synset, _) in listed.items() if shape not in present}
    if len(lacking) > max(MOST_LACKING, len(present) // 4):
        log.info(
            f"  {scan.name} has {len(present)} of the {len(listed)} models that all.csv lists; the "
            "others stay in members and splits without a cloud"
        )
        lacking = {}
    absent: dict[str, int] = {}
    for shape, synset in lacking.items():
        if synset not in synsets:
            absent[synset] = absent.get(synset, 0) + 1
        else:
            scan.refuse(shape, "missing", "all.csv lists this model, the source has no file of it")
    for synset, count in absent.items():
        message = f"all.csv lists {count} models of this synset, the source has none of them"
        scan.refuse(sample_id("shapenet", synset), "missing_class", message)
    return scan.listing(
        "<synset>/<model>/models/model_normalized.obj",
        lambda name: MODEL_COMPANION.fullmatch(name) is not None,
    )


def _list_modelnet40(scan: _Scan) -> Listing:
    for name in scan.files:
        if match := OFF_TREE.fullmatch(name):
            shape = sample_id("modelnet40", match["stem"])
            scan.add(Entry(shape, match["class"], match["split"], name, "off"))
    return scan.listing("<class>/<train|test>/<class>_NNNN.off", lambda name: False)


def _list_resampled(scan: _Scan) -> Listing:
    for name in scan.files:
        if match := RESAMPLED.fullmatch(name):
            shape = sample_id("modelnet40_resampled", match["stem"])
            split = scan.split_of(shape)
            scan.add(Entry(shape, match["class"], split, name, "points"))
    return scan.listing(
        "<class>/<class>_NNNN.txt",
        lambda name: FILE_LIST.fullmatch(name.rpartition("/")[2]) is not None,
    )


def _list_folder(scan: _Scan) -> Listing:
    """`<class>/<file>`, or all files as `<split>/<class>/<file>` or `<class>/<split>/<file>`."""
    paths = {name: PurePosixPath(name) for name in scan.files}
    paths = {n: path for n, path in paths.items() if path.suffix.lower() in FOLDER_READERS}
    split_at = _split_level([path.parts[:-1] for path in paths.values()])
    for name, path in paths.items():
        folders = path.parts[:-1]
        if not folders:
            scan.refuse(name, "no_class", "the file lies in no class folder; put it into one")
            continue
        class_, split = folders[-1], None
        if split_at is not None and len(folders) < 2:
            reason = "the file lies in no class of a split; put it into <split>/<class>"
            scan.refuse(name, "no_class", reason)
            continue
        if split_at is not None:
            class_, split = folders[-3 - split_at], OFFICIAL[folders[split_at].lower()]
        shape = sample_id(scan.name, *path.with_suffix("").parts)
        scan.add(Entry(shape, class_, split, name, FOLDER_READERS[path.suffix.lower()]))
    suffixes = ", ".join(FOLDER_READERS)
    return scan.listing(
        f"<class>/<name> with one of the suffixes {suffixes}",
        lambda name: PurePosixPath(name).suffix.lower() in COMPANIONS,
    )


def _split_level(folders: Iterable[tuple[str, ...]]) -> int | None:
    """-1 or -2 if that folder of every file is called like a split; a class may be called train.

    Some stray files that lie higher up do not turn a tree of splits into one of classes.
    """
    inner = [parts[-2:] for parts in folders if parts]
    deep = [two for two in inner if len(two) == 2]
    if 2 * len(deep) <= len(inner):
        return None
    for level in (-1, -2):
        if all(two[level].lower() in OFFICIAL for two in deep):
            return level
    return None


# ---------------------------------------------------------------- files of many shapes


def _list_scanobjectnn(scan: _Scan) -> Listing:
    """The objects of .bin files, by the lists or by class folders, and the rows of h5 files."""
    for name in scan.files:
        if match := SCAN_BIN.fullmatch(name):
            shape = sample_id("scanobjectnn", match["stem"])
            class_, split = scan.members.get(shape, (PurePosixPath(name).parent.name, None))
            if class_ in SCAN_CLASSES:
                scan.add(Entry(shape, class_, split, name, "bin"))
            else:
                reason = "no list names this object and its folder is none of the 15 classes"
                scan.refuse(name, "no_class", f"{reason}; add the list main_split.txt")
    matches = _one_variant(scan)
    for name, value in _probed(scan, matches, "h5"):
        part = matches[name]["part"]
        labels = value.get("label")
        if labels is None or len(labels) != value["rows"]:
            scan.refuse(name, "label_length", f"{value['rows']} clouds, expected a label for each")
            continue
        for row, label in enumerate(labels.tolist()):
            shape = sample_id("scanobjectnn", part, f"{row:05d}")
            if 0 <= label < len(SCAN_CLASSES):
                class_ = SCAN_CLASSES[label]
                scan.add(Entry(shape, class_, OFFICIAL[part], name, "h5", "data", row))
            else:
                scan.refuse(shape, "unknown_label", f"{name}#{row}: label {label} has no class")
    return scan.listing(
        "training_objectdataset.h5 and test_objectdataset.h5, or <class>/<scene>_<object>.bin",
        lambda name: SCAN_COMPANION.fullmatch(name) is not None,
    )


def _one_variant(scan: _Scan) -> dict[str, re.Match[str]]:
    """The h5 files of one folder: `main_split` (OBJ_BG) where there are several, else the first.

    The release also holds the same objects without background and in other divisions. A folder
    with only one of the two files is completed by a folder that has only the other one.
    """
    matches = {name: match for name in scan.files if (match := SCAN_H5.fullmatch(name))}
    parts: dict[str, set[str]] = {}
    for match in matches.values():
        parts.setdefault(match["folder"], set()).add(match["part"])
    order = sorted(parts, key=lambda one: (PurePosixPath(one).name != SCAN_VARIANT, one))
    taken = order[:1]
    taken += [one for one in order[1:] if not parts[one] & parts[order[0]]][:1]
    for name, match in matches.items():
        if match["folder"] not in taken:
            message = f"the same objects are taken from {' and '.join(taken) or 'the top folder'}"
            scan.refuse(name, "other_variant", f"{message}; name this folder to take these")
    return {name: match for name, match in matches.items() if match["folder"] in taken}


def _list_sncore(scan: _Scan) -> Listing:
    matches = {name: match for name in scan.files if (match := SNCORE_H5.fullmatch(name))}
    for name, value in _probed(scan, matches, "h5"):
        match = matches[name]
        try:
            synsets, models = (
                _id_list(scan.source, _beside(scan, match["stem"], ids)) for ids in ("sids", "mids")
            )
        except RecordError as error:
            scan.refuse(name, error.rule, error.message)
            continue
        if not len(synsets) == len(models) == value["rows"]:
            message = (
                f"{value['rows']} clouds, {len(synsets)} synset ids and {len(models)} model ids"
            )
            scan.refuse(name, "list_length", f"{message}; fetch all three again")
            continue
        split = OFFICIAL[match["split"]]
        for row, (synset, model) in enumerate(zip(synsets, models, strict=True)):
            shape = sample_id("sncore", synset, model)
            scan.add(Entry(shape, synset, split, name, "h5", "data", row))
    return scan.listing("sncore_<split>_4096_points.h5 with its json lists", lambda name: False)


def _beside(scan: _Scan, stem: str, ids: str) -> str:
    for name in (f"{stem}_{ids}.json", f"{stem}_points_{ids}.json"):
        if name in scan.files:
            return name
    raise RecordError("missing_list", f"{stem}_{ids}.json is not there; put it beside the h5 file")


def _id_list(source: RawSource, name: str) -> list[str]:
    try:
        ids = orjson.loads(source.read(name))
    except orjson.JSONDecodeError as error:
        raise RecordError("bad_list", f"{name} is not JSON: {error}") from None
    if not isinstance(ids, list) or not all(isinstance(word, str) for word in ids):
        raise RecordError("bad_list", f"{name} is not a list of ids")
    return ids


def _list_voxels(scan: _Scan) -> Listing:
    classes = scan.grid_classes
    names = {name: None for name in scan.files if name.lower().endswith(".npz")}
    for name, value in _probed(scan, names, "npz"):
        stem = PurePosixPath(name).with_suffix("").parts
        for member, labels in value.items():
            part = member.removeprefix("X_")
            for row, label in enumerate(labels.tolist()):
                shape = sample_id(scan.name, *stem, part, f"{row:05d}")
                if 0 <= label < len(classes):
                    split = OFFICIAL.get(part)
                    scan.add(Entry(shape, classes[label], split, name, "npz", member, row))
                else:
                    message = f"{name}#{row}: label {label}, expected below {len(classes)}"
                    scan.refuse(shape, "unknown_label", message)
    return scan.listing("an .npz file with X_train, y_train and so on", lambda name: False)


def _probed(scan: _Scan, names: Iterable[str], reader: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the probe says of each file; a file that it cannot read is refused."""
    for name in sorted(names):
        try:
            with file_on_disk(scan.source, name, scan.settings.max_file_bytes) as path:
                (outcome,) = read_unchanged(
                    scan.source.root,
                    [scan.files[name]],
                    partial(_probe, path, reader, scan.settings),
                )
        except RecordError as error:
            scan.refuse(name, error.rule, error.message)
            continue
        if outcome.value is None:
            scan.refuse(name, outcome.rule or "", outcome.message or "")
            continue
        scan.seen.add(name)
        yield name, outcome.value


def _probe(path: Path, reader: str, settings: ShapeSettings) -> list[Outcome]:
    limits = Limits(seconds_per_item=settings.seconds_per_shape, memory_bytes=settings.memory_bytes)
    return list(run_batch(PROBES[reader], [{"path": str(path)}], limits=limits))


@contextmanager
def file_on_disk(source: RawSource, name: str, limit: int) -> Iterator[Path]:
    """The path of a file of a folder, or of a copy of an archive's; the copy is then removed."""
    if Path(source.root).is_dir():
        yield Path(source.root, name)
        return
    with TemporaryDirectory(prefix="shapes-") as folder:
        path = Path(folder, f"raw{PurePosixPath(name).suffix}")
        path.write_bytes(source.read(name, limit=limit))
        yield path


KINDS: dict[str, Callable[[_Scan], Listing]] = {
    "shapenet": _list_shapenet,
    "modelnet40": _list_modelnet40,
    "modelnet40_resampled": _list_resampled,
    "scanobjectnn": _list_scanobjectnn,
    "sncore": _list_sncore,
    "voxels": _list_voxels,
    "folder": _list_folder,
}
