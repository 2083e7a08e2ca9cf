"""Settings of each task and method to start from: the paper's where it ran that task, sensible ones elsewhere."""

from typing import Any

from lsg.tasks.names import check_task

# Section 4.1 of the paper, and RGP's code where the paper is silent (Adam's epsilon, decay, scale of the head). Rank
# and sparsity are the best of its table 1.
_GLUE: dict[str, Any] = {
    "model": "roberta-base",
    "optimizer": "adam",
    "adam_eps": 1e-6,
    "lr": 1e-3,
    "lr_schedule": "linear",
    "weight_decay": 0.0,
    "max_grad_norm": 10.0,
    "batch_size": 2000,
    "epochs": 20,
    "delta": 1e-5,
    "head_scale": 0.1,
    "rank": 8,
    "sparsity": 0.5,
    "max_physical_batch_size": 1024,  # short texts: the tokens are the limit
    "max_physical_tokens": 8192,
}
# Section 4.2. Its learning rate goes "from 0.5 to 0.004": RGP's steps.
_CIFAR10: dict[str, Any] = {
    "model": "wrn28-2",
    "optimizer": "sgd",
    "momentum": 0.9,
    "lr": 0.5,
    "lr_schedule": "steps",
    "weight_decay": 1e-4,
    "max_grad_norm": 1.0,
    "batch_size": 1000,
    "epochs": 200,
    "delta": 1e-5,
    "rank": 16,
    "sparsity": 0.3,
    # Small images: a GPU has room for more than the default. Two hold nearly all Poisson batches around 1000.
    "max_physical_batch_size": 520,
}
# Shared by all private methods; `lsg demo` has its own rates and fewer epochs. They were picked on a validation part of
# the training images, for the best mean accuracy of LSG, RGP and DPSGD at the same settings, not for any one of them.
# That search is not part of the epsilon reported; on private data it would have to be.
_DIGITS: dict[str, Any] = {
    "model": "small-cnn",
    "optimizer": "sgd",
    "momentum": 0.9,
    "lr": 0.2,
    "lr_schedule": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "batch_size": 512,
    "epochs": 40,
    "delta": 1e-4,
    "rank": 8,
    "sparsity": 0.5,
    # Fastest for DPSGD, whose larger per-sample gradients are paged in and out at each step. No accuracy depends on it.
    "max_physical_batch_size": 32,
}
_TASKS: dict[str, dict[str, Any]] = {
    "sst2": _GLUE,
    "qnli": _GLUE,
    "qqp": {**_GLUE, "delta": 1e-6},
    "mnli": {**_GLUE, "delta": 1e-6},
    # Your own data are likely fewer: smaller batches, and a delta that is safe up to a million records.
    "text": {**_GLUE, "batch_size": 500, "delta": 1e-6},
    "tokens": {**_GLUE, "batch_size": 500, "delta": 1e-6},
    # The rate and the limit are those of Li et al. 2022 for GPT-2.
    "generate": {
        **_GLUE,
        "model": "gpt2",
        "lr": 5e-4,
        "max_grad_norm": 0.1,
        "batch_size": 500,
        "epochs": 10,
        "delta": 1e-6,
        "head_scale": 1.0,
        "max_length": 512,
        "max_physical_batch_size": 256,
    },
    "cifar10": _CIFAR10,
    "fashion-mnist": {**_CIFAR10, "model": "small-cnn", "epochs": 40, "rank": 8, "sparsity": 0.5},
    "digits": _DIGITS,
    "images": {**_CIFAR10, "batch_size": 500, "epochs": 100, "delta": 1e-6},
}
# Where a method's settings are its own. The paper's DPSGD and Sparse DPSGD on CIFAR-10 had memory for 350 alone.
# Non-private gradients are neither clipped nor noised: lower rates suit them (our choice, not the paper's).
_FULL_RANK_CIFAR10: dict[str, Any] = {"max_grad_norm": 5.0, "batch_size": 350, "epochs": 100}
_TEXT = ("sst2", "qnli", "qqp", "mnli", "text", "tokens", "generate")
_METHODS: dict[tuple[str, str], dict[str, Any]] = {
    # A full-rank sample's gradient is as large as the model (where it is held as a matrix: on a CPU).
    **{(task, method): {"max_physical_batch_size": 32} for task in _TEXT for method in ("dpsgd", "sparse-dpsgd")},
    ("cifar10", "dpsgd"): _FULL_RANK_CIFAR10,
    ("cifar10", "sparse-dpsgd"): _FULL_RANK_CIFAR10,
    ("digits", "non-private"): {"lr": 0.05},  # the best of 0.02, 0.05 and 0.1
    **{(task, "non-private"): {"lr": 5e-5} for task in _TEXT},
    **{(task, "non-private"): {"lr": 0.1} for task in ("cifar10", "fashion-mnist", "images")},
}


def preset(task: str, method: str) -> dict[str, Any]:
    """Fields of RunConfig, model included, without task, method and privacy budget."""
    check_task(task)
    return {**_TASKS[task], **_METHODS.get((task, method), {})}
