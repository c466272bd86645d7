"""Which images a raw source holds: id, class, official split, file (docs/semantic.md, 4).

Enters: a folder or archive and its name: `cifar10`, `stl10`, `imagenet`, or a name of one's own for
a folder tree; `NAME.PART` is a further source of the same data set. Leaves: a `Listing`. No image
is opened. Every file ends as an image, as a file of images, as a known companion or as a refusal;
only classes of ImageNet that no subset names, and its test images, which have no labels, are passed
over, and counted in `left_out` and `unlabelled`.

ILSVRC's val is the test set of the benchmark, so `val` of `imagenet` is test; elsewhere valid.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from schemas.errors import RecordError, SourceError
from storage.raw import RawFile, RawSource
from tasks.semantic.pictures import SUFFIXES
from tasks.semantic.records import CIFAR_CLASSES, STL_CLASSES

OFFICIAL = {
    "train": "train", "training": "train", "val": "valid", "valid": "valid", "validation": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip
IMAGENET_SPLITS = OFFICIAL | {"val": "test", "validation": "test"}
CIFAR_BATCH = re.compile(r"(?:.*/)?(?P<stem>data_batch_[1-5]|test_batch)(?P<binary>\.bin)?")
STL_PIXEL_FILE = re.compile(r"(?P<stem>(?:.*/)?(?P<split>train|test))_X\.bin")
WNID = re.compile(r"n\d{8}")
# File name and wnid in each line: Tiny ImageNet's, and that of the ILSVRC validation set.
VAL_LISTS = {
    "val_annotations.txt": re.compile(r"^(\S+)\t(n\d{8})\t", re.M),
    "LOC_val_solution.csv": re.compile(r"^(\w+),(n\d{8}) ", re.M),
}
NAME_LISTS = ("words.txt", "LOC_synset_mapping.txt")
NAME_LINE = re.compile(r"^(n\d{8})\s+([^,\r\n]+)", re.M)
COMPANIONS = {
    "batches.meta", "batches.meta.txt", "readme.html", "class_names.txt", "fold_indices.txt",
    "unlabeled_X.bin", "wnids.txt", *VAL_LISTS, *NAME_LISTS,
}  # fmt: skip
# Boxes of Tiny ImageNet, and what lies beside the images of ILSVRC.
BESIDE_IMAGENET = re.compile(
    r"(?:.*/)?(?:n\d{8}_boxes\.txt|Annotations/.*\.xml|ImageSets/.*\.txt"
    r"|LOC_(?:train_solution|sample_submission)\.csv)"
)


class Entry(NamedTuple):
    """An image in a file of its own."""

    sample_id: str
    class_: str
    class_name: str | None
    split: str | None
    file: str


class RecordFile(NamedTuple):
    """A file of many images. `labels` is the file that holds their labels, if it is another."""

    stem: str
    reader: str
    split: str
    classes: tuple[str, ...]
    file: str
    labels: str = ""


class Refused(NamedTuple):
    record: str
    rule: str
    message: str


@dataclass(frozen=True)
class Listing:
    """What one source holds. `files` are those that entries and record files name."""

    name: str
    dataset: str
    root: str
    entries: tuple[Entry, ...]
    records: tuple[RecordFile, ...]
    refused: tuple[Refused, ...]
    left_out: int = 0
    unlabelled: int = 0
    files: Mapping[str, RawFile] = field(default_factory=dict, repr=False)


class _Scan:
    """What is gathered of one source, and the files not yet accounted for."""

    def __init__(
        self,
        name: str,
        source: RawSource,
        classes: Collection[str] | None,
        class_names: Mapping[str, str],
    ):
        self.name, self.source = name, source
        self.classes, self.class_names = classes, class_names
        self.dataset = name.partition(".")[0]
        self.files = {file.name: file for file in source.files()}
        self.entries: list[Entry] = []
        self.records: list[RecordFile] = []
        self.refused = [Refused(s.name, "unreadable", s.reason) for s in source.skipped]
        self.seen: set[str] = set()
        self.left_out = self.unlabelled = 0

    def add(self, path: PurePosixPath, class_: str, name: str | None, split: str | None) -> None:
        image = "/".join((self.dataset, *path.with_suffix("").parts))
        self.seen.add(str(path))
        self.entries.append(Entry(image, class_, name, split, str(path)))

    def add_records(self, records: RecordFile) -> None:
        self.seen |= {records.file, records.labels}
        self.records.append(records)

    def refuse(self, record: str, rule: str, message: str) -> None:
        self.seen.add(record)
        self.refused.append(Refused(record, rule, message))

    def images(self) -> list[PurePosixPath]:
        paths = [PurePosixPath(name) for name in self.files if name not in self.seen]
        return [path for path in paths if path.suffix.lower() in SUFFIXES]

    def lines(self, base: str, pattern: re.Pattern[str]) -> dict[str, str]:
        """The pairs that lists of that file name hold, by the first of each pair."""
        pairs: dict[str, str] = {}
        for name in self.files:
            if name.rpartition("/")[2] == base:
                try:
                    pairs |= dict(pattern.findall(self.source.read(name).decode("latin1")))
                except RecordError as error:
                    self.refuse(name, error.rule, error.message)
        return pairs

    def listing(self, expected: str) -> Listing:
        """Refuse ids that come again and files that are nothing we know."""
        first: dict[str, Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.file):
            if entry.sample_id in first:
                message = f"{entry.file}: {first[entry.sample_id].file} has the same id"
                self.refused.append(Refused(entry.sample_id, "duplicate_id", message))
            else:
                first[entry.sample_id] = entry
        for name in sorted(self.files.keys() - self.seen):
            base = name.rpartition("/")[2]
            if base not in COMPANIONS and not BESIDE_IMAGENET.fullmatch(name):
                message = f"not an image of this source; expected {expected}"
                self.refused.append(Refused(name, "unrecognised_file", message))
        if not first and not self.records:
            raise SourceError(
                f"no image found in {self.source.root}: expected {expected}; name the folder or "
                f"archive that holds them, or another source than {self.name}"
            )
        names = {entry.file for entry in first.values()}
        names |= {name for record in self.records for name in (record.file, record.labels) if name}
        return Listing(
            self.name,
            self.dataset,
            self.source.root,
            tuple(first.values()),
            tuple(sorted(self.records)),
            tuple(sorted(self.refused)),
            self.left_out,
            self.unlabelled,
            {name: self.files[name] for name in sorted(names)},
        )


def list_images(
    name: str,
    source: RawSource,
    *,
    classes: Collection[str] | None = None,
    class_names: Mapping[str, str] | None = None,
) -> Listing:
    """The images of one source. `classes` are the wnids or names of ImageNet to read; None: all.

    `class_names` are names of wnids that a list in the source does not name.
    """
    scan = _Scan(name, source, classes, class_names or {})
    return KINDS.get(scan.dataset, _list_folder)(scan)


# ---------------------------------------------------------------- layouts


def _list_cifar(scan: _Scan) -> Listing:
    """Binary batches, python batches, or a tree of images."""
    stems: dict[str, str] = {}
    for name in sorted(scan.files, key=lambda name: (not name.endswith(".bin"), name)):
        match = CIFAR_BATCH.fullmatch(name)
        if match is None:
            continue
        stem = match["stem"]
        if stem in stems:
            message = f"{stems[stem]} is the same batch; keep one of them in the source"
            scan.refuse(name, "duplicate_id", message)
            continue
        stems[stem] = name
        reader = "cifar_binary" if match["binary"] else "cifar_python"
        split = "test" if stem == "test_batch" else "train"
        scan.add_records(RecordFile(stem, reader, split, CIFAR_CLASSES, name))
    if not stems:
        return _list_folder(scan)
    return scan.listing("data_batch_1 to 5 and test_batch, binary or python")


def _list_stl(scan: _Scan) -> Listing:
    """The binary files, or a tree of images."""
    for name in list(scan.files):
        if match := STL_PIXEL_FILE.fullmatch(name):
            labels = f"{match['stem']}_y.bin"
            if labels in scan.files:
                split = match["split"]
                scan.add_records(RecordFile(split, "stl", split, STL_CLASSES, name, labels))
            else:
                scan.refuse(name, "missing_labels", f"{labels} is not beside it")
    if not scan.records and not scan.refused:
        return _list_folder(scan)
    return scan.listing("train_X.bin, train_y.bin, test_X.bin and test_y.bin")


def _list_imagenet(scan: _Scan) -> Listing:
    """The wnid is a folder's name, the beginning of the file's, or stands in a list beside val."""
    wnids = {base: scan.lines(base, pattern) for base, pattern in VAL_LISTS.items()}
    names = dict(scan.class_names)
    for base in NAME_LISTS:
        names |= scan.lines(base, NAME_LINE)
    for path in scan.images():
        folders = path.parts[:-1]
        wnid = next((part for part in reversed(folders) if WNID.fullmatch(part)), None)
        if wnid is None and (match := re.match(r"(n\d{8})_", path.name)):
            wnid = match[1]
        if wnid is None:
            tiny, official = wnids.values()
            wnid = tiny.get(path.name) or official.get(path.stem)
        splits = [IMAGENET_SPLITS[p.lower()] for p in folders if p.lower() in IMAGENET_SPLITS]
        if wnid is None and "test" in (part.lower() for part in folders):
            scan.seen.add(str(path))
            scan.unlabelled += 1
        elif wnid is None:
            message = "no folder, file name or list (val_annotations.txt, LOC_val_solution.csv)"
            scan.refuse(str(path), "no_class", f"{message} tells its wnid")
        elif scan.classes is not None and not {wnid, names.get(wnid, wnid)} & set(scan.classes):
            scan.seen.add(str(path))
            scan.left_out += 1
        else:
            scan.add(path, wnid, names.get(wnid), splits[0] if splits else None)
    return scan.listing("<train|val>/<wnid>/<image>")


def _list_folder(scan: _Scan) -> Listing:
    """`<class>/<file>`, or most files as `<split>/<class>/<file>` or `<class>/<split>/<file>`."""
    paths = scan.images()
    level = _split_level([path.parts[:-1] for path in paths])
    for path in paths:
        folders = path.parts[:-1]
        if level is not None and not _has_split(folders, level):
            message = "most images lie in folders of splits, this one does not; move it there"
            scan.refuse(str(path), "no_split", message)
        elif not folders:
            message = "the file lies in no class folder; put it into one"
            scan.refuse(str(path), "no_class", message)
        elif level is None:
            scan.add(path, folders[-1], None, None)
        else:
            scan.add(path, folders[-3 - level], None, OFFICIAL[folders[level].lower()])
    return scan.listing(f"<class>/<name> with one of the suffixes {', '.join(SUFFIXES)}")


def _has_split(folders: tuple[str, ...], level: int) -> bool:
    return len(folders) >= 2 and folders[level].lower() in OFFICIAL


def _split_level(folders: list[tuple[str, ...]]) -> int | None:
    """-1 or -2: the folder level at which most files have the name of a split; else None."""
    for level in (-1, -2):
        if 2 * sum(_has_split(parts, level) for parts in folders) > len(folders):
            return level
    return None


KINDS: dict[str, Callable[[_Scan], Listing]] = {
    "cifar10": _list_cifar,
    "stl10": _list_stl,
    "imagenet": _list_imagenet,
}
