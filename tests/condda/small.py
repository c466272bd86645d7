"""Small test data for the protocol's tests: a data directory of the published layout."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOMAIN = "image_classification"
TEST = "OND.1.1.1"
CONDDA = "CONDDA.1.1.1"
ROUND_SIZE = 3
KNOWN = 2
# 8 rows, rounds of 3: the last round is short. World changes at row 4.
LABELS = (1, 2, 1, 2, -1, 1, -1, 2)
CHANGED = (0, 0, 0, 0, 1, 1, 1, 1)
IDS = tuple(f"img_{row}.png" for row in range(len(LABELS)))


def write_test(
    root: Path,
    test: str = TEST,
    *,
    protocol: str = "OND",
    domain: str = DOMAIN,
    truth: str | None = None,
    encoding: str = "utf-8",
    **metadata: Any,
) -> None:
    """One test; metadata values of None leave the key out."""
    folder = root / protocol / domain
    folder.mkdir(parents=True, exist_ok=True)
    text = truth if truth is not None else image_truth()
    (folder / f"{test}_single_df.csv").write_bytes(text.encode(encoding))
    settings = {
        "protocol": protocol,
        "known_classes": KNOWN,
        "max_novel_classes": 2,
        "round_size": ROUND_SIZE,
        "feedback_max_ids": 2,
        "threshold": 0.5,
        "red_light": IDS[4],
        "seed": 7,
        **metadata,
    }
    kept = {key: value for key, value in settings.items() if value is not None}
    (folder / f"{test}_metadata.json").write_text(json.dumps(kept))


def image_truth() -> str:
    """Ground truth of `IDS` in the image domain."""
    lines = zip(IDS, CHANGED, LABELS, strict=True)
    return "id,detection,classification\n" + "".join(f"{i}, {d}, {c}\n" for i, d, c in lines)


def detection(ids: Sequence[str], value: float = 0.1) -> bytes:
    """A detection file with the same value on every line."""
    return "".join(f"{name},{value}\n" for name in ids).encode()


def classes(ids: Sequence[str], chosen: int | Sequence[int] = 1, columns: int = KNOWN + 1) -> bytes:
    """A classification file that chooses one column, or the given one of each line."""
    picks = [chosen] * len(ids) if isinstance(chosen, int) else chosen
    lines = []
    for name, pick in zip(ids, picks, strict=True):
        lines.append(",".join([name, *("1" if c == pick else "0" for c in range(columns))]))
    return "".join(f"{line}\n" for line in lines).encode()


def round_ids(number: int, size: int = ROUND_SIZE) -> tuple[str, ...]:
    """Instance ids of a round."""
    return IDS[number * size : (number + 1) * size]
