"""A step that fails after its batch was summed: the batch stays in the sum once, whatever the loop does next."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lsg.accounting.ledger import Ledger
from lsg.errors import PrivacyError
from tests.distributed.runs import Setting, begin

SETTING = Setting(epochs=1, physical=None, batch_size=20)


def test_another_backward_of_a_batch_whose_step_failed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(SETTING, ledger=tmp_path / "ledger")
    record, failures = Ledger.record, [True]

    def fails_once(self: Ledger, **facts: Any) -> None:
        if failures:
            failures.pop()
            raise OSError("no space left")
        record(self, **facts)

    monkeypatch.setattr(Ledger, "record", fails_once)
    for tokens, labels in run.loader:
        loss = F.cross_entropy(run.model(tokens), labels)
        loss.backward()
        if not failures:
            run.optimizer.step()
            continue
        with pytest.raises(OSError, match="no space left"):
            run.optimizer.step()
        before = run.optimizer.gradients.sum.vector.clone()
        F.cross_entropy(run.model(tokens), labels).backward()
        with pytest.raises(PrivacyError, match="in the sum already"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        assert torch.equal(run.optimizer.gradients.sum.vector, before)
        run.optimizer.step()
    assert len(run.engine.accountant) == run.loader.steps(1)
