"""What a reviewer broke, one case each: sums that ranks see otherwise, records that several have, steps tried again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lsg.accounting.ledger import Ledger
from lsg.distributed.group import Group
from lsg.errors import ConfigurationError, PrivacyError, ReplicaError
from lsg.step.exchange import Place, of_all_ranks
from tests.distributed.runs import Ended, Setting, begin, distance, ended, train
from tests.support.ranks import on_ranks

SETTING = Setting(epochs=1, noise_multiplier=0.5)


def refused(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def the_largest_bound() -> tuple[int, float]:
    group = Group.current()
    return of_all_ranks(1 + group.rank, 0.25 * (1 + group.rank), Place(1, dict, drawn=3, share=1 + group.rank), group)


def a_batch_from_elsewhere() -> str:
    run = begin(SETTING)
    F.cross_entropy(run.model(torch.zeros(1, 7, dtype=torch.long)), torch.zeros(1, dtype=torch.long)).backward()
    said = refused(PrivacyError, run.optimizer.step)
    run.engine.detach()
    return said


def a_step_tried_again(folder: Path, method: str = "lsg") -> Ended:
    """The ledger's disk is full once, when the step was summed over all ranks already."""
    run = begin(replace(SETTING, method=method), ledger=folder / method)
    record, failures = Ledger.record, [True]

    def fails_once(self: Ledger, **facts: Any) -> None:
        if failures:
            failures.pop()
            raise OSError("no space left")
        record(self, **facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record", fails_once)
        for tokens, labels in run.loader:
            F.cross_entropy(run.model(tokens), labels).backward()
            try:
                run.optimizer.step()
            except OSError:
                run.optimizer.step()
    result = ended(run, [])
    run.engine.detach()
    return result


def a_refused_step_with_other_noise_each(folder: Path) -> str:
    """The same numbers times two standard deviations on one sum: together they would tell it."""
    run = begin(SETTING, ledger=folder / "other-noise")

    def disk_is_full(self: Ledger, **facts: Any) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "record", disk_is_full)
        batches = iter(run.loader)
        tokens, labels = next(batches)
        F.cross_entropy(run.model(tokens), labels).backward()
        while not run.optimizer.clock.batch.last:
            run.optimizer.step()
            tokens, labels = next(batches)
            F.cross_entropy(run.model(tokens), labels).backward()
        assert refused(OSError, run.optimizer.step) == "no space left"
    run.optimizer.noise_multiplier = 1.0 + Group.current().rank
    said = refused(ReplicaError, run.optimizer.step)
    assert len(run.engine.accountant) == 0
    run.engine.detach()
    return said


def data_in_another_order() -> str:
    return refused(ConfigurationError, lambda: begin(Setting(order=Group.current().rank + 1)))


def a_state_inside_a_logical_batch() -> str:
    run = begin(Setting(batch_size=40, physical=2))
    for tokens, labels in run.loader:
        F.cross_entropy(run.model(tokens), labels).backward()
        run.optimizer.step()
        return refused(ConfigurationError, run.engine.state_dict)
    raise AssertionError("no batch")


def books_that_differ() -> str:
    run = begin(SETTING)
    if Group.current().first:
        run.engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)

    def loop() -> None:
        for tokens, labels in run.loader:
            F.cross_entropy(run.model(tokens), labels).backward()
            run.optimizer.step()

    return refused(ReplicaError, loop)


def everything(folder: Path) -> dict[str, Any]:
    return {
        "bound": the_largest_bound(),
        "again": a_step_tried_again(folder),
        "undisturbed": train(SETTING),
        "elsewhere": a_batch_from_elsewhere(),
        "order": data_in_another_order(),
        "other noise": a_refused_step_with_other_noise_each(folder),
        "non-private again": a_step_tried_again(folder, "non-private"),
        "non-private": train(replace(SETTING, method="non-private")),
        "state": a_state_inside_a_logical_batch(),
    }


def test_what_a_reviewer_broke(tmp_path: Path) -> None:
    for found in on_ranks(2, everything, tmp_path):
        assert found["bound"] == (3, 0.5)
        assert distance(found["again"], found["undisturbed"]) == 0
        assert distance(found["non-private again"], found["non-private"]) == 0
        assert "noise_multiplier differs between the processes" in found["other noise"]
        assert found["again"].steps == found["undisturbed"].steps
        assert "did not hand out, with 2 processes" in found["elsewhere"]
        assert "record 0 of the data set, its '0', differs between the processes" in found["order"]
        assert "a logical batch is under way" in found["state"]


def test_books_that_differ_end_the_run_before_a_release() -> None:
    assert all("what was spent" in said for said in on_ranks(2, books_that_differ))
