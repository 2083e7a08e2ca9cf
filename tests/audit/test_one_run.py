"""One training run: consistent where the engine is intact, flagged where noise is missing."""

from lsg.audit.one_run import audit_one_run
from lsg.audit.report import audited_method
from tests.support import broken

SMALL = {"epsilon": 1.0, "delta": 1e-5, "canaries": 100, "epochs": 15, "seed": 0, "alpha": 0.01}


def test_an_intact_run_is_consistent() -> None:
    found = audit_one_run(audited_method("dpsgd"), "flat", **SMALL)
    assert found.violations == [] and found.guesses == 50 and found.claimed <= 1.0
    assert 30 < found.was_in.sum() < 70 and len(found.scores) == 100


def test_a_run_without_noise_is_flagged() -> None:
    with broken.no_noise():
        found = audit_one_run(audited_method("dpsgd"), "flat", **SMALL)
    assert found.correct > 40
    assert found.violations and "guesses were right" in found.violations[0]
