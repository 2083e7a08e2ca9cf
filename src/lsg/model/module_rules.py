"""The modules of a model that run through rules: which ones they are, and those that are added while it is checked."""

from torch import nn

from lsg.layers.fallback import fallback_forward
from lsg.layers.install import install, patch_of, uninstall
from lsg.layers.parameter_treatments import Treatments, Use
from lsg.layers.patched_module import Batch, KnownCalls, PatchedModule
from lsg.layers.registry import faster_frozen
from lsg.model.root_forward import RootForward
from lsg.parameters.slot import Slot

_NOTHING_KNOWN = KnownCalls()


class ModuleRules:
    """Puts rules on a model's modules, until `remove`. `trained`: those that the check has to look at."""

    def __init__(
        self, model: nn.Module, treatments: Treatments, slots: dict[str, Slot], batch: Batch, *, kernels: bool
    ) -> None:
        """kernels: whether modules that train nothing get faster forwards, too."""
        self._model, self._slots, self._batch = model, slots, batch
        self.trained: list[tuple[nn.Module, PatchedModule]] = []
        for use in treatments.uses:
            patched = PatchedModule(
                use.name, _slots_of(use, treatments, slots), batch, use.rule.forward, use.rule.method
            )
            install(use.module, patched)
            self.trained.append((use.module, patched))
        self._for_speed = install_faster(model, batch) if kernels else []

    def remove(self) -> None:
        for module, patched in (*self._for_speed, *self.trained):
            uninstall(module, patched)

    def begin(self, known: dict[PatchedModule, KnownCalls]) -> None:
        """A forward of the model begins, of which these calls are known."""
        for _, patched in self.trained:
            patched.begin(known.get(patched, _NOTHING_KNOWN))  # one that was added since is unknown

    def restart(self) -> None:
        """Calls of layers are numbered from the beginning of each run."""
        for _, patched in self.trained:
            patched.restart()

    def run_each_sample(
        self, place: nn.Module | PatchedModule, parameter: nn.Parameter | None, root: RootForward | None
    ) -> bool:
        """Let a module, or the one around a patched module, run sample by sample, with a parameter of another one that
        it uses among its own. Returns whether that is new.

        root: the forward of the model itself, None where that cannot run so.
        """
        module = self._around(place) if isinstance(place, PatchedModule) else place
        if module is None or (module is self._model and root is None):
            return False
        slots = [] if parameter is None else [slot for slot in self._slots.values() if slot.in_use is parameter]
        patched = patch_of(module)
        if patched is not None and (patched.rule is not fallback_forward or not slots):
            return False
        if patched is None:
            name = next(name for name, other in self._model.named_modules() if other is module)
            patched = PatchedModule(name or type(module).__name__, {}, self._batch, fallback_forward)
            if root is not None and module is self._model:
                root.put_under(patched)
            else:
                install(module, patched)
            self.trained.append((module, patched))
        if slots:
            path = next(name for name, p in module.named_parameters(remove_duplicate=False) if p is parameter)
            keys = [path] if len(slots) == 1 else [f"{path}[{i}]" for i in range(len(slots))]
            patched.add_slots(dict(zip(keys, slots, strict=True)))
        return True

    def _around(self, patched: PatchedModule) -> nn.Module | None:
        """The module whose forward calls a patched module's module."""
        module = next(module for module, other in self.trained if other is patched)
        name = next((name for name, other in self._model.named_modules() if other is module), "")
        while name:
            name = name.rpartition(".")[0]
            around = self._model.get_submodule(name)
            if type(around).forward is not nn.Module.forward:  # lists and dictionaries of modules have none
                return around
        return None


def _slots_of(use: Use, treatments: Treatments, slots: dict[str, Slot]) -> dict[str, Slot]:
    """A module's slots by local name; three for a split weight."""
    found: dict[str, Slot] = {}
    for local, name in use.parameters.items():
        parts = treatments.splits.get(name, [name])
        keys = [local] if parts == [name] else [f"{local}[{i}]" for i in range(len(parts))]
        found |= {key: slots[part] for key, part in zip(keys, parts, strict=True)}
    return found


def install_faster(model: nn.Module, batch: Batch) -> list[tuple[nn.Module, PatchedModule]]:
    """Faster forwards on modules that train nothing."""
    found = []
    for name, module in model.named_modules():
        forward = faster_frozen(module)
        if forward is not None and patch_of(module) is None:
            found.append((module, PatchedModule(name, {}, batch, forward, for_speed=True)))
            install(*found[-1])
    return found
