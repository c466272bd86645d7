"""All sample data sets, or those that are asked for: `<out>/<benchmark>/…`, one module each."""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from schemas.errors import ConfigError

NOT_GENERATORS = {"__init__", "write", "seeded", "blockworld"}


def sample_names() -> list[str]:
    """Every module here that writes a data set."""
    folder = Path(__file__).parent
    return sorted(p.stem for p in folder.glob("*.py") if p.stem not in NOT_GENERATORS)


def write_sample(out: Path, seed: int = 0, only: Sequence[str] | None = None) -> None:
    """Write the sample data; files that are there already with the same bytes are left alone."""
    unknown = set(only or ()) - set(sample_names())
    if unknown:
        names = ", ".join(sample_names())
        raise ConfigError(f"no sample data for {', '.join(sorted(unknown))}; there are: {names}")
    for name in sorted(only or sample_names()):
        start = time.monotonic()
        writer = getattr(importlib.import_module(f"tasks.sample.{name}"), f"write_{name}")
        writer(out / name, seed)
        print(f"sample {name}: {out / name} ({time.monotonic() - start:.0f} s)", flush=True)
