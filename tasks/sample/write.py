"""All sample data sets, or those that are asked for: `<out>/<benchmark>/…`, one module each.

Two are written at once, each in a process of its own.
"""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from schemas.errors import ConfigError
from schemas.similar import did_you_mean
from storage.atomic import write_bytes
from storage.filehash import sha256_file
from storage.layout import content_key
from tasks.engine.workers import Workers

NOT_GENERATORS = {"__init__", "write", "files", "blockworld"}


def sample_names() -> list[str]:
    """Every module here that writes a data set."""
    folder = Path(__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if p.stem not in NOT_GENERATORS)


def write_sample(out: Path, seed: int = 0, only: Sequence[str] | None = None) -> None:
    """Write the sample data; what the same generator wrote from the same seed is left alone.

    So a file that was changed by hand since then stays changed: delete the folder to start anew.
    """
    unknown = set(only or ()) - set(sample_names())
    if unknown:
        names, wrong = ", ".join(sample_names()), ", ".join(sorted(unknown))
        meant = did_you_mean(min(unknown), sample_names())
        raise ConfigError(f"no sample data for {wrong}; there are: {names}{meant}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        raise
    except OSError:
        raise ConfigError(f"{out} is no folder; name another with --out") from None
    todo = []
    for name in sorted(set(only or sample_names())):
        marker = out / f".{name}.made-by"
        if (out / name).is_dir() and marker.is_file() and marker.read_text() == _maker(name, seed):
            print(f"sample {name}: {out / name} (as before)", flush=True)
        else:
            todo.append(name)
    if len(todo) < 2:
        for name in todo:
            _say(name, out, _write(name, out, seed))
        return
    jobs = [(name, out, seed) for name in todo]
    for number, seconds in Workers().run_each("sample", _write, jobs, 2):
        _say(todo[number], out, seconds)


def _write(name: str, out: Path, seed: int) -> float:
    """Write one data set; the seconds that it took."""
    start = time.monotonic()
    writer = getattr(importlib.import_module(f"tasks.sample.{name}"), f"write_{name}")
    writer(out / name, seed)
    write_bytes(out / f".{name}.made-by", _maker(name, seed).encode())
    return time.monotonic() - start


def _say(name: str, out: Path, seconds: float) -> None:
    print(f"sample {name}: {out / name} ({seconds:.0f} s)", flush=True)


def _maker(name: str, seed: int) -> str:
    """What the bytes depend on: the generators' code, the seed."""
    folder = Path(__file__).parent
    code = {path.name: sha256_file(path) for path in sorted(folder.glob("*.py"))}
    return content_key({"name": name, "seed": seed, "code": code})
