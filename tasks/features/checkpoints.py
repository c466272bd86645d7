"""Checkpoint files of networks: tensors out of a file, and into a network that they fit.

Only tensors and plain values are unpickled; whatever would run code is refused.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from schemas.errors import SourceError
from tasks.features.efficientnet import UNREADABLE
from tasks.features.vit import LARGEST_FILE

STATE_KEYS = ("model_state", "model_state_dict", "state_dict", "model", "net")
# What trainers put before the names of all tensors.
PREFIXES = ("module", "model", "net", "network", "backbone", "encoder", "_orig_mod")
# Batches that a norm was trained on: not used, and older files lack it.
COUNTER = "num_batches_tracked"
NAMED_AT_MOST = 3


def read_state(
    path: Path, expected_file: str, harmless: tuple[type, ...] = ()
) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a checkpoint without the optimiser's, and `name sha256 ...` for the record.

    `harmless` are classes of values beside them that may be unpickled.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise SourceError(f"weights file {path} not found; name {expected_file}")
    if path.stat().st_size > LARGEST_FILE:
        raise SourceError(f"weights file {path} is larger than {LARGEST_FILE >> 30} GB; refused")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            with torch.serialization.safe_globals(list(harmless)):
                loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (*UNREADABLE, SafetensorError) as error:
        raise SourceError(
            f"weights file {path} is not a plain torch state file ({_reason(error)}); download it "
            "again, or if you trust it, save its model state alone as .safetensors"
        ) from error
    inside = [loaded[key] for key in STATE_KEYS if isinstance(loaded, dict) and key in loaded]
    state = inside[0] if inside else loaded
    if (
        not isinstance(state, dict)
        or not state
        or not all(isinstance(value, torch.Tensor) for value in state.values())
    ):
        raise SourceError(f"weights file {path} holds no state of a network; name {expected_file}")
    return state, f"{path.name} sha256 {digest}"


def without_prefix(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without what all begin with, such as `module.`; counters of norms are left out."""
    state = {name: value for name, value in state.items() if not name.endswith(COUNTER)}
    while len(first := {name.partition(".")[0] for name in state}) == 1 and first <= {*PREFIXES}:
        state = {name.partition(".")[2]: value for name, value in state.items()}
    return state


def _reason(error: Exception) -> str:
    """torch's reason alone, without its advice to let the file run code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = [n for n, line in enumerate(lines) if line.startswith("Check the documentation")]
    return lines[advice[0] - 1 if advice else 0][:160] if lines else type(error).__name__


def fill(
    network: nn.Module,
    file_state: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    path: Path,
    title: str = "",
) -> None:
    """Put every tensor of `file_state` into `network`, whose tensor `name` is `names[name]` there.

    `title` is what a sentence calls the network.
    """
    state = network.state_dict()
    expected = {theirs: state[name] for name, theirs in names.items()}
    wrong = {
        "missing": sorted(expected.keys() - file_state.keys()),
        "unexpected": sorted(file_state.keys() - expected.keys()),
        "of another shape": [
            f"{name} {tuple(file_state[name].shape)} instead of {tuple(expected[name].shape)}"
            for name in sorted(expected.keys() & file_state.keys())
            if expected[name].shape != file_state[name].shape
        ],
    }
    if any(wrong.values()):
        differences = "; ".join(
            f"{len(names_of_kind)} {kind}: {', '.join(names_of_kind[:NAMED_AT_MOST])}"
            f"{', ...' if len(names_of_kind) > NAMED_AT_MOST else ''}"
            for kind, names_of_kind in wrong.items()
            if names_of_kind
        )
        raise SourceError(
            f"weights file {path} does not fit {title or type(network).__name__} ({differences}); "
            "name an unchanged checkpoint of this network"
        )
    bad = [name for name in sorted(expected) if not bool(torch.isfinite(file_state[name]).all())]
    if bad:
        raise SourceError(
            f"weights file {path} holds values that are not finite, first in {bad[0]}; "
            "download it again"
        )
    # Copies: a file's tensors may lie at odd addresses, which changes the last bits of sums.
    counters = {name: torch.tensor(0) for name in state if name.endswith(COUNTER)}
    weights = {name: file_state[theirs].float().clone() for name, theirs in names.items()}
    network.load_state_dict({**counters, **weights}, assign=True)
