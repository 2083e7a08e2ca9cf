"""A model's fixed front: its features are computed once, the same numbers come out, and the model is saved with it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lsg.models.scattering import Scattering
from lsg.tasks.models import load_trained_image_model
from lsg.train.run import run
from tests.support.train_runs import DIGITS, CrashAt, CrashError, rows, same

SCATTER = replace(DIGITS, model="scatter-linear", lr=1.0, epochs=2)


@pytest.fixture
def transforms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of the transform got."""
    calls: list[int] = []
    own = Scattering.forward

    def forward(self: Scattering, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return own(self, x)

    monkeypatch.setattr(Scattering, "forward", forward)
    return calls


def test_each_image_is_transformed_once(transforms: list[int], tmp_path: Path) -> None:
    run(SCATTER, tmp_path / "run")
    assert sum(transforms) == 1797 + 1  # all of digits; one more to see how large features are


def test_the_same_is_learnt_as_batch_by_batch(
    transforms: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(SCATTER, tmp_path / "once")
    monkeypatch.setattr("lsg.tasks.image_features.MOST_BYTES", 0)
    run(SCATTER, tmp_path / "each")
    assert sum(transforms) > 3 * 1797
    once, each = rows(tmp_path / "once"), rows(tmp_path / "each")
    assert [row["loss"] for row in once] == pytest.approx([row["loss"] for row in each], rel=1e-4)


def test_the_saved_model_classifies_images(tmp_path: Path) -> None:
    result = run(SCATTER, tmp_path / "run")
    model = load_trained_image_model(tmp_path / "run" / "model").eval()
    from lsg.tasks.digits import digits

    data = digits()
    pixels = (255 * data.test_images).round() / 255
    with torch.no_grad():
        right = (model(pixels).argmax(1) == data.test_labels).double().mean()
    assert float(right) == pytest.approx(result.score, abs=0.003)
    assert result.score > 0.5


def test_a_crash_costs_nothing(tmp_path: Path) -> None:
    run(SCATTER, tmp_path / "whole")
    with pytest.raises(CrashError):
        run(SCATTER, tmp_path / "run", listener=CrashAt(step=4), checkpoint_every=1)
    run(SCATTER, tmp_path / "run", resume=True)
    same(tmp_path / "run", tmp_path / "whole")


def test_features_of_views_are_computed_once_too(transforms: list[int], tmp_path: Path) -> None:
    config = replace(SCATTER, views=3)
    result = run(config, tmp_path / "whole")
    assert sum(transforms) == 3 * result.privacy["records"] + (1797 - result.privacy["records"]) + 1
    assert result.privacy["views"] == 3
    with pytest.raises(CrashError):
        run(config, tmp_path / "run", listener=CrashAt(step=4), checkpoint_every=1)
    run(config, tmp_path / "run", resume=True)
    same(tmp_path / "run", tmp_path / "whole")


def test_views_are_transformed_in_each_step_where_memory_is_short(
    transforms: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lsg.tasks.image_features.MOST_BYTES", 0)
    result = run(replace(SCATTER, views=2), tmp_path / "run")
    assert sum(transforms) > 4 * 1000 and result.privacy["views"] == 2
