"""`--views`: several views of an image in a step, resumed to the bit, refused for texts, and told in the statement."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lsg import DPSGD, ConfigurationError, PrivacyEngine
from lsg.models import standardised_wrn
from lsg.tasks.data import Images
from lsg.tasks.encoded import as_loader, encode_images
from lsg.tasks.image_views import ImageViews
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


def test_a_run_that_is_older_than_the_option_goes_on(tmp_path: Path) -> None:
    config = replace(DIGITS, epochs=2)
    run(config, tmp_path / "whole")
    with pytest.raises(CrashError):
        run(config, tmp_path / "run", listener=CrashAt(step=2), checkpoint_every=1)
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("views = 1\n", ""))
    assert "views" not in file.read_text()
    run(config, tmp_path / "run", resume=True)
    same(tmp_path / "run", tmp_path / "whole")


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


def test_a_record_with_all_its_views_counts_once() -> None:
    """The clipped sum is the one of records, each the average of its adjacent views, none longer than C. So adding or
    removing a record moves it by at most C."""
    torch.manual_seed(0)
    views, bound = 3, 0.01
    pixels = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    images = encode_images(Images(pixels, torch.arange(12)), (0.5,), (0.5,), torch.device("cpu"))
    model = standardised_wrn(10, 1, 12, 3, groups=4).double()
    plain = copy.deepcopy(model)
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=as_loader(ImageViews(images, views, flip=True), 6),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        method=DPSGD(),
        views=views,
        noise_generator=torch.Generator().manual_seed(1),
    )
    x, y = next(iter(loader))
    assert y[::views].unique().tolist() == y[::views].tolist()  # a label is a record here
    assert torch.equal(y, y[::views].repeat_interleave(views))
    F.cross_entropy(model(x.double()), y).backward()
    optimizer.step()
    wanted = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for record in range(len(x) // views):
        plain.zero_grad()
        own = slice(record * views, (record + 1) * views)
        F.cross_entropy(plain(x[own].double()), y[own]).backward()
        gradient = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradient.values()]).norm()
        assert norm > bound
        for name, g in gradient.items():
            wanted[name] += g * (bound / norm)
    after = dict(model.named_parameters())
    for name, before in plain.named_parameters():
        moved = (before - after[name]) * optimizer.expected_batch_size
        torch.testing.assert_close(moved, wanted[name], rtol=1e-6, atol=1e-10)
    engine.detach()
