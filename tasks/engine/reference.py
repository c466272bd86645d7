"""What a first build costs, before this lake has timed anything: rates that are shipped.

Enters: the work of each stage, as far as settings and raw files tell (`flows/first_build.py`).
Leaves: seconds and bytes by the rates of `reference_rates.csv`, which
`python -m benchmarks.reference_rates` measures on a lake of sample data.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("reference_rates.csv")
COLUMNS = ("benchmark", "stage", "model", "seconds", "bytes")


class Raw(NamedTuple):
    """How much there is of raw files."""

    files: int = 0
    bytes: int = 0

    @property
    def megabytes(self) -> float:
        return self.bytes / 1e6

    @classmethod
    def sum(cls, some: "Iterable[Raw]") -> "Raw":
        some = list(some)
        return cls(sum(one.files for one in some), sum(one.bytes for one in some))


@dataclass(frozen=True)
class Work:
    """What a stage of a first build has to do, of one model where models differ in pace.

    Its time grows with `amount` and its bytes with `written`: raw megabytes, samples, shards, or
    one times the other. The reference has the same units, as it is made of the same counts.
    """

    stage: str
    shards: int
    amount: float
    written: float
    model: str = ""


@dataclass(frozen=True)
class Rate:
    """Seconds of one worker for a unit of `amount`, bytes for one of `written`."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Reference:
    """Rates by benchmark, stage and model, and the machine that they were measured on."""

    machine: str
    rates: dict[tuple[str, str, str], Rate]

    def of(self, benchmark: str, work: Work) -> Rate | None:
        return self.rates.get((benchmark, work.stage, work.model))


@cache
def shipped_reference() -> Reference:
    return read_reference(FILE)


def read_reference(path: Path) -> Reference:
    machine, *lines = path.read_text().splitlines()
    rates = {
        (row["benchmark"], row["stage"], row["model"]): Rate(
            float(row["seconds"]), float(row["bytes"])
        )
        for row in csv.DictReader(lines)
    }
    return Reference(machine.removeprefix("# "), rates)


def write_reference(path: Path, machine: str, rows: Iterable[tuple[str, Work, Rate]]) -> None:
    """The file that `read_reference` reads: the machine as a comment, then a table."""
    with path.open("w", newline="") as file:
        file.write(f"# {machine}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for benchmark, work, rate in rows:
            numbers = (f"{rate.seconds:.3g}", f"{rate.bytes:.3g}")
            writer.writerow((benchmark, work.stage, work.model, *numbers))
