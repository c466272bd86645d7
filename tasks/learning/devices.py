"""Where torch computes, in which arithmetic, on how many threads, and what it draws from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.engine.slots import gpu_count

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "float32", "tf32", "bfloat16", "float16"]
"""Arithmetic by name; `arithmetic` says what `auto` is on a device."""
TF32, HALF_CORES = (8, 0), (7, 0)
"""Compute capabilities from which a GPU has TF32, and units for products in float16."""


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
def seeded(
    seed: Sequence[int], device: str, threads: int | None = None, *, tf32: bool = False
) -> Iterator[None]:
    """Torch draws from `seed`, uses deterministic algorithms where it has them, and TF32 only where
    it is asked for; the caller's random state, switches and threads come back afterwards."""
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
            switch.allow_tf32 = tf32
        try:
            yield
        finally:
            for switch, was in zip(products, coarse, strict=True):
                switch.allow_tf32 = was
            torch.set_num_threads(before)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def arithmetic(precision: str, device: str) -> str:
    """What a precision is on a device; one that the device lacks is refused.

    `auto` is float32 on a CPU; on a GPU bfloat16, or float16, if it has units for it.
    """
    on_cpu = device == "cpu" or (device == "auto" and not gpu_count())
    if precision == "float32" or (on_cpu and precision != "tf32"):
        return "float32" if precision == "auto" else precision
    kind = "cpu"
    if not on_cpu:
        import torch

        kind = torch.device(choose_device(device)).type
    if kind == "cpu":
        if precision == "tf32":
            raise ConfigError("precision tf32: a CPU has none; use float32, bfloat16 or float16")
        return "float32" if precision == "auto" else precision
    module = torch.get_device_module(kind)
    capability = module.get_device_capability(torch.device(choose_device(device)))
    if precision == "tf32" and capability < TF32:
        raise ConfigError(f"precision tf32: {device} has none; use float32 or auto")
    has_bfloat16 = module.is_bf16_supported(False)
    if precision == "bfloat16" and not has_bfloat16:
        raise ConfigError(f"precision bfloat16: {device} has none; use float16, float32 or auto")
    if precision != "auto":
        return precision
    if has_bfloat16:
        return "bfloat16"
    return "float16" if capability >= HALF_CORES else "float32"


def with_arithmetic(settings: Settings, device: str) -> Any:
    """Settings whose precision, where they have one, is what it is on that device."""
    precision = getattr(settings, "precision", None)
    if precision is None:
        return settings
    return settings.model_copy(update={"precision": arithmetic(precision, device)})


def mixed(precision: str, device: str) -> Any:
    """Where operations on the device cast to 16 bits, if that is its arithmetic."""
    import torch

    name = arithmetic(precision, device)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    return torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None)
