"""Private training in transformers' Trainer: what a user imports.

    from lsg.integrations.transformers import PrivacyArguments, PrivateTrainer

`PrivateSFTTrainer` is TRL's `SFTTrainer`, made private in the same way; it exists where TRL is installed.
"""

from typing import Any

from lsg.extras import needs_extra
from lsg.integrations.transformers.arguments import PrivacyArguments

with needs_extra("transformers", "lsg.integrations.transformers"):
    from lsg.integrations.transformers.trainer import PrivateSeq2SeqTrainer, PrivateTrainer, PrivateTrainerMixin

__all__ = ["PrivacyArguments", "PrivateSeq2SeqTrainer", "PrivateTrainer", "PrivateTrainerMixin"]


def __getattr__(name: str) -> Any:
    """TRL takes long to import, and few have it."""
    if name == "PrivateSFTTrainer":
        from lsg.integrations.transformers.sft import private_sft_trainer

        return private_sft_trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
