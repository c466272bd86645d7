"""A device that is not there: tensors say `standin`, and compute on the CPU or not at all.

It behaves as a GPU does where a CPU is lenient. Tensors of two devices do not meet in one operation
(a number without dimensions and an index of the CPU may). Nothing leaves the device but by
`to_host` and by what saves tensors. Nothing waits for the device within a loop: no `.item()`, no
`if tensor`, no operation whose shape depends on values. `autocast` casts as it does on CUDA.

`StandIn("cpu")` computes in earnest: results are those of the CPU to the bit. `StandIn("meta")`
computes shapes and types only, so that a network of any size costs nothing; what comes to the host
is ones.
"""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from lightning_fabric.accelerators import ACCELERATOR_REGISTRY, Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from storage.tensors import as_tensors
from tasks.learning.devices import to_device, to_host
from tasks.learning.trainer import _Training, compute_in_batches

NAME = "standin"
aten = torch.ops.aten

LEAVING = (to_host.__code__, as_tensors.__code__)
"""Who may copy to the host."""
ENTERING = (to_device.__code__,)
"""Who may copy from the host in a loop."""
LOOPS = (
    _Training._epoch.__code__,
    _Training._measured.__code__,
    compute_in_batches.__code__,
)
"""Where a GPU must be kept busy."""
WAITING = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.allclose.default,
}
"""What a GPU must finish before the program goes on."""
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
PRODUCTS = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.dot.default,
    aten.convolution.default,
}
"""What takes one type only."""


class DeviceError(AssertionError):
    """A mistake that a GPU would not forgive, or would pay for."""


class Module:
    """What torch asks a device's module."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Draws are the CPU's."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    bfloat16 = True
    capability = (8, 0)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self.bfloat16

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return self.capability


MODULE = Module()


class StandInAccelerator(Accelerator):
    """What Fabric asks of a device."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


class There(torch.Tensor):
    """A tensor on the stand-in; `inner` holds its values, or its shape."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "There":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.inner = inner
        return tensor

    def __init__(self, inner: torch.Tensor) -> None: ...

    def __repr__(self, **_: Any) -> str:
        return f"There({tuple(self.shape)}, {self.dtype})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy; copy it first")

    def tolist(self) -> Any:
        assert StandIn.active is not None
        if not StandIn.active.patient:
            raise DeviceError("tolist() waits for the device; use to_host")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = StandIn.active
        assert mode is not None, "a tensor of the stand-in is used after it was left"
        return mode.compute(func, args, kwargs or {})


class StandIn(TorchDispatchMode):
    """Within it, `torch.device(NAME)` works, on top of `backing`: cpu or meta.

    `patient`: the program may wait for the device and copy to the host, as an algorithm must whose
    every step depends on the one before.
    """

    active: "StandIn | None" = None

    def __init__(self, backing: str, *, patient: bool = False) -> None:
        super().__init__()
        self.backing, self.patient = torch.device(backing), patient
        self.operations = 0

    def __enter__(self) -> "StandIn":
        StandIn.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        StandIn.active = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        there = any(isinstance(value, There) for value in tensors)
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        made_there = target is not None and target.type == NAME
        if not there and not made_there:
            return func(*args, **kwargs)
        self.operations += 1
        if there and target is not None and not made_there:
            return self._left(func, args, kwargs)
        if func is aten.copy_.default:
            return self._copied(func, args, kwargs)
        if made_there and not there and func is aten._to_copy.default:
            self._enter(func)
        elif there and func is not aten._to_copy.default:
            self._check(func, args, tensors)
        if made_there:
            kwargs = {**kwargs, "device": self.backing}
        flat, spec = tree_flatten((args, kwargs))
        inner_args, inner_kwargs = tree_unflatten([self._inner(value) for value in flat], spec)
        inner_kwargs.pop("pin_memory", None)
        result = func(*inner_args, **inner_kwargs)
        owners = {id(value.inner): value for value in tensors if isinstance(value, There)}

        def outer(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # What changes a tensor in place gives that tensor.
            return owners.get(id(value)) if id(value) in owners else There(value)

        return tree_map(outer, result)

    def _inner(self, value: Any) -> Any:
        if isinstance(value, There):
            return value.inner
        if isinstance(value, torch.Tensor) and value.device != self.backing:
            return value.to(self.backing)
        return value

    def _check(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        if func in WAITING and not self.patient:
            raise DeviceError(f"{func} waits for the device within the work on it")
        if func in INDEXING:
            # An index of the CPU is copied to the device; a mask is counted there first.
            indices = [index for index in args[1] if index is not None]
            masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
            if (
                masks
                and not self.patient
                and not (func is not aten.index.Tensor and args[2].numel() == 1)
            ):
                raise DeviceError(f"{func} with a mask waits for the device")
            if not isinstance(args[0], There):
                raise DeviceError(f"{func}: a tensor of the CPU is indexed by one of the device")
            if any(not isinstance(index, There) for index in indices):
                self._enter(func)
            tensors = [tensor for tensor in tensors if all(tensor is not i for i in indices)]
        elsewhere = [
            tensor for tensor in tensors if not isinstance(tensor, There) and tensor.dim() > 0
        ]
        if elsewhere:
            where = ", ".join(f"{t.device} {tuple(t.shape)}" for t in elsewhere)
            raise DeviceError(f"{func}: tensors of {NAME} and of {where} in one operation")
        if func in PRODUCTS:
            types = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            if len(types) > 1:
                raise DeviceError(f"{func}: a product of {' and '.join(map(str, types))}")
        changed = args[0] if args and str(func).split(".")[1].endswith("_") else None
        if isinstance(changed, torch.Tensor) and not isinstance(changed, There):
            raise DeviceError(f"{func} changes a tensor of the CPU by one of the device")

    def _left(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor with a device of its own beside one that is there: a copy to the host."""
        if func is not aten._to_copy.default:
            # new_zeros(..., device="cpu") and the like read no values.
            kwargs = {**kwargs}
            return func(*tree_map(self._shape_only, args), **kwargs)
        self._leave(func)
        return func(self.on_host(args[0]), **kwargs)

    def _shape_only(self, value: Any) -> Any:
        return self.on_host(value) if isinstance(value, There) else value

    def on_host(self, tensor: "There") -> torch.Tensor:
        if self.backing.type == "meta":
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return tensor.inner.clone()

    def _leave(self, func: Any) -> None:
        by = _called_by(LEAVING)
        if self.patient:
            return
        if by is None:
            raise DeviceError(f"{func}: a hidden copy to the host; use to_host")
        caller = by.f_back
        while caller is not None and caller.f_code.co_name == "<dictcomp>":
            caller = caller.f_back
        waits = by.f_code is to_host.__code__ and caller is not None
        if waits and caller.f_code not in LOOPS and _called_by(LOOPS):
            raise DeviceError(f"{func}: a copy to the host within a step; the device would idle")

    def _enter(self, func: Any) -> None:
        if _called_by(LOOPS) and not _called_by(ENTERING):
            raise DeviceError(f"{func}: a hidden copy from the host in a loop; use to_device")

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        to, source = args[:2]
        if isinstance(to, There):
            inner = source.inner if isinstance(source, There) else source
            if not isinstance(source, There) and source.dim():
                self._enter(func)
            func(to.inner, inner.to(self.backing), *args[2:], **kwargs)
            return to
        self._leave(func)
        func(to, self.on_host(source), *args[2:], **kwargs)
        return to


def _called_by(codes: tuple[CodeType, ...]) -> FrameType | None:
    """The innermost call of one of these."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


# ---------------------------------------------------------------- autocast, as CUDA has it

LOWER = (
    "conv1d", "conv2d", "conv3d", "convolution", "linear", "matmul", "mm", "mv", "bmm", "addmm",
    "addmv", "addbmm", "baddbmm", "prelu",
)  # fmt: skip
WIDER = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "pow",
    "reciprocal", "rsqrt", "sinh", "tan", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "nll_loss", "nll_loss_nd", "cosine_similarity", "mse_loss", "l1_loss",
    "smooth_l1_loss", "cosine_embedding_loss", "kl_div", "triplet_margin_loss", "cdist", "dist",
    "norm", "renorm", "logsumexp", "prod", "cumprod", "cumsum", "sum", "softmax", "log_softmax",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "stack", "tensordot",
)  # fmt: skip
_LIBRARIES: list[torch.library.Library] = []


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        eligible = isinstance(value, There) and value.is_floating_point()
        return value.to(dtype) if eligible and value.dtype != torch.float64 else value

    return tree_map(cast, values)


def _autocasting(func: Any, rule: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            if rule == "lower":
                dtype = torch.get_autocast_dtype(NAME)
            elif rule == "wider":
                dtype = torch.float32
            else:
                every = tree_flatten((args, kwargs))[0]
                floats = [v.dtype for v in every if isinstance(v, There) and v.is_floating_point()]
                dtype = torch.float32 if torch.float32 in floats else torch.get_autocast_dtype(NAME)
            if rule == "wider" and kwargs.get("dtype") is None and "dtype" in kwargs:
                kwargs["dtype"] = dtype
            return func(*_cast(args, dtype), **_cast(kwargs, dtype))

    return call


def _made_empty(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> There:
    assert StandIn.active is not None
    return There(torch.empty_strided(size, stride, dtype=dtype, device=StandIn.active.backing))


def _copied_in(source: torch.Tensor, to: There, non_blocking: bool = False) -> There:
    mode = StandIn.active
    assert mode is not None and not isinstance(source, There)
    mode._enter("torch.tensor")
    to.inner.copy_(source)
    return to


def _set_up() -> None:
    _setup_privateuseone_for_python_backend(NAME, MODULE)
    ACCELERATOR_REGISTRY.register(NAME, StandInAccelerator)
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((library, others))
    # `torch.tensor(values, device=...)` looks at no mode.
    library.impl("empty_strided", _made_empty, "PrivateUse1")
    library.impl("_copy_from", _copied_in, "PrivateUse1")
    for names, rule in ((LOWER, "lower"), (WIDER, "wider"), (WIDEST, "widest")):
        for name in names:
            packet = getattr(aten, name)
            for overload in packet.overloads():
                if "out" in overload:
                    continue
                func = getattr(packet, overload)
                try:
                    library.impl(func, _autocasting(func, rule), "AutocastPrivateUse1")
                except RuntimeError:
                    continue


# At import, so while tests are collected: torch counts the devices at its first backward pass.
_set_up()
