"""Contrastive predictive coding: from the patches of upper rows, tell those of a lower row.

Rule 11 of docs/semantic.md. A picture of 224 gives 6 x 6 patches of 64 at a distance of 32. Each
keeps one random channel, is flipped and shifted at random, and becomes a feature row: the shared
groups, then a norm, ReLU and mean. A context network looks at each place and the row above; a
matrix for each number of steps down (1 to 5) predicts features of the rows below. The score of a
prediction is its mean product with a feature row, and the loss tells the true one from the one at
the same place after the patches of the same picture were shuffled. The code's step has no L2 term.

The network has a stride of 2 in the first convolution, mirrored edges and a batch norm per task;
the model `light_classifier` is the same one without this loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from schemas.config import Settings
from schemas.errors import ConfigError
from tasks.learning.trainer import Batch
from tasks.models.pictures import AuxiliaryClassifier, AuxiliaryTraining, crop_side
from tasks.networks.wide_resnet import AUXILIARY, LIGHT

if TYPE_CHECKING:
    import torch
    from torch import nn

STEPS = 5


class CpcSettings(Settings):
    """Patches and context of contrastive predictive coding; defaults are the paper's."""

    patch: int = Field(64, ge=4)
    """Side of a patch."""
    stride: int = Field(32, ge=1)
    """Distance of two patches."""
    margin: int = Field(4, ge=0)
    """A patch is cut at random to its side less twice this, then padded by reflection."""
    context: int = Field(256, ge=1)
    """Channels of the context network."""
    layers: int = Field(4, ge=0)
    """Residual layers of the context network after the one that sees rows above."""
    batch_size: int = Field(32, ge=1)
    """Pictures per auxiliary step."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.patch <= 3 * self.margin:
            raise ValueError(f"margin {self.margin} is too wide for a patch of {self.patch}")
        return self


class Configuration(AuxiliaryTraining):
    """With contrastive predictive coding."""

    cpc: CpcSettings = CpcSettings()
    """Patches and context."""


class Cpc(AuxiliaryClassifier):
    name: ClassVar[str] = "cpc"
    configuration: ClassVar[type[Settings]] = Configuration
    auxiliary_decays: ClassVar[bool] = False

    @classmethod
    def paper_weight(cls, network: str | None) -> float:
        return 10.0

    @classmethod
    def network_settings(
        cls, network: str, preset: str | None, changes: Mapping[str, Any] | None = None
    ) -> Settings:
        return super().network_settings(network, preset, changes).model_copy(update=LIGHT)

    @classmethod
    def unfit(cls, settings: Any, shortest: int, longest: int) -> str | None:
        reason = super().unfit(settings, shortest, longest)
        return reason or _too_small(settings.cpc, crop_side(shortest, settings) // settings.shrink)

    def auxiliary_pictures(self) -> int:
        return self.settings.cpc.batch_size

    def task_layers(self) -> dict[str, nn.Module]:
        from torch import nn

        settings = self.settings.cpc
        width, context = self.network.shared_width, settings.context
        return _initialised(
            {
                "norm": self.network.norms(width, 1),
                "enter": nn.Conv2d(width, context, 1),
                # Rows above and the own row only: what lies below is to be predicted.
                "above": nn.Conv2d(context, context, (2, 3), bias=False),
                "above_out": nn.Conv2d(context, context, 1),
                "residual": nn.ModuleList(
                    nn.ModuleList(nn.Conv2d(context, context, 1, bias=False) for _ in range(2))
                    for _ in range(settings.layers)
                ),
                "leave": nn.Conv2d(context, context, 1),
                "predict": nn.ModuleList(
                    nn.Linear(context, width, bias=False) for _ in range(STEPS)
                ),
            }
        )

    def shared_parameters(self) -> list[nn.Parameter]:
        """The first convolution and the shared groups; of the norms those of this task."""
        network = self.network
        groups = network.layers["groups"][: network.settings.shared_groups]
        norms_of_classes = (".norm1.0.", ".norm2.0.")
        return [
            *network.layers["stem"].parameters(),
            *(
                parameter
                for name, parameter in groups.named_parameters()
                if not any(part in f".{name}" for part in norms_of_classes)
            ),
        ]

    def auxiliary_loss(self, batch: Batch) -> torch.Tensor:
        import torch
        from torch.nn import functional

        patches = self.patches(self.augmented(batch))
        rows, columns = patches.shape[1:3]
        order = torch.randperm(rows * columns, device=patches.device)
        shuffled = patches.flatten(1, 2)[:, order].view_as(patches)
        features = self._features(self.changed(patches))
        negatives = self._features(self.changed(shuffled))
        context = self._context(features).permute(0, 2, 3, 1)
        pairs = []
        for step in range(1, min(STEPS, rows - 1) + 1):
            predicted = self.layers["predict"][step - 1](context[:, : rows - step])
            pairs.append(
                torch.stack(
                    [
                        (predicted * target[:, :, step:].permute(0, 2, 3, 1)).mean(3)
                        for target in (features, negatives)
                    ],
                    -1,
                ).flatten(0, 2)
            )
        scores = torch.cat(pairs).float()
        truth = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        return functional.cross_entropy(scores, truth)

    def patches(self, pictures: torch.Tensor) -> torch.Tensor:
        """(B, rows, columns, 3, patch, patch)."""
        settings = self.settings.cpc
        if reason := _too_small(settings, min(pictures.shape[2:])):
            raise ConfigError(f"model {self.name}: {reason}")
        cut = pictures.unfold(2, settings.patch, settings.stride)
        cut = cut.unfold(3, settings.patch, settings.stride)
        return cut.permute(0, 2, 3, 1, 4, 5).contiguous()

    def changed(self, patches: torch.Tensor) -> torch.Tensor:
        """Each patch with one channel three times, flipped or not, cut at random and padded."""
        import torch
        from torch.nn import functional

        margin = self.settings.cpc.margin
        flat = patches.flatten(0, 2)
        count, channels, side = flat.shape[:3]
        every = torch.arange(count, device=flat.device)

        def draw(high: int) -> torch.Tensor:
            return torch.randint(high, (count,), device=flat.device)

        kept = side - 2 * margin
        along = torch.arange(kept, device=flat.device)
        rows = draw(2 * margin + 1)[:, None] + along
        columns = draw(2 * margin + 1)[:, None] + along
        columns = torch.where(draw(2)[:, None] == 1, columns.flip(1), columns)
        grey = flat[every, draw(channels)]
        cut = grey[every[:, None, None], rows[:, :, None], columns[:, None, :]]
        padded = functional.pad(cut, (margin,) * 4, mode="reflect") if margin else cut
        return padded[:, None].expand(-1, channels, -1, -1).contiguous().view_as(patches)

    def _features(self, patches: torch.Tensor) -> torch.Tensor:
        """(B, D, rows, columns)."""
        shape = self.network.settings
        groups = min(shape.shared_groups, shape.groups)
        hidden = self.network.trunk(patches.flatten(0, 2), AUXILIARY, groups)
        rows = self.network.pooled(self.layers["norm"], hidden, AUXILIARY)
        return rows.view(*patches.shape[:3], -1).permute(0, 3, 1, 2)

    def _context(self, features: torch.Tensor) -> torch.Tensor:
        """(B, context, rows, columns); a place sees its own row and those above."""
        from torch.nn import functional

        layers = self.layers
        hidden = layers["enter"](features.contiguous())
        above = layers["above"](functional.pad(hidden.relu(), (1, 1, 1, 0)))
        hidden = hidden + layers["above_out"](above.relu())
        for first, second in layers["residual"]:
            hidden = hidden + second(first(hidden.relu()).relu())
        return layers["leave"](hidden.relu())


def _too_small(settings: CpcSettings, side: int) -> str | None:
    """Why pictures of this side cannot be cut into patches."""
    if side >= settings.patch + settings.stride:
        return None
    return (
        f"a picture of {side} pixels has no two rows of patches of {settings.patch} at a distance "
        f"of {settings.stride}; lower models.cpc.cpc.patch and models.cpc.cpc.stride"
    )


def _initialised(layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Uniform: He in convolutions, Glorot in the predictors."""
    from torch import nn

    for layer in (part for module in layers.values() for part in module.modules()):
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return layers
