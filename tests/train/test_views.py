"""`--views`: several views of an image in a step, resumed to the bit, refused for texts, and told in the statement."""

from dataclasses import replace
from pathlib import Path

import pytest

from lsg import ConfigurationError
from lsg.train.config import RunConfig
from lsg.train.run import run
from tests.support.train_runs import DIGITS, CrashAt, CrashError, same, strict

VIEWS = replace(DIGITS, views=3, epochs=2, max_physical_batch_size=200)


@pytest.mark.parametrize("crash", [CrashAt(step=2), CrashAt(step=4), CrashAt(epoch=1)])
def test_a_crash_costs_nothing(crash: CrashAt, tmp_path: Path) -> None:
    run(VIEWS, tmp_path / "whole")
    with pytest.raises(CrashError):
        run(VIEWS, tmp_path / "run", listener=crash, checkpoint_every=1)
    run(VIEWS, tmp_path / "run", resume=True)
    same(tmp_path / "run", tmp_path / "whole")


def test_the_statement_tells_of_views(tmp_path: Path) -> None:
    run(replace(VIEWS, epochs=1), tmp_path / "views")
    run(replace(DIGITS, epochs=1), tmp_path / "plain")
    views, plain = (strict(tmp_path / name / "privacy.json") for name in ("views", "plain"))
    assert views["views"] == 3 and "views" not in plain
    assert (
        "each record's contribution to a step, the average over 3 random views of it, to an L2 norm"
        in (views["statement"])
    )
    assert "view" not in plain["statement"]
    # Records are drawn, not views: the same rate, batch and steps.
    for key in ("records", "sample_rate", "expected_batch_size", "steps", "epsilon"):
        assert views[key] == plain[key]


def test_texts_have_no_views(texts: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--views 2: only images have views, and --task sst2 has texts"):
        run(replace(texts, views=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"views": 0}, "--views 0 must be at least 1"),
        ({"views": 300}, "max_physical_batch_size=200 counts rows, and with views=300"),
    ],
)
def test_impossible_views_are_refused(changed: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(replace(VIEWS, **changed), tmp_path / "run")
