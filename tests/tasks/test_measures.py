"""What a score is, in words and in order."""

import math

import pytest

from lsg.tasks.measures import ACCURACY, LARGEST, PERPLEXITY, measure_of, perplexity
from lsg.tasks.names import KINDS


def test_each_task_has_one_measure() -> None:
    assert {task for task in KINDS if measure_of(task) is PERPLEXITY} == {"generate"}
    assert measure_of("forgotten") is ACCURACY and measure_of(["no name"]) is ACCURACY


def test_scores_are_shown_and_compared_as_what_they_are() -> None:
    assert ACCURACY.labelled(0.914) == "score 91.40 %" and ACCURACY.is_better(0.9, 0.8)
    assert PERPLEXITY.labelled(23.456) == "perplexity 23.46 (lower is better)" and PERPLEXITY.is_better(23, 24)
    assert PERPLEXITY.text(LARGEST) == "1e+30" and ACCURACY.shown(0.5) == 50 and PERPLEXITY.shown(0.5) == 0.5


def test_perplexity_is_a_finite_number_whatever_the_model_says() -> None:
    assert perplexity(-3.0 * math.log(5), 3) == pytest.approx(5)
    assert perplexity(-1e9, 3) == perplexity(-math.inf, 3) == perplexity(math.nan, 3) == LARGEST
    assert perplexity(0.0, 0) == 1
