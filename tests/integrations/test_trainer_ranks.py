"""PrivateTrainer on two processes."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.trainer_runs import trainer, weights


def test_two_processes_share_each_step_and_end_as_one_would(tmp_path: Path) -> None:
    """Equal to the bit on both, and to one process up to rounding: two records on each make four a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "tests.support.trainer_ranks"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert torch.equal(first["weights"], second["weights"]) and first["epsilon"] == second["epsilon"]
    alone = trainer(tmp_path / "alone", "causal", args={"max_steps": 5})
    alone.train()
    assert first["steps"] == alone.state.global_step == 5 and first["epsilon"] == alone.get_epsilon()
    torch.testing.assert_close(first["weights"], weights(alone.model), atol=2e-4, rtol=1e-3)
    assert (tmp_path / "model" / "privacy.json").exists()
