"""Safetensors files: named arrays with one JSON header; no pickle anywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schemas.errors import SourceError
from storage import atomic
from storage.checkpoints import damaged_checkpoint

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
    """One safetensors file, replaced atomically; equal content gives equal bytes.

    Its header holds the digest of the header and the tensors: no manifest names a checkpoint.
    """
    tensors = as_tensors(state)
    plain = json.loads(json.dumps(header))  # as it will be read
    sealed = {**plain, "sha256": _digest(plain, tensors)}
    # More than one metadata key would be written in random order.
    metadata = {"header": json.dumps(sealed, sort_keys=True)}
    with atomic.explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = atomic.temporary_name(path)
        try:
            _write(temporary, tensors, metadata)
            atomic.fsync_path(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        atomic.fsync_path(path.parent)


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """The bytes of safetensors' own `save_file`, which would copy all tensors before it writes."""
    import torch

    # Widest first, in the order of safetensors.
    kinds = {
        torch.int64: "I64",
        torch.float64: "F64",
        torch.float32: "F32",
        torch.int32: "I32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
    place = {kind: number for number, kind in enumerate(kinds)}
    order = sorted(tensors, key=lambda name: (place[tensors[name].dtype], name.encode()))
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        head[name] = {
            "dtype": kinds[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].numel():
                file.write(tensors[name].reshape(-1).view(torch.uint8).numpy().data)


def _digest(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    import torch

    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        if tensor.numel():  # an empty one may have no stride that can be viewed as bytes
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_header(path: Path) -> dict[str, Any]:
    """What was written beside the tensors; `read_tensors` compares it with its digest."""
    header = _sealed_header(path)
    header.pop("sha256", None)
    return header


def plain_tensors(path: Path) -> dict[str, torch.Tensor] | None:
    """Tensors of a safetensors file that others wrote; None of one of ours or where there is none.

    What is no such file is refused.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            ours = "header" in (file.metadata() or {})
        return None if ours else load_file(path)
    except SafetensorError as error:
        raise SourceError(f"{path} is no safetensors file: {error}") from error


def _sealed_header(path: Path) -> dict[str, Any]:
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
    """The tensors, compared with the digest in the header; older files have none."""
    from safetensors.torch import load_file

    header, tensors = _sealed_header(path), load_file(path)
    digest = header.pop("sha256", None)
    if digest is not None and _digest(header, tensors) != digest:
        raise damaged_checkpoint(path)
    # Tensors of a file lie at any address, and sums of some kernels depend on the alignment in
    # their last bit: what was saved and read again must compute what it did before.
    return {name: tensor.clone() for name, tensor in tensors.items()}
