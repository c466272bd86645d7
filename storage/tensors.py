"""Safetensors files: named arrays with one JSON header; no pickle anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schemas.errors import SourceError
from storage import atomic

if TYPE_CHECKING:
    import torch


def as_tensors(state: Mapping[str, np.ndarray | torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    return {
        name: (
            torch.from_numpy(np.ascontiguousarray(value))
            if isinstance(value, np.ndarray)
            else value.detach().cpu().contiguous()
        )
        for name, value in state.items()
    }


def write_tensors(
    path: Path, state: Mapping[str, np.ndarray | torch.Tensor], header: Mapping[str, Any]
) -> None:
    """One safetensors file, replaced atomically; equal content gives equal bytes."""
    from safetensors.torch import save_file

    # More than one metadata key would be written in random order.
    metadata = {"header": json.dumps(header, sort_keys=True)}
    with atomic.explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = atomic.temporary_name(path)
        try:
            save_file(as_tensors(state), temporary, metadata)
            atomic.fsync_path(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        atomic.fsync_path(path.parent)


def read_header(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise SourceError(f"{path} not found; fit and save the detector first")
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["header"])
            return header
    except (SafetensorError, KeyError, ValueError) as error:
        raise SourceError(f"{path} was not written by this project: {error}; delete it") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
