"""Files of what a model puts out, of any model: CSV, Parquet or npz in, the same out.

Enters: a file by the rules of docs/importing.md. Leaves: a frame with `sample_id`, `view` and what
else the file has, and the names of its logits if it has any. Whether the samples are those of a
protocol is judged in imports.py.
"""

import io
import logging
import re
import zipfile
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from schemas.errors import ConfigError, SourceError
from schemas.tables import PLAIN
from storage.atomic import write_bytes

log = logging.getLogger(__name__)

SUFFIXES = (".csv", ".csv.gz", ".parquet", ".npz")
LOGIT, FEATURE = "logit:", "feature:"
WORDS = ("sample_id", "view", "predicted")
NUMBERS = ("novelty", "probability", "p_unknown")
MATRICES = {"logits": LOGIT, "features": FEATURE}
ALIASES = {"score": "novelty"}
KINDS = {
    "outputs": ("logits", "features", "novelty"),
    "scores": ("novelty",),
    "predictions": ("predicted",),
}
"""Kinds of file, and what each must have some of."""


@dataclass(frozen=True)
class OutputFile:
    """Rows of a file; of `logits`, `features`, `novelty`, … the columns that it has."""

    name: str
    rows: pl.DataFrame
    classes: tuple[str, ...] | None = None
    """Names of the logits, where the file has them."""


def read_outputs(path: Path, kind: str) -> OutputFile:
    """The rows of a file of this kind; a file that is none is refused."""
    content = _read_npz(path) if path.name.endswith(".npz") else _read_table(path)
    required = KINDS[kind]
    if not set(required) & set(content.rows.columns):
        names = ", ".join(content.rows.columns)
        raise SourceError(
            f"{path.name} has no {' or '.join(_as_written(name) for name in required)}, which a "
            f"file of {kind} has; it has {names} (docs/importing.md shows the formats)"
        )
    columns = [*WORDS, *NUMBERS] if kind == "predictions" else [*WORDS, *MATRICES, "novelty"]
    columns = [name for name in columns if kind != "scores" or name not in MATRICES]
    if unused := [name for name in content.rows.columns if name not in columns]:
        log.warning(f"  {path.name}: not used: {', '.join(unused)}")
    rows = content.rows.select(name for name in columns if name in content.rows.columns)
    if "view" not in rows.columns:
        rows = rows.with_columns(pl.lit(PLAIN).alias("view"))
    for name in rows.columns:
        _refuse_gaps(path.name, rows, name)
    return OutputFile(path.name, rows, content.classes)


def _as_written(name: str) -> str:
    return f"{name} ({MATRICES[name]}… in a CSV)" if name in MATRICES else name


def _refuse_gaps(file: str, rows: pl.DataFrame, name: str) -> None:
    """Every sample has everything that the file has, as finite numbers and as many."""
    column = rows[name]
    where = column.is_null()
    if name in MATRICES:
        widths = column.list.len()
        if widths[0] == 0:
            raise SourceError(f"{file}: {name} of sample {rows['sample_id'][0]!r} have no numbers")
        if not where.any() and (widths != widths[0]).any():
            row = int((widths != widths[0]).arg_true()[0])
            raise SourceError(
                f"{file}: {name} of sample {rows['sample_id'][row]!r} have {widths[row]} numbers, "
                f"those of {rows['sample_id'][0]!r} have {widths[0]}"
            )
        finite = column.list.eval(pl.element().is_finite().fill_null(False)).list.all()
        where |= ~finite
    elif name in NUMBERS:
        where |= ~column.is_finite().fill_null(False)
    if where.any():
        row = int(where.arg_true()[0])
        if name in WORDS:
            raise SourceError(f"{file}: {name} of row {row + 1} is empty; fill it")
        raise SourceError(
            f"{file}: {name} of sample {rows['sample_id'][row]!r} (row {row + 1}) are not all "
            f"finite float32 numbers; mend the model or leave {name} out"
        )


def _check_rows(file: str, count: int, names: Collection[str]) -> None:
    if not count:
        raise SourceError(f"{file} has no rows")
    for old, new in ALIASES.items():
        if {old, new} <= set(names):
            raise SourceError(f"{file} has both {old} and {new}, the same thing; leave one out")


# ---------------------------------------------------------------- CSV and Parquet


def _read_table(path: Path) -> OutputFile:
    try:
        if path.name.endswith(".parquet"):
            rows = pl.read_parquet(path, glob=False)
        elif path.name.endswith((".csv", ".csv.gz")):
            names = pl.read_csv(path, n_rows=0, glob=False).columns
            text = {name: pl.String for name in names if name in WORDS}
            rows = pl.read_csv(path, schema_overrides=text, infer_schema_length=None, glob=False)
        else:
            raise ConfigError(f"{path.name}: expected a file of {', '.join(SUFFIXES)}")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise SourceError(f"{path.name} cannot be read: {error}") from error
    if "sample_id" not in rows.columns:
        raise SourceError(f"{path.name} has no column sample_id; it has {', '.join(rows.columns)}")
    _check_rows(path.name, rows.height, rows.columns)
    rows = rows.rename({old: new for old, new in ALIASES.items() if old in rows.columns})
    rows = rows.with_columns(_text(path.name, rows[name]) for name in WORDS if name in rows.columns)
    classes: tuple[str, ...] | None = None
    for name, prefix in MATRICES.items():
        parts = [column for column in rows.columns if column.startswith(prefix)]
        if parts and name in rows.columns:
            raise SourceError(f"{path.name} has both {name} and {parts[0]}; leave one of them out")
        if name == "features" and parts:
            parts = _numbered(path.name, parts)
        elif parts:
            classes = tuple(column.removeprefix(LOGIT) for column in parts)
        if parts:
            columns = [_numbers(path.name, rows[column]) for column in parts]
            matrix = pl.concat_list(pl.Series(c.name, c, pl.Float32) for c in columns)
            rows = rows.with_columns(matrix.alias(name)).drop(parts)
        elif name in rows.columns:
            rows = rows.with_columns(_lists(path.name, rows[name]))
    numbers = [_numbers(path.name, rows[name]) for name in NUMBERS if name in rows.columns]
    return OutputFile(path.name, rows.with_columns(numbers), classes)


def _numbered(file: str, parts: Sequence[str]) -> list[str]:
    names = [f"{FEATURE}{place}" for place in range(len(parts))]
    if set(parts) != set(names):
        missing = next(name for name in names if name not in parts)
        raise SourceError(f"{file}: features are counted from 0, but {missing} is not there")
    return names


def _text(file: str, column: pl.Series) -> pl.Series:
    try:
        if not column.dtype.is_nested():
            return column.cast(pl.String)
    except pl.exceptions.PolarsError:
        pass
    raise SourceError(f"{file}: column {column.name} is {column.dtype}, expected text")


def _numbers(file: str, column: pl.Series) -> pl.Series:
    if column.dtype.is_numeric():
        return column.cast(pl.Float64)
    if column.dtype.is_nested():
        raise SourceError(f"{file}: column {column.name} is {column.dtype}, expected numbers")
    words = column.cast(pl.String, strict=False)
    wrong = words.cast(pl.Float64, strict=False).is_null() & words.is_not_null()
    first = repr(words.filter(wrong)[0]) if wrong.any() else str(column.dtype)
    raise SourceError(f"{file}: column {column.name} holds {first}, expected numbers")


def _lists(file: str, column: pl.Series) -> pl.Series:
    kind = column.dtype
    inner = kind.inner if isinstance(kind, pl.List | pl.Array) else None
    if inner is None or not inner.is_numeric():
        raise SourceError(f"{file}: column {column.name} is {kind}, expected lists of numbers")
    return column.cast(pl.List(pl.Float32))


# ---------------------------------------------------------------- npz


def _read_npz(path: Path) -> OutputFile:
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SourceError(
            f"{path.name} is no npz of plain arrays ({error}); save ids and names as text: "
            "np.array(ids, dtype=str)"
        ) from error
    if "sample_id" not in arrays:
        raise SourceError(
            f"{path.name} has no array sample_id; it has {', '.join(sorted(arrays)) or 'none'} "
            "(docs/importing.md lists the arrays)"
        )
    _check_rows(path.name, arrays["sample_id"].size, arrays)
    arrays = {ALIASES.get(name, name): array for name, array in arrays.items()}
    names = arrays.pop("classes", None)
    count = len(np.atleast_1d(arrays["sample_id"]))
    columns = []
    for name, array in arrays.items():
        dimensions = 2 if name in MATRICES else 1
        if name not in (*WORDS, *NUMBERS, *MATRICES):
            columns.append(pl.Series(name, [None] * count))  # reported as not used
            continue
        if array.ndim != dimensions or len(array) != count:
            shape = f"({count}, …)" if dimensions == 2 else f"({count},)"
            raise SourceError(f"{path.name}: {name} has shape {array.shape}, expected {shape}")
        if name in WORDS:
            columns.append(pl.Series(name, array.astype(str).tolist(), pl.String))
        elif array.dtype.kind not in "iuf":
            raise SourceError(f"{path.name}: {name} is {array.dtype}, expected numbers")
        elif dimensions == 2:
            with np.errstate(over="ignore"):  # what is too large is refused by its sample
                matrix = pl.Series(name, array.astype(np.float32))
            columns.append(matrix.cast(pl.List(pl.Float32)))
        else:
            columns.append(pl.Series(name, array.astype(np.float64)))
    classes = None if names is None else tuple(str(name) for name in np.atleast_1d(names))
    return OutputFile(path.name, pl.DataFrame(columns), classes)


# ---------------------------------------------------------------- out


def write_outputs(path: Path, rows: pl.DataFrame, classes: Sequence[str]) -> None:
    """Rows of `outputs` without their run as such a file; what no row has is left out."""
    if not path.name.endswith(SUFFIXES) or path.name.endswith(".gz"):
        raise ConfigError(f"{path.name}: expected a name that ends with .csv, .parquet or .npz")
    rows = rows.select(name for name in rows.columns if rows[name].null_count() < rows.height)
    if "logits" in rows.columns:
        rows = rows.drop("predicted", strict=False)  # the largest logit
    buffer = io.BytesIO()
    if path.name.endswith(".npz"):
        arrays = {name: _array(rows[name]) for name in rows.columns}
        if "logits" in arrays:
            arrays["classes"] = np.array(classes, dtype=str)
        np.savez_compressed(buffer, **arrays)
    else:
        rows = _wide(rows, "logits", [f"{LOGIT}{name}" for name in classes])
        if path.name.endswith(".csv"):
            rows = _wide(rows, "features", None)
            # As float64, whose digits give the same float32 again.
            rows.with_columns(pl.selectors.float().cast(pl.Float64)).write_csv(buffer)
        else:
            rows.write_parquet(buffer)
    write_bytes(path, buffer.getvalue())


def _array(column: pl.Series) -> np.ndarray:
    if column.dtype == pl.String:
        return column.to_numpy().astype(str)
    if column.dtype == pl.List(pl.Float32):
        return column.list.to_array(column.list.len()[0]).to_numpy()
    return column.to_numpy()


def _wide(rows: pl.DataFrame, name: str, titles: Sequence[str] | None) -> pl.DataFrame:
    if name not in rows.columns:
        return rows
    width = rows[name].list.len()[0]
    titles = titles or [f"{FEATURE}{place}" for place in range(width)]
    return rows.with_columns(
        pl.col(name).list.get(place).alias(title) for place, title in enumerate(titles)
    ).drop(name)


def is_unknown(predicted: pl.Expr) -> pl.Expr:
    """Whether a predicted class is none of the known: `unknown`, or `unknown_N`."""
    return predicted.str.contains(r"^unknown(_\d+)?$")


NAME = re.compile(r"[\w.+-]{1,64}")
"""What an imported model may be called."""
