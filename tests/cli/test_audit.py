"""`lsg audit`: what it prints, writes and returns."""

import json
from pathlib import Path

from typer.testing import CliRunner

from lsg.cli import app
from tests.support import broken

QUICK = ["audit", "--mode", "white-box", "--steps", "1", "--trials", "150", "--method", "dpsgd"]


def test_a_sound_engine_passes_and_leaves_its_evidence(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, [*QUICK, "--seeds", "2", "--output", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "consistent: nothing contradicts the claim" in ran.output
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["verdict"] == "consistent" and document["plan"]["confidence"] == 0.999
    assert [one["seed"] for one in document["audits"]] == [0, 1] and document["provenance"]["versions"]["lsg"]
    for one in document["audits"]:
        (step,) = one["white_box"]
        assert step["epsilon_at_least"] <= step["claimed_epsilon"] <= 3.0
        assert len(one["batches"]["counts"]) == 6
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_broken_engine_fails_the_command(tmp_path: Path) -> None:
    with broken.half_the_noise():
        ran = CliRunner().invoke(app, [*QUICK, "--output", str(tmp_path)])
    assert ran.exit_code == 1
    assert "VIOLATION: seed 0: " in ran.output
    assert json.loads((tmp_path / "audit.json").read_text())["verdict"] == "VIOLATION"


def test_units_are_attacked_as_a_whole(tmp_path: Path) -> None:
    units = ["--records-per-unit", "3", "--views", "2", "--output", str(tmp_path)]
    ran = CliRunner().invoke(app, [*QUICK, *units], env={"COLUMNS": "200"})
    assert ran.exit_code == 0 and "units of 3 records in 2 views" in ran.output, ran.output
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["plan"]["records_per_unit"] == 3 and document["audits"][0]["batches"]["torn_units"] == 0
    with broken.each_record_of_a_unit_clipped_by_itself():
        ran = CliRunner().invoke(app, [*QUICK, *units])
    assert ran.exit_code == 1 and "moves the clipped sum by 6 times C" in ran.output


def test_one_run_mode(tmp_path: Path) -> None:
    options = ["--mode", "one-run", "--canaries", "40", "--epochs", "1", "--output", str(tmp_path)]
    ran = CliRunner().invoke(app, ["audit", *options])
    assert ran.exit_code == 0, ran.output
    assert "loose" in ran.output
    (one,) = json.loads((tmp_path / "audit.json").read_text())["audits"]
    assert one["one_run"]["guesses"] == 20 and one["white_box"] == []


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for options, culprit in (
        (["--method", "adam"], "method='adam' must be one of lsg"),
        (["--mode", "x"], "mode='x'"),
        (["--clipping", "x"], "clipping='x'"),
        (["--delta", "0.5"], "delta=0.5"),
        (["--trials", "1"], "trials=1"),
        (["--confidence", "1"], "confidence=1"),
        (["--records-per-unit", "0"], "records_per_unit=0 must be at least 1"),
        (["--views", "0"], "views=0 must be at least 1"),
    ):
        ran = CliRunner().invoke(app, ["audit", *options, "--output", str(tmp_path)])
        assert ran.exit_code == 2 and ran.output.count("\n") == 1 and culprit in ran.output
    taken = tmp_path / "file"
    taken.write_text("")
    ran = CliRunner().invoke(app, ["audit", "--output", str(taken)])
    assert ran.exit_code == 1 and "file" in ran.output
