"""Official lists of 3DOS: files of a folder become members, one row per listed shape, and rejects.

A shape's id is `<data set>/<name inside it>`, the same whether a list, a mesh or an h5 row gave it:

- `shapenet/<synset>/<model>`          sample_id("shapenet" or "sncore", synset, model)
- `modelnet40/<class>_<NNNN>`          sample_id("modelnet40" or "modelnet40_resampled", stem)
- `scanobjectnn/<scene>_<object>`      sample_id("scanobjectnn", stem of the .bin)
- `scanobjectnn/training/<row:05d>`    sample_id("scanobjectnn", "training" or "test", row of h5)
  (the h5 files name no object and lack 12 of the listed ones, so their rows cannot be matched)
- `<source>/<parts...>`                any other source, such as a folder of meshes

Files are found by name (`LIST_FILES`), wherever they lie, plain or gzip. Each line becomes a member
or a reject.
ShapeNet's all.csv alone says which synset a model belongs to: 1,258 models stand under several in
the v2 tree, and a model listed twice would leak from train into test
(docs/threedos.md, rules 1 to 3).
"""

import gzip
import re
import zlib
from collections.abc import Callable, Collection, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import polars as pl

from schemas.errors import RecordError, SourceError
from schemas.table import REJECTED
from schemas.threedos import ListSettings
from storage.raw import READ_LIMIT, RawSource

DATASETS = {"sncore": "shapenet", "modelnet40_resampled": "modelnet40"}


def sample_id(source: str, *parts: str) -> str:
    """The id of a shape; forms of the same data set (`DATASETS`) give the same id."""
    return "/".join((DATASETS.get(source, source), *parts))


MEMBERS = pl.Schema(
    {
        "source": pl.String,
        "sample_id": pl.String,
        "class": pl.String,
        "class_name": pl.String,
        "split": pl.String,
    }
)
SPLITS = {"train": "train", "val": "valid", "valid": "valid", "validation": "valid", "test": "test"}
SCAN_CLASSES = (
    "bag", "bin", "box", "cabinet", "chair", "desk", "display", "door",
    "shelf", "table", "bed", "pillow", "sink", "sofa", "toilet",
)  # fmt: skip
SNCORE_FILES = {
    f"sncore_{split}_{ids}": rf"sncore_{split}_\d+_(points_)?{ids}\.json"
    for split in ("train", "val", "test")
    for ids in ("sids", "mids")
}
LIST_FILES = {
    "shapenet_all": r"(shapenet_)?(all|split)\.csv",
    "shapenet_names": r"shapenet_synset_dict(_v2)?\.json",
    "shapenet_taxonomy": r"(shapenet_)?taxonomy\.json",
    **SNCORE_FILES,
    "modelnet40_train": r"modelnet40_train\.txt",
    "modelnet40_test": r"modelnet40_test\.txt",
    "modelnet40_names": r"modelnet40_shape_names\.txt",
    "scan_main_split": r"(scanobjectnn_)?(main_split|split_new)\.txt",
    **{f"scan_split{n}": rf"(scanobjectnn_)?split{n}\.txt" for n in range(1, 5)},
    "scan_labels": r"(scanobjectnn_)?object_labels\.txt",
    "scan_names": r"(scanobjectnn_)?shape_names_ext\.txt",
}
NAMES_ONLY = (
    "shapenet_names", "shapenet_taxonomy", "modelnet40_names", "scan_labels", "scan_names",
)  # fmt: skip


class ListsRead(NamedTuple):
    """`absent` are the members left out by `missing_models`; `missing` says which lists lack."""

    members: pl.DataFrame
    absent: pl.DataFrame
    rejects: pl.DataFrame
    missing: tuple[str, ...]


Rule = tuple[str, pl.Expr, str]
Judged = tuple[pl.DataFrame, pl.DataFrame]
"""Good rows, rejects."""
Reader = tuple[tuple[str, ...], tuple[str, ...], Callable[["_Lists", ListSettings], Judged]]
LISTED = ("shapenet", "modelnet40", "scanobjectnn")
"""Data sets that have lists."""


def roles_of(name: str) -> list[str]:
    """What a file of that name may be, of `LIST_FILES`."""
    base = name.rpartition("/")[2].removesuffix(".gz")
    return [role for role, pattern in LIST_FILES.items() if re.fullmatch(pattern, base)]


def find_lists(names: Iterable[str], datasets: Collection[str] = LISTED) -> dict[str, str]:
    """Role of `LIST_FILES` to the file that has it; two files for one role are refused."""
    files: dict[str, str] = {}
    for name in sorted(names):
        for role in roles_of(name):
            if _dataset(role) not in datasets:
                continue
            if role in files:
                raise SourceError(
                    f"lists: both {files[role]} and {name} may be the list {role}; "
                    "name a folder that holds one of them"
                )
            files[role] = name
    return files


def listed_datasets(files: dict[str, str]) -> set[str]:
    """Data sets of which `find_lists` found something that says who is a member."""
    return {_dataset(role) for role in files if role not in NAMES_ONLY}


def _dataset(role: str) -> str:
    start = role.partition("_")[0]
    return {"sncore": "shapenet", "scan": "scanobjectnn"}.get(start, start)


def read_lists(
    source: RawSource, settings: ListSettings, datasets: Collection[str] = LISTED
) -> ListsRead:
    """Members of every one of the data sets whose lists are there; at least one must be."""
    files = find_lists((file.name for file in source.files(digests=False)), datasets)
    lists = _Lists(source, files)
    parts: list[Judged] = []
    missing: list[str] = []
    readers = _readers(files, settings)
    for required, optional, reader in (readers[name] for name in LISTED if name in datasets):
        lacking = [role for role in required if role not in files]
        if lacking and len(lacking) < len(required):
            names = ", ".join(files[role] for role in required if role in files)
            raise SourceError(
                f"lists in {source.root}: found {names} but no {', '.join(map(_title, lacking))}; "
                "add it, since half of a data set's lists makes no split"
            )
        missing += [_title(role) for role in (*lacking, *optional) if role not in files]
        if not lacking:
            parts.append(reader(lists, settings))
    if not parts:
        raise SourceError(f"no list in {source.root}; looked for {', '.join(missing)}")
    members = pl.concat([part[0] for part in parts]).sort("sample_id")
    rejects = [part[1] for part in parts]
    absent = members.clear()
    if settings.missing_models and "shapenet" in listed_datasets(files):
        gone, bad = _read_missing(lists, settings.missing_models, members)
        absent = members.join(gone, on="sample_id", how="semi", maintain_order="left")
        members = members.join(gone, on="sample_id", how="anti", maintain_order="left")
        rejects.append(bad)
    return ListsRead(members, absent, pl.concat(rejects), tuple(missing))


def keep_present(
    members: pl.DataFrame, present: pl.Series, source: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Members without those of `source` whose id is not in `present`, and the ones left out."""
    is_present = pl.col("sample_id").is_in(present.unique().implode())
    keep = (pl.col("source") != source) | is_present
    return members.filter(keep), members.filter(~keep)


def shapenet_models(names: pl.Series) -> pl.Series:
    """Ids of the models in file names `.../<synset>/<model>/...` or `<synset>-<model>.npy`.

    Other names are passed over: a tree also holds lists, textures and licences.
    """
    parts = names.str.extract_groups(r"(?:^|/)(\d{8})[/-]([\w-]+)(?:/|\.\w+$|$)").struct
    ids = pl.select(_ids("shapenet", parts.field("1"), parts.field("2"))).to_series()
    return ids.drop_nulls().unique().sort()


def _readers(files: dict[str, str], settings: ListSettings) -> dict[str, Reader]:
    """For each data set: the lists it needs, those it may have, and what reads them."""
    listed = settings.shapenet_list
    if listed == "auto":
        if "shapenet_all" in files and not files.keys().isdisjoint(SNCORE_FILES):
            raise SourceError(
                f"lists: both {files['shapenet_all']} and json files of sncore list ShapeNet; "
                "choose with shapenet_list: all.csv or sncore"
            )
        listed = "all.csv" if files.keys().isdisjoint(SNCORE_FILES) else "sncore"
    shapenet: Reader = (
        (tuple(SNCORE_FILES), ("shapenet_names",), _read_sncore)
        if listed == "sncore"
        else (("shapenet_all",), ("shapenet_names",), _read_all_csv)
    )
    scan = f"scan_{settings.scan_split}"
    modelnet = ("modelnet40_train", "modelnet40_test"), ("modelnet40_names",), _read_modelnet
    scans = (scan,), ("scan_labels", "scan_names"), _read_scan
    return {"shapenet": shapenet, "modelnet40": modelnet, "scanobjectnn": scans}


# ---------------------------------------------------------------- ShapeNet


def _read_all_csv(lists: "_Lists", settings: ListSettings) -> Judged:
    fields = _csv_fields(lists.lines("shapenet_all"), ("synsetId", "modelId", "split"))
    return _shapenet_members(lists, fields)


def _read_sncore(lists: "_Lists", settings: ListSettings) -> Judged:
    parts = []
    for split in ("train", "val", "test"):
        sids, mids = (lists.json(f"sncore_{split}_{ids}") for ids in ("sids", "mids"))
        name = lists.files[f"sncore_{split}_sids"]
        if not isinstance(sids, list) or not isinstance(mids, list) or len(sids) != len(mids):
            raise SourceError(
                f"list {name}: expected as many synset ids as its mids.json has model ids; "
                "fetch both again"
            )
        fields = pl.DataFrame(
            {"synsetId": [str(s) for s in sids], "modelId": [str(m) for m in mids]}
        ).with_row_index("number")
        parts.append(fields.with_columns(pl.lit(split).alias("split"), pl.lit(name).alias("file")))
    fields = pl.concat(parts).with_columns(
        pl.concat_str("synsetId", "modelId", separator=",").alias("line")
    )
    return _shapenet_members(lists, fields)


def _shapenet_members(lists: "_Lists", fields: pl.DataFrame) -> Judged:
    parsed = fields.with_columns(
        # Tables saved as numbers have lost the leading zero.
        pl.col("synsetId").str.zfill(8),
        pl.col("split").str.to_lowercase().replace_strict(SPLITS, default=None),
    )
    rules: list[Rule] = [
        *_model_rules(),
        ("split_allowed", pl.col("split").is_null(), f"split is none of {', '.join(SPLITS)}"),
    ]
    good, rejects = _judged(parsed, rules, "modelId", "this model, maybe under another synset")
    names = _synset_names(lists)
    class_name = pl.col("synsetId").replace_strict(names, default=None, return_dtype=pl.String)
    good = good.with_columns(
        _ids("shapenet", "synsetId", "modelId"), pl.col("synsetId").alias("class")
    )
    return _members("shapenet", good, class_name), rejects


def _model_rules() -> list[Rule]:
    synset, model = pl.col("synsetId"), pl.col("modelId")
    return [
        ("synset_form", ~synset.str.contains(r"^\d{8}$"), "synsetId is not 8 digits"),
        ("model_form", ~model.str.contains(r"^[\w-]+$"), "modelId is not letters, digits, - or _"),
    ]


def _synset_names(lists: "_Lists") -> dict[str, str]:
    """Synset to name: the list of PyTorch3D, else ShapeNet's taxonomy, else nothing."""
    role = next((r for r in ("shapenet_names", "shapenet_taxonomy") if r in lists.files), None)
    if role is None:
        return {}
    names = lists.json(role)
    try:
        if role == "shapenet_taxonomy":
            names = {row["synsetId"]: row["name"] for row in names}
        return {synset: name.split(",")[0] for synset, name in names.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise SourceError(
            f"list {lists.files[role]} does not give each synset a name; fetch it again"
        ) from error


def _read_missing(lists: "_Lists", name: str, members: pl.DataFrame) -> Judged:
    """Ids of the models that have no file; a line that names no listed model is a reject."""
    path = missing_file(lists.source, name)
    data = lists.read(name) if path is None else _unpacked(_on_disk(path), name)
    fields = _csv_fields(_numbered(data, name), ("synsetId", "modelId"))
    parsed = fields.with_columns(pl.col("synsetId").str.zfill(8)).with_columns(
        _ids("shapenet", "synsetId", "modelId")
    )
    listed = pl.col("sample_id").is_in(members["sample_id"].implode())
    rules = [*_model_rules(), ("model_listed", ~listed, "no list has this model")]
    good, rejects = _judged(parsed, rules, "sample_id", "this model")
    return good.select("sample_id"), rejects


# ---------------------------------------------------------------- ModelNet40 and ScanObjectNN


def _read_modelnet(lists: "_Lists", settings: ListSettings) -> Judged:
    name, kind = pl.col("line"), pl.col("class")
    parsed = pl.concat(
        lists.lines(f"modelnet40_{split}").with_columns(
            name.str.strip_chars().str.extract(r"^([\w-]+)_\d{4}$").alias("class"),
            pl.lit(split).alias("split"),
            pl.lit(lists.files[f"modelnet40_{split}"]).alias("file"),
        )
        for split in ("train", "test")
    ).with_columns(_ids("modelnet40", name.str.strip_chars()))
    rules: list[Rule] = [("name_form", kind.is_null(), "expected <class>_<4 digits>")]
    if "modelnet40_names" in lists.files:
        names = lists.lines("modelnet40_names")["line"].str.strip_chars()
        file = lists.files["modelnet40_names"]
        rules.append(("class_listed", ~kind.is_in(names.implode()), f"class is not in {file}"))
    good, rejects = _judged(parsed, rules, "sample_id", "this shape")
    return _members("modelnet40", good), rejects


def _read_scan(lists: "_Lists", settings: ListSettings) -> Judged:
    classes = dict(enumerate(_scan_classes(lists)))
    parts = pl.col("line").str.extract_groups(r"^(\w+_\d{5})\.bin\t(\d+)(?:\t(t))?\s*$").struct
    label = parts.field("2").str.to_integer(strict=False)
    parsed = lists.lines(f"scan_{settings.scan_split}").with_columns(
        parts.field("1").alias("object"),
        label.replace_strict(classes, default=None, return_dtype=pl.String).alias("class"),
        pl.when(parts.field("3") == "t").then(pl.lit("test")).otherwise(pl.lit("train"))
        .alias("split"),
        _ids("scanobjectnn", parts.field("1")),
    )  # fmt: skip
    rules: list[Rule] = [
        ("line_form", pl.col("object").is_null(), "expected <scene>_<5 digits>.bin, label[, t]"),
        ("label_range", pl.col("class").is_null(), f"label is not 0 to {len(classes) - 1}"),
    ]
    rejects = pl.DataFrame(schema=REJECTED)
    if "scan_labels" in lists.files:
        labels, rejects = _scan_labels(lists)
        parsed = parsed.join(labels, on="object", how="left", maintain_order="left")
        differs = pl.col("named").ne_missing(pl.col("class"))
        file = lists.files["scan_labels"]
        rules.append(("class_agrees", differs, f"{file} lacks the object or has another class"))
    good, bad = _judged(parsed, rules, "sample_id", "this object")
    return _members("scanobjectnn", good), pl.concat([rejects, bad])


def _scan_labels(lists: "_Lists") -> Judged:
    """Objects with their class as text: lines `<scene> <object> <class> <instances>`."""
    parts = pl.col("line").str.extract_groups(r"^(\w+)\t(\d{5})\t(\w+)").struct
    parsed = lists.lines("scan_labels").with_columns(
        pl.concat_str(parts.field("1"), parts.field("2"), separator="_").alias("object"),
        parts.field("3").alias("named"),
    )
    form: Rule = ("line_form", pl.col("object").is_null(), "expected scene, object and class")
    good, rejects = _judged(parsed, [form], "object", "this object")
    return good.select("object", "named"), rejects


def _scan_classes(lists: "_Lists") -> list[str]:
    """The order of labels; it is fixed, so a list that differs belongs to other data."""
    if "scan_names" in lists.files:
        names = lists.lines("scan_names")["line"].str.strip_chars().to_list()
        if tuple(names) != SCAN_CLASSES:
            raise SourceError(
                f"list {lists.files['scan_names']}: found {', '.join(names)[:200]}; expected the "
                f"15 classes of ScanObjectNN in order: {', '.join(SCAN_CLASSES)}"
            )
    return list(SCAN_CLASSES)


# ---------------------------------------------------------------- files, lines, rules


class _Lists(NamedTuple):
    """The files that were found, read on demand."""

    source: RawSource
    files: dict[str, str]

    def read(self, name: str) -> bytes:
        try:
            return _unpacked(self.source.read(name), name)
        except RecordError as error:
            raise SourceError(f"list {name} cannot be read: {error.message}") from error

    def lines(self, role: str) -> pl.DataFrame:
        return _numbered(self.read(self.files[role]), self.files[role])

    def json(self, role: str) -> Any:
        try:
            return orjson.loads(self.read(self.files[role]))
        except orjson.JSONDecodeError as error:
            raise SourceError(
                f"list {self.files[role]} is not JSON ({error}); fetch it again"
            ) from error


def missing_file(source: RawSource, name: str) -> Path | None:
    """Where `missing_models` lies if it is no file of the source: a path of its own."""
    if any(file.name == name for file in source.files(digests=False)):
        return None
    path = Path(name).absolute()
    if not path.is_file():
        raise SourceError(
            f"list {name} cannot be read: it is neither in {source.root} nor at {path}; name a CSV "
            "of missing models with the columns synsetId and modelId"
        )
    return path


def _on_disk(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"list {path} cannot be read: {error.strerror}") from error


def _unpacked(data: bytes, name: str) -> bytes:
    if not name.endswith(".gz"):
        return data
    try:
        with gzip.open(BytesIO(data)) as file:
            text = file.read(READ_LIMIT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"list {name} is no whole gzip file ({error}); fetch it again") from error
    if len(text) > READ_LIMIT:
        raise SourceError(f"list {name} unpacks to more than {READ_LIMIT} bytes; check the file")
    return text


def _numbered(data: bytes, name: str) -> pl.DataFrame:
    """Lines that are not blank, with their number and file."""
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if not text.strip():
        raise SourceError(f"list {name} is empty; fetch it again")
    return (
        pl.select(pl.lit(text).str.split("\n").explode().alias("line"))
        .with_row_index("number", 1)
        .filter(pl.col("line").str.strip_chars() != "")
        .with_columns(pl.lit(name).alias("file"))
    )


def _csv_fields(lines: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
    """Lines under a header with the text of `columns`, null where a line is short."""
    file, first = lines.select("file", "line").row(0)
    header = [part.strip(' "') for part in first.split(",")]
    if any(header.count(column) != 1 for column in columns):
        raise SourceError(
            f"list {file}: first line is '{first[:120]}', expected a header with "
            f"{', '.join(columns)}; check that it is the right file"
        )
    fields = pl.col("line").str.split(",")
    return lines.slice(1).with_columns(
        fields.list.get(header.index(column), null_on_oob=True)
        .str.strip_chars(' "\t\r')
        .alias(column)
        for column in columns
    )


def _judged(parsed: pl.DataFrame, rules: list[Rule], key: str, what: str) -> Judged:
    """Good rows and rejects; a row whose `key` a good row above it has is a reject too."""
    judged = parsed.with_columns(
        pl.coalesce(
            *(pl.when(bad.fill_null(True)).then(pl.lit(rule)) for rule, bad, _ in rules)
        ).alias("rule")
    )
    again = pl.col("rule").is_null() & ~pl.struct("rule", key).is_first_distinct()
    judged = judged.with_columns(
        pl.when(again).then(pl.lit("unique")).otherwise("rule").alias("rule")
    )
    messages = {rule: message for rule, _, message in rules}
    messages["unique"] = f"an earlier line has {what}"
    shown = pl.col("line").str.replace_all(r"\p{Cc}", " ").str.slice(0, 120)
    rejects = judged.filter(pl.col("rule").is_not_null()).select(
        pl.concat_str("file", "number", separator=":").alias("record"),
        "rule",
        pl.concat_str(
            pl.col("rule").replace_strict(messages, return_dtype=pl.String),
            shown,
            separator="; found ",
        ).alias("message"),
    )
    return judged.filter(pl.col("rule").is_null()), rejects.cast(REJECTED)


def _ids(source: str, *parts: pl.Expr | pl.Series | str) -> pl.Expr:
    """`sample_id` of whole columns."""
    return pl.concat_str(pl.lit(sample_id(source)), *parts, separator="/").alias("sample_id")


def _members(source: str, good: pl.DataFrame, name: pl.Expr | None = None) -> pl.DataFrame:
    class_name = pl.col("class") if name is None else name
    filled = good.with_columns(pl.lit(source).alias("source"), class_name.alias("class_name"))
    return filled.select(pl.col(column).cast(kind) for column, kind in MEMBERS.items())


def _title(role: str) -> str:
    return f"{role} (a file named {LIST_FILES[role].replace(chr(92), '')})"
