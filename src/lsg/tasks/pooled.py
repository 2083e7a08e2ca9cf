"""A text classifier that is an encoder, a pooling of its token vectors and one linear layer.

Made for training with little data and much noise: features of a pretrained encoder are averaged over a text's tokens
and brought to one length, so that a linear layer can learn from them at once, and gradients of all texts are about
equally long. The heads that transformers adds are deeper, begin at random, and often read the first token alone.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import ConfigurationError, first_line
from lsg.files.foreign_files import read_text
from lsg.files.foreign_text import to_json
from lsg.files.foreign_values import json_value
from lsg.tasks.quiet_transformers import quiet_transformers

_START = 1e-3  # deviation of a new head's weights: nearly 0, where all classes are equally likely


class PooledClassifier(nn.Module):
    """Texts as a tokenizer makes them (input_ids, attention_mask, ...) in, `.logits` (batch, classes) out.

    encoder: a transformers model whose first output is (batch, tokens, width). pooling: "mean" over the tokens of a
    text, or its "first" one. labels: the names of the classes.
    """

    base_model_prefix = "encoder"

    def __init__(self, encoder: Any, pooling: str, labels: tuple[str, ...]) -> None:
        super().__init__()
        if getattr(encoder, "pooler", None) is not None:
            encoder.pooler = None  # what it makes of the first token is not used
        self.encoder, self.pooling, self.labels = encoder, pooling, labels
        self.head = nn.Linear(encoder.config.hidden_size, len(labels))
        nn.init.normal_(self.head.weight, std=_START)
        nn.init.zeros_(self.head.bias)

    @property
    def config(self) -> Any:
        return self.encoder.config

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.encoder.get_input_embeddings()
        return embeddings

    def features(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """(batch, width), each row of mean 0 and variance 1."""
        tokens = self.encoder(attention_mask=attention_mask, **inputs)[0]
        if self.pooling == "first":
            pooled = tokens[:, 0]
        else:
            kept = attention_mask.to(tokens.dtype)[:, :, None]
            pooled = (tokens * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
        return F.layer_norm(pooled.float(), pooled.shape[-1:])

    def forward(self, **inputs: Tensor) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        return SequenceClassifierOutput(logits=self.head(self.features(**inputs)))

    def save_pretrained(self, folder: Path) -> None:
        """The encoder as transformers' AutoModel reads it; beside it the head."""
        from safetensors.torch import save_file

        self.encoder.save_pretrained(folder)
        save_file(
            {key: value.detach().cpu() for key, value in self.head.state_dict().items()}, folder / "head.safetensors"
        )
        about = {"pooling": self.pooling, "labels": self.labels}
        (folder / "head.json").write_text(to_json(about, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "PooledClassifier":
        """The inverse of `save_pretrained`."""
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            about = json_value(read_text(folder / "head.json"))
            with quiet_transformers():
                from transformers import AutoModel

                encoder = AutoModel.from_pretrained(
                    folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
                )
            model = cls(encoder, about["pooling"], tuple(about["labels"]))
            model.head.load_state_dict(load_file(folder / "head.safetensors"))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigurationError(f"{folder} holds no classifier of `lsg train`: {first_line(error)}") from None
        return model.eval()
