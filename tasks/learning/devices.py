"""Where torch computes, on how many threads, and what it draws from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schemas.errors import ConfigError
from tasks.engine.slots import gpu_count

if TYPE_CHECKING:
    import torch


def choose_device(device: str) -> str:
    """`auto` is the GPU where there is one."""
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} was asked for, but torch sees no GPU; use auto or cpu"
        )
    return device


def to_device(values: np.ndarray, device: str | torch.device) -> torch.Tensor:
    """The one way from the program to a device; a GPU reads pinned memory, and nobody waits."""
    import torch

    tensor, place = torch.from_numpy(values), torch.device(device)
    if place.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(place, non_blocking=True)


def to_host(values: torch.Tensor) -> np.ndarray:
    """The one way from a device to the program, which waits here until the device has computed."""
    return values.detach().cpu().numpy()


def use_threads(count: int) -> None:
    """Results of torch on a CPU depend on the number of threads, so it is a setting."""
    import torch

    torch.set_num_threads(count)


@contextlib.contextmanager
def seeded(seed: Sequence[int], device: str, threads: int | None = None) -> Iterator[None]:
    """Torch draws from `seed`, uses deterministic algorithms where it has them, and no TF32; the
    caller's random state, switches and threads come back afterwards."""
    # Must stand in the environment before CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    used = [torch.device(device)] if torch.device(device).type == "cuda" else []
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Else every new tensor is filled first, for those who read what was never written.
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    before = torch.get_num_threads()
    # Convolutions on a GPU would use it by default, and float32 would be no float32.
    products: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    coarse = [switch.allow_tf32 for switch in products]
    with torch.random.fork_rng(devices=used):
        torch.manual_seed(int(np.random.default_rng(seed).integers(2**63)))
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.set_num_threads(threads or before)
        for switch in products:
            switch.allow_tf32 = False
        try:
            yield
        finally:
            for switch, was in zip(products, coarse, strict=True):
                switch.allow_tf32 = was
            torch.set_num_threads(before)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def precision_on(device: str, mixed_precision: bool) -> str:
    """The arithmetic of a training: bfloat16 where it is asked for and a GPU has it."""
    if device == "cpu" or not mixed_precision or (device == "auto" and not gpu_count()):
        return "float32"
    import torch

    kind = torch.device(choose_device(device)).type
    if kind == "cpu":
        return "float32"
    return "bfloat16" if torch.get_device_module(kind).is_bf16_supported(False) else "float32"
