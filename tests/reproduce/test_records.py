"""Results folded into one file: read as the folders were, refused where they are broken."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lsg.errors import ConfigurationError
from lsg.reproduce.records import fold, read_records
from lsg.reproduce.store import Store, cell_name
from lsg.train.config import RunConfig
from tests.support.fake_run import FakeRun

LSG = RunConfig(task="sst2", model="roberta-base", epsilon=3.3)


def trained(folder: Path, *configs: RunConfig) -> Store:
    store = Store(folder)
    for config in configs:
        store.train(config, FakeRun())
    return store


def test_folded_cells_count_as_the_folders_did(tmp_path: Path) -> None:
    before = trained(tmp_path / "cells", LSG, replace(LSG, seed=1)).summary(LSG, range(2))
    result = json.loads((tmp_path / "cells" / cell_name(LSG) / "result.json").read_text())
    file = fold(tmp_path / "cells")
    assert file == tmp_path / "cells.jsonl" and list((tmp_path / "cells").iterdir()) == []
    assert read_records(file)[cell_name(LSG)] == {"name": cell_name(LSG), **result}
    after = Store(tmp_path / "cells")
    assert after.summary(LSG, range(2)) == before and after.outcome(replace(LSG, seed=2)) is None
    with pytest.raises(
        ConfigurationError, match=r"cells\.jsonl: sst2-lsg-r8-p0\.5-eps3\.3-seed0: made with lr = 0\.001"
    ):
        after.outcome(replace(LSG, lr=0.002))


def test_cells_run_later_are_added(tmp_path: Path) -> None:
    trained(tmp_path / "cells", LSG)
    fold(tmp_path / "cells")
    trained(tmp_path / "cells", replace(LSG, seed=1))
    assert list(read_records(fold(tmp_path / "cells"))) == [cell_name(LSG), cell_name(replace(LSG, seed=1))]


def test_a_folder_with_an_unfinished_cell_is_left_alone(tmp_path: Path) -> None:
    store = trained(tmp_path / "cells", LSG)
    begun = store.path(replace(LSG, seed=1))
    begun.mkdir()
    with pytest.raises(ConfigurationError, match=r"seed1: not complete"):
        fold(tmp_path / "cells")
    assert store.outcome(LSG) is not None and begun.is_dir() and not (tmp_path / "cells.jsonl").exists()


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"name": "a", "name": "b"}', '{"name": "first"}'])
def test_a_line_that_is_no_record_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    file.write_text(f'{{"name": "first"}}\n{line}\n')
    with pytest.raises(ConfigurationError, match=r"cells\.jsonl, line 2: "):
        read_records(file)
