"""Checkpoints of 3DOS's released code (`.pth`) for our models of clouds.

A file holds, under `model`, a classifier (`enco`, `penultimate`, `head`) or a contrastive network
(`encoder`, `head`), on DGCNN or PointNet++; with generated clouds a norm is a list `bns` of two.
What it holds beside that, the optimiser and the generator among it, is not used.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import SourceError

if TYPE_CHECKING:
    import torch

    from tasks.models.clouds import CloudModel

RELEASED = ("cross_entropy", "cosine_proto", "subcenter_arcface", "supcon", "arpl")
"""Models whose layers files of the release have; one of outlier exposure is a cross_entropy."""
WANTED = "a .pth of 3D_OS's training of this model and network"
# Names in a file and here, the first that fits. Convolutions of one point are linear layers here.
NAMES = [
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"enco(?:der)?\.conv5(?:\.0)?\.weight", "network.fuse.linear.weight"),
        (r"enco(?:der)?\.(?:conv5\.1|bn5)\.(.+)", r"network.fuse.norm.\1"),
        (r"enco(?:der)?\.conv(\d)(?:\.0)?\.weight", r"network.edges.\1.linear.weight"),
        (r"enco(?:der)?\.(?:conv|bn)(\d)(?:\.1)?\.(.+)", r"network.edges.\1.norm.\2"),
        (r"enco(?:der)?\.SA_modules\.2\.mlps\.0\.(.+)", r"network.last.\1"),
        (r"enco(?:der)?\.SA_modules\.(\d)\.mlps\.(.+)", r"network.abstractions.\1.\2"),
        (r"penultimate\.l1\.(.+)", r"embedding.0.\1"),
        (r"penultimate\.bn\.(.+)", r"embedding.1.\1"),
        (r"penultimate\.l2\.2\.(.+)", r"embedding.4.\1"),
        (r"penultimate\.(.+)", r"embedding.\1"),
        (r"head\.weight", "prototypes.weight"),
        (r"head\.(points|radius)", r"reciprocal.\1"),
        (r"head\.(\d.+)", r"classifier.\1"),
    )
]
EDGE = re.compile(r"(network\.edges\.)(\d)")
# The points of ARPL stand twice in a file.
AGAIN = "head.Dist.centers"


def fill_released(model: CloudModel, path: Path) -> str:
    """Put a file's weights into the layers of a model; `name sha256 ...` for the record.

    A file of another model, network, size or number of classes is refused. Layers on `meta` are
    filled too: so a file can be checked before any work.
    """
    from torch import nn

    from tasks.features.checkpoints import COUNTER, fill, read_state, without_prefix

    loaded, origin = read_state(path, WANTED, harmless=(Namespace,))
    norms = norm_names(model)
    state = {
        our_name(name, model.name, norms): value.flatten(1) if value.ndim > 2 else value
        for name, value in without_prefix(loaded).items()
        if name != AGAIN
    }
    check_classes(model, state, path)
    parts = {name: part for name, part in model.layers.items() if name not in model.torch_weights}
    layers = nn.ModuleDict(parts)
    names = {name: name for name in layers.state_dict() if not name.endswith(COUNTER)}
    title = f"{model.name} on {model.network_name}, whose released size is the preset `paper`"
    fill(layers, state, names, path, title)
    return origin


def our_name(name: str, model: str, norms: list[str]) -> str:
    """What we call a tensor of a file; one that is none of ours keeps its name."""
    if model == "supcon" and name.startswith("head."):
        return name.replace("head.", "embedding.", 1)
    for pattern, ours in NAMES:
        if match := pattern.fullmatch(name):
            name = match.expand(ours)
            break
    name = EDGE.sub(lambda match: f"{match[1]}{int(match[2]) - 1}", name)
    norm, _, value = name.replace(".bns.0.", ".").partition(".bns.1.")
    if not value:
        return norm
    return f"fake_norms.{norms.index(norm)}.{value}" if norm in norms else name


def norm_names(model: CloudModel) -> list[str]:
    """Norms that have a second one for generated clouds, in the order of these."""
    from tasks.models.arpl import Arpl, norm_places

    if not isinstance(model, Arpl):
        return []
    names = {id(module): name for name, module in model.layers.named_modules()}
    return [names[id(getattr(parent, part))] for parent, part in norm_places(model.normed)]


def check_classes(model: CloudModel, state: dict[str, torch.Tensor], path: Path) -> None:
    """A sentence of its own for the mistake that is made most."""
    last = {
        "cross_entropy": "classifier.3.weight",
        "cosine_proto": "prototypes.weight",
        "subcenter_arcface": "prototypes.weight",
        "arpl": "reciprocal.points",
    }.get(model.name)
    model_state = model.layers.state_dict()
    if last is None or last not in state or len(state[last]) == len(model_state[last]):
        return
    each = len(model_state[last]) // model.classes
    raise SourceError(
        f"weights file {path} is for {len(state[last]) / each:g} classes, the track has "
        f"{model.classes} known ones; name a file or tracks with the same classes"
    )
