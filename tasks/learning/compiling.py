"""Layers compiled by torch.compile, where the setting `compile` asks for it.

`Module.compile` passes over containers of torch's own without a word, so methods are compiled,
those by which models call networks and layers. Each shape has a graph of its own: so a training
that went on from a checkpoint has the bits of one that was never stopped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from schemas.errors import ConfigError, TrainingError

METHODS = ("forward", "encode", "trunk", "embed")
GRAPHS = 64
"""Of one method; a model that needs more fails, torch would go on without compiling."""


def check_compiler() -> None:
    """Refuse, before any work, what torch could not compile."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise ConfigError(
            f"compile needs a C++ compiler, and there is no {name} on this machine; install one, "
            "name another in CXX, or leave out compile"
        )


def compile_layers(trainable: Any) -> None:
    """Compile what trainings and passes call of the layers, in place, once."""
    settings = trainable.settings
    if not settings.compile:
        return
    check_compiler()
    network = getattr(trainable, "network", None)
    inside = set() if network is None else {id(network.layers)}
    owners = [*([] if network is None else [network]), *_called(trainable.layers, inside)]
    for owner in owners:
        for name in METHODS:
            if callable(getattr(owner, name, None)) and name not in vars(owner):
                setattr(owner, name, _compiled(getattr(owner, name), trainable.name))


def _called(layer: Any, inside: set[int]) -> Iterator[Any]:
    """The layer, or the outermost ones in a container, which itself is never called."""
    from torch import nn

    if id(layer) in inside:
        return
    if isinstance(layer, nn.ModuleDict | nn.ModuleList):
        for child in layer.children():
            yield from _called(child, inside)
    elif not isinstance(layer, nn.ParameterDict | nn.ParameterList):
        yield layer


def _compiled(method: Callable[..., Any], model: str) -> Callable[..., Any]:
    import torch
    from torch._dynamo import config, exc

    graph: Any = torch.compile(  # type: ignore[call-overload]
        method, dynamic=False, recompile_limit=GRAPHS, isolate_recompiles=True
    )

    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(*arguments, **options)
        try:
            with config.patch(fail_on_recompile_limit_hit=True):
                return graph(*arguments, **options)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            reason = str(getattr(error, "inner_exception", error)).strip().splitlines()[0]
            raise TrainingError(
                f"model {model}: torch.compile failed ({reason}); leave out compile"
            ) from error

    return call
