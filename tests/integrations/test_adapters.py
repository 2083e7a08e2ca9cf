"""PEFT models and TRL's SFTTrainer, where they are installed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lsg import ConfigurationError
from lsg.integrations.transformers.refusals import check_training_arguments
from tests.support import trainer_runs as runs
from tests.support.sft_runs import sft
from tests.support.trainer_runs import trainer, weights


def lora(rank: int = 2) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(runs.causal(), config)


def test_an_adapter_is_trained_saved_and_continued(tmp_path: Path) -> None:
    args = {"save_strategy": "steps", "save_steps": 5}
    whole, resumed = (trainer(tmp_path, "causal", model=lora(), args=args) for _ in range(2))
    before = {name: p.clone() for name, p in whole.model.named_parameters()}
    whole.train()
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, before[name]) is ("lora" not in name)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert torch.equal(weights(whole.model), weights(resumed.model))
    whole.save_model(str(tmp_path / "adapter"))
    assert {"adapter_model.safetensors", "privacy.json"} <= {f.name for f in (tmp_path / "adapter").iterdir()}


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_sft_equals_the_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same records, but for what stands in the padding, which is masked: the same weights to the bit, or to
    rounding where a kernel sees the padding. Then the same again from a checkpoint."""
    monkeypatch.setenv("CI", "1")  # TRL pings nobody
    own = sft(tmp_path, save_strategy="steps", save_steps=5)
    own.train()
    plain = trainer(tmp_path / "plain", "causal")
    plain.train()
    torch.testing.assert_close(weights(own.model), weights(plain.model), atol=1e-5, rtol=1e-4)
    assert own.get_epsilon() == plain.get_epsilon()
    resumed = sft(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert torch.equal(weights(own.model), weights(resumed.model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", [{"packing": True}, {"padding_free": True}, {"loss_type": "dft"}], ids=str)
def test_sft_refuses_what_joins_records(option: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False)
    check_training_arguments(args)
    for name, value in option.items():
        setattr(args, name, value)
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        check_training_arguments(args)
