"""One file in, one file out: weights, optimizer and engine of a run, to continue it bit by bit.

It is a safetensors file. Its metadata hold what is not a tensor, as JSON, and the SHA-256 of the whole file, computed
with zeros in its own place. Nothing in it is ever executed.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lsg.distributed.sharded_checkpoint import check_folder, complete_folder, load_folder, save_folder
from lsg.engine import PrivacyEngine
from lsg.errors import ConfigurationError, LsgError, first_line
from lsg.files.atomic import create_secret, sync_folder
from lsg.files.foreign_files import open_regular
from lsg.files.foreign_values import json_value
from lsg.step.parts_of_state import Fill, check_parts, fill_from, parts_of, put_back, take_apart
from lsg.step.run_state import RunState

VERSION = 2
_REST = "run.safetensors"  # in the folder of a sharded run: all but its large tensors
_KEY = "lsg-checkpoint"  # of the metadata; its value is the digest, a blank, and JSON
_START = (
    b'{"__metadata__":{"' + _KEY.encode() + b'":"'
)  # how the file begins, after eight bytes with its header's length
_PLACE, _NO_DIGEST = 8 + len(_START), b"0" * 64  # where the digest stands, and what stands there while it is computed


def save_checkpoint(
    path: str | os.PathLike[str], *, engine: PrivacyEngine, extra: Mapping[str, Any] | None = None
) -> None:
    """Save a run between two batches, at once or not at all: a crash leaves the old file or the new one.

    extra: what else the loop needs (a learning-rate scheduler's state, say): numbers, strings, tensors, lists, dicts.
    The file holds the run's random streams: keep it as secret as the data.

    Of several processes each has to call this, after the same logical step (`optimizer.stepped`; inside of a logical
    batch it is refused). Rank 0 writes the file, with its `extra` and the dropout streams of all; what it cannot write
    is raised on all.

    Of a model that is sharded (`fully_shard`) path becomes a folder, which all ranks write, each its own rows.
    """
    path, run = Path(path), engine.run
    if run.optimizer.sharded is not None:
        run.optimizer.sharded.reshard()
        _save_folder(path, run, dict(extra or {}))
        return
    state = {
        "model": run.module.state_dict(),
        "optimizer_class": type(run.optimizer.original_optimizer).__qualname__,
        "optimizer": run.optimizer.state_dict(),
        "engine": run.state_of_all_ranks(),
        "extra": dict(extra or {}),
    }
    run.group.on_first(lambda: _write(path, state))


def _save_folder(path: Path, run: RunState, extra: dict[str, Any]) -> None:
    parts = take_apart(run.module, run.optimizer.original_optimizer)
    state = {"parts": parts.rest, "engine": run.state_of_all_ranks(), "extra": extra}
    save_folder(
        path, parts.tensors, lambda folder, digests: _write(folder / _REST, {**state, "digests": digests}), run.group
    )


def _write(path: Path, state: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    content = json.dumps({"version": VERSION, "state": _Writer(tensors).encode(state, "")})
    aside = path.with_name(path.name + ".tmp")
    try:
        create_secret(aside)
        save_file(tensors, aside, {_KEY: f"{_NO_DIGEST.decode()} {content}"})
        with open(aside, "r+b") as file:
            assert file.read(_PLACE + len(_NO_DIGEST))[8:] == _START + _NO_DIGEST
            file.seek(_PLACE)
            file.write(_digest(aside))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except SafetensorError as error:
        raise OSError(f"checkpoint '{path}' could not be written: {error}") from None
    finally:
        aside.unlink(missing_ok=True)


def load_checkpoint(path: str | os.PathLike[str], *, engine: PrivacyEngine, replay: bool = True) -> dict[str, Any]:
    """Continue a saved run with this engine, its model and its optimizer; returns `extra`.

    The engine must be attached by `make_private` with the arguments of that run. All is checked before any of it is
    changed; a damaged file, or a run that is not this one, is refused. replay: see `PrivacyEngine.load_state_dict`.

    Of several processes each has to call this, and reads the file. They need not be as many as those that saved it:
    with another number sums are rounded otherwise, dropout streams are new, and steps that the ledger has beyond the
    file are charged, not repeated.

    A folder of a sharded run is read by sharded models and by others, a file too, on any number of processes.
    """
    path, run = complete_folder(Path(path), engine.run.group), engine.run
    if run.optimizer.sharded is not None or path.is_dir():
        return _load_parts(path, engine, replay=replay)

    def check_parts() -> None:
        _check_model(state["model"], run.module.state_dict())
        _check_optimizer(state, run.optimizer)

    state, digest = run.group.together(lambda: _read(path))
    with damage_named(path):
        try:
            run.group.check_alike({"the checksum": digest}, "Every rank must read the same file")
            extra: dict[str, Any] = {**state["extra"]}
            run.group.together(check_parts)
            run.check(state["engine"])
        except LsgError as error:
            raise type(error)(f"checkpoint '{path}': {error}") from None
        run.module.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        engine.load_state_dict(state["engine"], replay=replay)
    return extra


def _load_parts(path: Path, engine: PrivacyEngine, *, replay: bool) -> dict[str, Any]:
    """Of a folder, or of a file for a sharded model."""
    run = engine.run
    module, optimizer, in_folder = run.module, run.optimizer.original_optimizer, path.is_dir()
    if run.optimizer.sharded is not None:
        run.optimizer.sharded.reshard()
    state, digest = run.group.together(lambda: _read(path / _REST if in_folder else path))
    try:
        run.group.check_alike({"the checksum": digest}, "Every rank must read the same checkpoint")
        if in_folder:
            check_folder(path, state["digests"], run.group)
            rest = state["parts"]
            fill: Fill = partial(load_folder, path)
        else:
            parts = run.group.together(lambda: parts_of(state, module, optimizer))
            rest, fill = parts.rest, fill_from(parts.tensors)
        run.group.together(lambda: check_parts(rest, module, optimizer))
        run.check(state["engine"])
    except LsgError as error:
        raise type(error)(f"checkpoint '{path}': {error}") from None
    put_back(rest, fill, module, optimizer)
    engine.load_state_dict(state["engine"], replay=replay)
    extra: dict[str, Any] = state["extra"]
    return extra


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Around what reads a file whose checksum fits: somebody may have made both. What it lacks is one clear error."""
    try:
        yield
    except (LsgError, OSError):
        raise
    except Exception as error:  # of as many kinds as there are ways to leave something out
        raise ConfigurationError(
            f"checkpoint '{path}' is damaged, or was not made by lsg ({type(error).__name__}: {first_line(error):.200})"
        ) from None


# --- the file -------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The verified content of a file, and its checksum."""
    path.stat()  # FileNotFoundError, as of any file
    with open_regular(path) as file:
        start = file.read(_PLACE)
        digest = file.read(len(_NO_DIGEST))
    if start[8:] != _START:
        raise ConfigurationError(f"'{path}' is not a checkpoint of lsg, or its beginning is damaged")
    if digest != _digest(path):
        raise ConfigurationError(f"checkpoint '{path}' is damaged: its checksum does not fit its content")
    with damage_named(path), safe_open(path, framework="pt") as file:
        content = json_value(file.metadata()[_KEY][len(_NO_DIGEST) :])
        if content["version"] != VERSION:
            raise ConfigurationError(
                f"checkpoint '{path}' has version {content['version']}, but this lsg reads version {VERSION}"
            )
        return _decode(content["state"], file), digest.decode()


def _digest(path: Path) -> bytes:
    """SHA-256 of the file with zeros in the digest's place."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(_PLACE) + _NO_DIGEST)
        file.seek(_PLACE + len(_NO_DIGEST))
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest().encode()


# --- plain values and tensors -> JSON and named tensors ---------------------------------------------------------------


class _Writer:
    """Values become JSON; tensors go aside under the path that leads to them. A shared tensor is written once."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._storages: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, list):
            return [self.encode(item, f"{path}/{number}") for number, item in enumerate(value)]
        if isinstance(value, tuple):
            return {"tuple": self.encode(list(value), path)}
        if isinstance(value, Mapping):  # keys of an optimizer's state are numbers, which JSON would turn into strings
            return {"dict": [[self.encode(key, path), self.encode(v, f"{path}/{key}")] for key, v in value.items()]}
        raise ConfigurationError(
            f"a checkpoint cannot hold {path.lstrip('/')}, a {type(value).__name__}: "
            "only numbers, strings, tensors, lists, tuples and dicts"
        )

    def _tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        tensor = tensor.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in self._known:
            return self._known[key]
        # Dense tensors keep their memory layout (channels last, say): they are written with their axes in its order.
        order = sorted(range(tensor.dim()), key=lambda axis: tensor.stride()[axis], reverse=True)
        if not tensor.permute(order).is_contiguous():
            order = list(range(tensor.dim()))
        name = path.lstrip("/")
        while name in self._tensors:
            name += "'"
        plain = tensor.permute(order).contiguous().cpu()
        storage = plain.untyped_storage()
        if (
            storage.nbytes() != plain.nbytes or storage.data_ptr() in self._storages
        ):  # safetensors refuses shared memory
            plain = plain.clone()
        self._storages.add(storage.data_ptr())
        self._tensors[name] = plain
        self._known[key] = {"tensor": name, "order": order}
        return self._known[key]


def _decode(value: Any, file: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item, file) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        order = value["order"]
        back = [order.index(axis) for axis in range(len(order))]
        return file.get_tensor(value["tensor"]).clone().permute(back)
    if "tuple" in value:
        return tuple(_decode(value["tuple"], file))
    return {_decode(key, file): _decode(item, file) for key, item in value["dict"]}


# --- does it fit? ---------------------------------------------------------------------------------------------------


def _check_model(saved: dict[str, Any], own: Mapping[str, Any]) -> None:
    if saved.keys() != own.keys():
        name = sorted(saved.keys() ^ own.keys())[0]
        raise ConfigurationError(f"'{name}' is in {'the file' if name in saved else 'the model'} only")
    for name, value in own.items():
        if isinstance(value, Tensor) and (saved[name].shape, saved[name].dtype) != (value.shape, value.dtype):
            raise ConfigurationError(
                f"'{name}' is {saved[name].dtype} {list(saved[name].shape)} in the file, "
                f"but {value.dtype} {list(value.shape)} in the model"
            )


def _check_optimizer(state: dict[str, Any], own: Any) -> None:
    kind = type(own.original_optimizer).__qualname__
    if state["optimizer_class"] != kind:
        raise ConfigurationError(f"the optimizer is {state['optimizer_class']} in the file, but {kind} here")
    saved, groups = state["optimizer"]["param_groups"], own.state_dict()["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        raise ConfigurationError("the optimizer's parameter groups differ from those in the file")
