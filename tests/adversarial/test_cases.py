"""Every hand-written attack ends as it must, with every method."""

import pytest

from tests.adversarial.cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_must_happen_happens(case: Case) -> None:
    for outcome in case.run():
        assert case.accepts(outcome), f"must be {case.must}: {outcome}"


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 80
