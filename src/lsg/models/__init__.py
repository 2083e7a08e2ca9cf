"""Model zoo: plain image classifiers that never mix samples, so that they can be trained privately as they are."""

from lsg.models.cnn import SmallCNN, small_cnn
from lsg.models.scatter import ScatterClassifier, scatter_cnn, scatter_linear, scatter_resnet
from lsg.models.standardised_wrn import StandardisedWideResNet, standardised_wrn
from lsg.models.wrn import WideResNet, wide_resnet, wrn28

__all__ = [
    "ScatterClassifier",
    "SmallCNN",
    "StandardisedWideResNet",
    "WideResNet",
    "scatter_cnn",
    "scatter_linear",
    "scatter_resnet",
    "small_cnn",
    "standardised_wrn",
    "wide_resnet",
    "wrn28",
]
