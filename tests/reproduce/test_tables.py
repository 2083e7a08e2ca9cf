"""Tables: ours beside the paper's, for people and for machines."""

import csv
import io

from lsg.reproduce.paper_results import TABLE1, TABLE2
from lsg.reproduce.store import Summary
from lsg.reproduce.tables import Entry, Panel, accuracy_text, comma_separated, curves_comma_separated, markdown
from lsg.train.config import RunConfig

LSG = RunConfig(task="sst2", model="roberta-base", epsilon=3.3)
DPSGD = RunConfig(task="sst2", model="roberta-base", epsilon=3.3, method="dpsgd")
THREE = Summary(seeds=3, mean=90.44, std=0.25, curve=(50.0, 90.44))
PANEL = Panel("SST-2", "method", ("ε=3.3",), {"LSG": [Entry(LSG, THREE, 90.4)], "DPSGD": [Entry(DPSGD, None, None)]})


def test_an_accuracy_says_how_many_seeds_it_is_of() -> None:
    assert accuracy_text(THREE) == "90.4 ± 0.2 (n=3)"
    assert accuracy_text(Summary(1, 88.0, None, ())) == "88.0 (n=1)"
    assert accuracy_text(None) == "-"


def test_markdown_has_the_papers_number_beside_ours() -> None:
    page = markdown("Title", [PANEL], ["a note"])
    assert "| method | ε=3.3, ours | ε=3.3, paper |" in page
    assert "| LSG | 90.4 ± 0.2 (n=3) | 90.4 |" in page
    assert "| DPSGD | - | - |" in page
    assert page.startswith("# Title\n") and page.endswith("- a note\n")


def test_csv_has_a_line_an_entry() -> None:
    lsg, dpsgd = csv.DictReader(io.StringIO(comma_separated([PANEL])))
    assert (lsg["rank"], lsg["sparsity"], lsg["seeds"], lsg["accuracy_mean"]) == ("8", "0.5", "3", "90.440")
    assert (lsg["accuracy_std"], lsg["paper_accuracy"], lsg["target_epsilon"]) == ("0.250", "90.4", "3.3")
    assert (dpsgd["rank"], dpsgd["seeds"], dpsgd["accuracy_mean"], dpsgd["paper_accuracy"]) == ("", "0", "", "")


def test_curves_have_a_line_an_epoch() -> None:
    rows = list(csv.DictReader(io.StringIO(curves_comma_separated([(LSG, THREE)]))))
    assert [(row["epoch"], row["accuracy_mean"]) for row in rows] == [("1", "50.000"), ("2", "90.440")]


def test_the_papers_numbers_are_complete() -> None:
    for task in TABLE1.values():
        assert task.keys() == {(rank, p) for rank in (2, 4, 8, None) for p in (0.0, 0.1, 0.3, 0.5)}
    assert max(TABLE1["sst2"], key=lambda place: TABLE1["sst2"][place]) == (8, 0.5)  # bold in the paper
    assert max(TABLE1["qqp"], key=lambda place: TABLE1["qqp"][place]) == (2, 0.3)
    for epsilon in (0.8, 1.7, 3.3, 6.8):
        assert max(TABLE2, key=lambda method: TABLE2[method][epsilon]) == "lsg"
