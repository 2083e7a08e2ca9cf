"""TRL's SFTTrainer, private: the class is made when it is asked for, as TRL takes long to import."""

import functools
from typing import Any

from torch import Tensor, nn

from lsg.extras import needs_extra
from lsg.integrations.transformers.trainer import PrivateTrainerMixin


@functools.cache
def private_sft_trainer() -> type:
    with needs_extra("trl", "PrivateSFTTrainer"):
        from trl import SFTTrainer

    class PrivateSFTTrainer(PrivateTrainerMixin, SFTTrainer):
        """TRL's SFTTrainer with `privacy=PrivacyArguments(...)`. A record is one row: nothing is packed."""

        compute_loss_func: Any

        def _loss_is_outside(self, base: nn.Module, labels: Any) -> bool:
            """TRL's own loss is a mean over the tokens of all records."""
            return isinstance(labels, Tensor)

    return PrivateSFTTrainer
