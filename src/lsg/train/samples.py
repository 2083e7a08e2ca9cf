"""What a language model writes after a public prompt, now and then while it trains, for people to see.

Each is computed from weights that the steps so far have released, and from nothing else: it costs no privacy beyond
theirs. Nothing of it is written to a file.
"""

from typing import Any

import torch

from lsg.errors import ConfigurationError, first_line
from lsg.tasks.encoded_documents import prompt_tokens
from lsg.tasks.quiet_transformers import quiet_transformers
from lsg.train.config import RunConfig

PROMPT = "The"
NEW_TOKENS = 40
TIMES = 5  # about, in a run


class Samples:
    """Draws them, always with the same random numbers, apart from those of training. causal: as in `LanguageScorer`."""

    def __init__(self, config: RunConfig, tokenizer: Any, device: torch.device, *, causal: bool) -> None:
        prompt = PROMPT if config.sample_prompt is None else config.sample_prompt
        self._tokenizer, self._device, self._epochs = tokenizer, device, config.epochs
        self._inputs: dict[str, torch.Tensor] | None = None
        if prompt:
            row = prompt_tokens(tokenizer, [prompt])[0] if causal else tokenizer(prompt)["input_ids"]
            if not 0 < len(row) < config.max_length:
                raise ConfigurationError(
                    f"--sample-prompt: {len(row)} tokens, where there must be one or more, and fewer than the "
                    f"{config.max_length} of --max-length"
                )
            self._new = min(NEW_TOKENS, config.max_length - len(row))
            found = torch.tensor([row], device=device)
            self._inputs = {"input_ids": found, "attention_mask": torch.ones_like(found)}

    def due(self, epoch: int) -> bool:
        """After the first and the last epoch, and a few between them."""
        every = max(1, self._epochs // TIMES)
        return self._inputs is not None and (epoch in (1, self._epochs) or epoch % every == 0)

    @torch.no_grad()
    def draw(self, model: Any) -> str:
        """The prompt and what the model makes of it; why there is none, where the model cannot."""
        assert self._inputs is not None
        was_training = model.training
        model.eval()
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with quiet_transformers(), torch.random.fork_rng(devices=devices):
                torch.manual_seed(0)
                written = model.generate(
                    **self._inputs,
                    max_new_tokens=self._new,
                    do_sample=True,
                    pad_token_id=self._tokenizer.pad_token_id,
                    eos_token_id=self._tokenizer.eos_token_id,
                )
        except Exception as error:  # of any model's code: a sample is not worth a run
            return f"none ({first_line(error)})"
        finally:
            model.train(was_training)
        text: str = self._tokenizer.decode(written[0], skip_special_tokens=True)
        return text
