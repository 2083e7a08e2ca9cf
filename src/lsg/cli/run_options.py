"""A command's own options in, those of a run beside them out: each setting of `RunConfig`, with a help text."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lsg.methods import METHODS
from lsg.tasks.names import KINDS, ZOO_NAMES
from lsg.train.config import (
    LR_SCHEDULES,
    OPTIMIZERS,
    POOLING,
    PRECISIONS,
    TRAINABLE,
    RunConfig,
    field_type,
)
from lsg.train.protected import RECORDS_OF_A_PERSON

# Every field of RunConfig is an option; a field without a line here is an error at import.
_HELP = {
    "What": {
        "task": f"One of {', '.join(KINDS)}.",
        "data": "A local path or a hub name. Without it, the task's own source.",
        "model": f"A hub id, a local folder, or one of {', '.join(ZOO_NAMES)} for images.",
        "recipe": "auto, or paper: where all comes from that you do not set.",
        "method": f"One of {', '.join(METHODS)}.",
        "text_column": "Of your own texts, or lists of words; guessed without it.",
        "pair_column": "Of the second text of a pair.",
        "prompt_column": "Of --task generate: of what stands before a text and is not learnt.",
        "label_column": "Of the labels, or lists of tags.",
        "unit_column": "Of the ids of persons: all records of a person are then protected together, and --batch-size, "
        "--epsilon and --delta are about persons.",
        "max_length": "Tokens of a text; the rest is cut off.",
        "sample_prompt": "Of --task generate: a public text that the model continues now and then; '' for none.",
        "train_limit": "Use about this share of the training records, such as 0.1, the same for every seed; 0: all.",
        "validation": "Hold out about this share of the training records and score on them: for tuning.",
        "tuning_part": "Leave out this share of the training records: lsg tune --held-out chose the settings on them.",
    },
    "Privacy": {
        "epsilon": "The privacy budget. This or --noise-multiplier.",
        "noise_multiplier": "Standard deviation of the noise over the clipping threshold.",
        "delta": "Well below one over the number of records (or persons).",
        "accountant": "prv, pld or rdp.",
        "clipping": "flat, per_layer or automatic.",
        "max_grad_norm": "Clipping threshold of a sample's gradient.",
        "max_records_per_unit": "With --unit-column: the most records of a person in a step, chosen anew for each; "
        f"{RECORDS_OF_A_PERSON} without it.",
    },
    "Method": {
        "rank": "r of lsg and rgp.",
        "sparsity": "p of lsg and sparse-dpsgd: the share of units that is not trained.",
        "importance": "What makes a unit worth training: weight, or random, factor, direct (negative results).",
        "lora": "Of --task generate: the rank of adapters (LoRA) that are trained in place of the weights.",
        "merge": "With --lora: save whole weights, the adapters added to them, and not the adapters alone.",
        "trainable": f"One of {', '.join(TRAINABLE)}: paper trains matrices and the head, bias vectors and the head.",
        "pooling": f"One of {', '.join(POOLING)}: what the head of a text model sees.",
        "head_scale": "Factor on the head's gradients before clipping.",
    },
    "Training": {
        "optimizer": f"One of {', '.join(OPTIMIZERS)}.",
        "lr": "Learning rate.",
        "lr_schedule": f"One of {', '.join(LR_SCHEDULES)}.",
        "warmup": "Share of the steps in which the rate rises, such as 0.1.",
        "averaging": "Score and save the weights' average over about this share of the steps, such as 0.1; 0: none.",
        "head_lr": "Factor on the head's learning rate.",
        "momentum": "Of sgd.",
        "weight_decay": "Of either optimizer.",
        "adam_eps": "Of adam.",
        "batch_size": "Expected size of a Poisson batch.",
        "epochs": "Expected passes over the records.",
        "views": "Randomly moved views of each image in a step, averaged before the clip; 1: images as they are.",
        "seed": "Of new weights, batches, projections and noise: repeats a run. Without it, a secret one is drawn.",
    },
    "Machine (none of these changes a guarantee)": {
        "device": "auto, cpu, cuda, cuda:1, ...",
        "precision": f"One of {', '.join(PRECISIONS)}.",
        "max_physical_batch_size": "Samples (or views of them) computed at once: lower it if memory runs out.",
        "max_physical_tokens": "Of texts, tokens computed at once: records times the longest of them.",
        "compile": "Compile the model. Without it, where a GPU's run is long enough to win the time back.",
        "cuda_graphs": "Record and replay the GPU's work. Without it, where the model was seen to be safe for that.",
    },
}


def options_of_runs(own: Sequence[tuple[str, Any, Any, Any]]) -> list[inspect.Parameter]:
    """Options of a command: its own (name, type, default, option), then RunConfig's fields. None means not given."""
    types = {field.name: field.type for field in dataclasses.fields(RunConfig)}
    missing = types.keys() ^ {name for options in _HELP.values() for name in options}
    assert not missing, f"options and RunConfig differ: {missing}"
    generated = [
        (name, field_type(types[name]) | None, None, typer.Option(help=text, rich_help_panel=panel))
        for panel, options in _HELP.items()
        for name, text in options.items()
    ]
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kind, opt],
            default=inspect.Parameter.empty if default is ... else default,
        )
        for name, kind, default, opt in (*own, *generated)
    ]
