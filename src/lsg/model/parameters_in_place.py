"""Whether a model still computes with the parameters that its rules and its optimizer hold.

`load_state_dict(..., assign=True)`, `module.weight = nn.Parameter(...)` and a new module in place of an old one put
other parameters there. The rules would go on with the old ones, and what the model computes would not be trained.
"""

from typing import Any

from torch import nn

from lsg.distributed.sharded_model import ShardedModel
from lsg.errors import PrivacyError


class ParametersInPlace:
    """Knows where each trained parameter of a model is, and compares."""

    def __init__(self, model: nn.Module, trained: list[nn.Parameter], sharded: ShardedModel | None = None) -> None:
        """sharded: knows what takes a sharded parameter's place while it is gathered."""
        self._sharded = sharded
        self._model, self._trained = model, {id(p): p for p in trained}
        self._known = {id(p): p for p in model.parameters()}  # kept, so that no other object can get their ids
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._places = self._find_places()

    def _find_places(self) -> list[tuple[dict[str, Any], str, Any]]:
        places: list[tuple[dict[str, Any], str, Any]] = []
        for module in self._model.modules():
            places += [(module._modules, name, child) for name, child in module._modules.items()]
            places += [
                (module._parameters, name, p) for name, p in module._parameters.items() if id(p) in self._trained
            ]
        return places

    def check(self) -> None:
        """Raise PrivacyError, naming the parameter that was replaced."""
        if all(self._is_in_place(place.get(name), value) for place, name, value in self._places):
            return
        if self._sharded is not None:
            self._sharded.reshard()
        present = dict(self._model.named_parameters())
        others = [name for name, p in present.items() if p.requires_grad and id(p) not in self._known]
        ids = {id(p) for p in present.values()}
        gone = [self._names[key] for key in self._trained if key not in ids]
        if others or gone:
            raise PrivacyError(
                f"parameter '{(gone or others)[0]}' was replaced after make_private, and its rule and the optimizer "
                "hold the old one: load_state_dict without assign=True, copy values into parameters in place, or "
                "detach first and call make_private again"
            )
        self._places = self._find_places()  # a module was wrapped, by a compiler, say

    def _is_in_place(self, found: Any, value: Any) -> bool:
        if found is value:
            return True
        return self._sharded is not None and found is not None and found is self._sharded.gathered(value)
