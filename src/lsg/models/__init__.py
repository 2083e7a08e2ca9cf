"""Model zoo: plain image classifiers that never mix samples, so that they can be trained privately as they are."""

from lsg.models.cnn import SmallCNN, small_cnn
from lsg.models.wrn import WideResNet, wide_resnet, wrn28

__all__ = ["SmallCNN", "WideResNet", "small_cnn", "wide_resnet", "wrn28"]
