"""`lsg report`: writes the page at once or not at all, one-line errors."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lsg.cli import app
from tests.report.run_folders import write_run


def test_the_page_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", complete=False)
    output = tmp_path / "new" / "report.html"
    command = ["report", str(tmp_path / "runs"), "--output", str(output), "--title", "Two runs"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2 runs, 1 of them incomplete" in result.output
    assert output.read_text().startswith("<!DOCTYPE html>") and "<h1>Two runs</h1>" in output.read_text()
    assert list(output.parent.iterdir()) == [output]
    assert output.stat().st_mode & 0o777 == 0o600  # it holds losses and seeds


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "report.html"
    monkeypatch.setattr("lsg.files.atomic.create_secret", lambda path: path.symlink_to("/dev/full"))
    result = CliRunner().invoke(app, ["report", str(write_run(tmp_path / "run")), "--output", str(output)])
    assert result.exit_code == 1 and result.stderr == f"Error: cannot write {output} (No space left on device)\n"
    assert not output.exists() and not list(tmp_path.glob("*.partial"))


def test_a_malformed_result_is_named_and_the_old_page_stays(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "result.json").write_text("{")
    output = tmp_path / "report.html"
    output.write_text("old")
    result = CliRunner().invoke(app, ["report", str(folder), "--output", str(output)])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert str(folder / "result.json") in result.stderr and output.read_text() == "old"


def test_an_output_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(write_run(tmp_path / "run")), "--output", str(tmp_path)])
    assert result.exit_code == 2 and f"--output {tmp_path}" in result.stderr
