"""Layers that take images: (rows, channels, *space), where a sample may have one row or several."""

from torch import Tensor

from lsg.errors import PrivacyError
from lsg.layers.patched_module import PatchedModule
from lsg.layers.samples import WHOLE, Axis, SampleAxis, Shared


class Rows:
    """x: an input as rows of images. `carrier` repeats a carrier for the rows of its sample, and autograd adds up what
    they give; `back` brings a result into the shape that the input had.
    """

    def __init__(self, patched: PatchedModule, axis: Axis, x: Tensor, features: int) -> None:
        """features: trailing dimensions that belong to the layer."""
        self._axis, self._size = axis, patched.size
        self._alone = axis is WHOLE and x.dim() == features  # one image without a dimension for rows
        if isinstance(axis, Shared):
            self.x = axis.split(x if x.dim() > features else x.unsqueeze(0), self._size)
        elif axis is WHOLE:
            own = patched.split(x, axis)  # with one dimension more, of the only sample
            self.x = own if self._alone else own.squeeze(0)
        else:
            self.x = x
        if isinstance(axis, SampleAxis) and (axis.dim != 0 or x.dim() != features + 1):
            raise PrivacyError(
                f"layer '{patched.name}' got an input of shape {tuple(x.shape)} with samples in dimension {axis.dim}: "
                "give it images with the samples first"
            )

    def carrier(self, carrier: Tensor) -> Tensor:
        if isinstance(self._axis, SampleAxis):
            return self._axis.rows(carrier, self.x, self._size)
        return carrier.expand(self.x.shape[0], *carrier.shape[1:]) if self._axis is WHOLE else carrier

    def back(self, y: Tensor) -> Tensor:
        return y.squeeze(0) if self._alone else y
