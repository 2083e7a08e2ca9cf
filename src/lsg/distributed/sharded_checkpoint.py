"""Named tensors, some of them sharded, in; a folder that all ranks write together out, and back on any number of ranks.

torch.distributed.checkpoint writes and reads the tensors, each rank its own rows. The folder is there as a whole or
not at all, and holds the digest of each file, so that a damaged one is refused before anything is loaded. All processes
must see the same file system.
"""

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from lsg.distributed.group import Group
from lsg.errors import ConfigurationError
from lsg.files.atomic import OWNER_ONLY_FOLDER, sync_folder, sync_tree

_TENSORS = "tensors"  # the folder of torch.distributed.checkpoint
_OLD = ".old"  # a folder that another one is taking the place of

Digests = dict[str, str]  # of each file, by its name


def save_folder(
    path: Path, tensors: Mapping[str, Tensor], write_rest: Callable[[Path, Digests], None], group: Group
) -> None:
    """All ranks call this. write_rest: writes what is no tensor into the folder, on rank 0, with the files' digests."""
    from torch.distributed import checkpoint

    aside = path.with_name(path.name + ".tmp")

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=OWNER_ONLY_FOLDER)

    def end() -> None:
        write_rest(aside, digests)
        sync_tree(aside)
        _take_place(aside, path)

    group.on_first(begin)
    # A sharded model has a process group, be it of one process.
    checkpoint.save(dict(tensors), checkpoint_id=aside / _TENSORS)
    names = sorted(file.name for file in (aside / _TENSORS).iterdir())
    found = group.everyones(group.together(lambda: _digests(aside, names, group)))
    digests = {name: digest for part in found for name, digest in part.items()}
    group.on_first(end)


def complete_folder(path: Path, group: Group) -> Path:
    """The folder under this name. Brings back the one before it where a crash came as it was replaced."""

    def bring_back() -> None:
        old = path.with_name(path.name + _OLD)
        if not path.exists() and old.is_dir():
            old.rename(path)

    group.on_first(bring_back)
    return path


def check_folder(path: Path, digests: Digests, group: Group) -> None:
    """Refuse a damaged folder. Each rank reads some of the files."""

    def check() -> None:
        for name, digest in _digests(path, sorted(digests), group).items():
            if digest != digests[name]:
                raise ConfigurationError(f"checkpoint '{path}' is damaged: the checksum of '{name}' does not fit")

    group.together(check)


def load_folder(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill these tensors, by name, from the folder. All ranks call this; sharded ones get their own rows."""
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it says so even if asked to
        checkpoint.load(dict(targets), checkpoint_id=path / _TENSORS, no_dist=not dist.is_initialized())


def _digests(path: Path, names: list[str], group: Group) -> Digests:
    """Of this rank's share of the files."""
    found = {}
    for name in names[group.rank :: group.size]:
        if not (path / _TENSORS / name).is_file():
            raise ConfigurationError(f"checkpoint '{path}' is damaged: '{name}' is missing")
        with open(path / _TENSORS / name, "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _take_place(aside: Path, path: Path) -> None:
    """Rename a whole folder. One that is there goes away first; `complete_folder` knows it between the two."""
    old = path.with_name(path.name + _OLD)
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir():
        os.replace(path, old)
    elif path.exists():
        path.unlink()  # a file, of a run on one process
    os.replace(aside, path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)
