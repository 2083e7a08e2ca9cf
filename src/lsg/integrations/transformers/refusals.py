"""TrainingArguments in; a refusal that names each one with which a private run would not be what it says."""

import dataclasses
from typing import Any

from transformers import TrainingArguments

from lsg.errors import ConfigurationError

_SAMPLING = "records must be drawn by Poisson sampling, or epsilon would not hold; lsg draws them itself"
_PLAIN_LOOP = "private training knows one process, or several as DistributedDataParallel: start them with torchrun"

# Field -> why any value but the default is refused, and the way out.
REFUSED = {
    "auto_find_batch_size": "steps would be taken again, on other batches, without being accounted for. Set "
    "per_device_train_batch_size to what fits into memory: it changes nothing else",
    "data_seed": "whoever knows which records were drawn has a weaker guarantee; samples come from the operating "
    "system. For a run that can be repeated give PrivacyArguments(noise_generator=...)",
    "dataloader_drop_last": "batches are drawn by Poisson sampling: their sizes differ, and none is the last one",
    "dataloader_in_order": "which records belong to which step is known by the order of batches",
    "debug": "it stops a run because of what a record did to the numbers",
    "deepspeed": _PLAIN_LOOP,
    "enable_jit_checkpoint": "it saves in the middle of a step. save_steps=1 loses no more than a step, which resuming "
    "repeats",
    "fp16": "float16 needs a GradScaler, which skips steps because of the data: use bf16=True",
    "fsdp": _PLAIN_LOOP,
    "ignore_data_skip": "a run is continued where it stopped, or not at all",
    "neftune_noise_alpha": "its noise depends on the longest record of a batch, and so would every record's gradient",
    "parallelism_config": _PLAIN_LOOP,
    "torch_compile": "lsg compiles the private forward itself: PrivacyArguments(perf=PerfConfig(compile=True))",
    "train_sampling_strategy": f"{_SAMPLING}. With a column 'length' in the data set records of like length are "
    "computed together, which changes no draw",
    "use_liger_kernel": "its loss is a mean over the tokens of all records",
}
# Fields of TRL's SFTConfig, with the values that are refused.
REFUSED_OF_TRL = {
    "packing": "several records in one row cannot be told apart, and clipping would not bound one of them",
    "padding_free": "several records in one row cannot be told apart, and clipping would not bound one of them",
    "activation_offloading": "it moves what the layers keep to another device, where their rules do not look",
}
_FUSED_OPTIMIZERS = ("lomo", "layerwise", "schedule_free")
_SECRET_UPLOADS = ("checkpoint", "all_checkpoints")
# Fields that are right as they are, whatever they say. A field that is in no list here is new in transformers.
_NAMES = """
    accelerator_config adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices batch_eval_metrics bf16
    bf16_full_eval dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph ddp_timeout disable_tqdm do_eval do_predict do_train
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
    eval_use_gather_object fp16_full_eval fsdp_config full_determinism generation_config generation_max_length
    generation_num_beams gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate
    length_column_name liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica
    log_on_each_node logging_dir logging_first_step logging_nan_inf_filter logging_steps logging_strategy
    lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model num_train_epochs optim
    optim_args optim_target_modules output_dir per_device_eval_batch_size per_device_train_batch_size
    predict_with_generate prediction_loss_only project push_to_hub remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_steps save_strategy save_total_limit seed skip_memory_metrics sortish_sampler tf32 torch_compile_backend
    torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
    use_cache use_cpu warmup_ratio warmup_steps weight_decay
"""
SUPPORTED = frozenset(_NAMES.split())


def check_training_arguments(args: TrainingArguments) -> None:
    for item in dataclasses.fields(args):
        value = getattr(args, item.name)
        if item.name in REFUSED and _is_set(item, value):
            raise ConfigurationError(f"TrainingArguments({item.name}={value!r}): {REFUSED[item.name]}")
        if item.name == "loss_type" and value not in ("nll", "chunked_nll"):
            raise ConfigurationError(
                f"SFTConfig(loss_type={value!r}): the private loss is 'nll', a mean for each record"
            )
        if item.name in REFUSED_OF_TRL and value:
            raise ConfigurationError(f"SFTConfig({item.name}={value!r}): {REFUSED_OF_TRL[item.name]}")
    _check_known(args)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in _FUSED_OPTIMIZERS):
        raise ConfigurationError(
            f"TrainingArguments(optim={optimizer!r}): it changes weights outside of its step, or needs calls of "
            "its own around it, so that private gradients would not be what it steps on: use optim='adamw_torch'"
        )
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy in _SECRET_UPLOADS:
        raise ConfigurationError(
            f"TrainingArguments(hub_strategy={strategy!r}) uploads checkpoints, which hold the random streams that can "
            "undo the noise: use hub_strategy='every_save' or 'end'"
        )
    if args.n_gpu > 1:
        raise ConfigurationError(
            f"{args.n_gpu} GPUs in one process (DataParallel) split a batch in a way that lsg cannot follow: start one "
            "process a GPU (torchrun --nproc_per_node=...), or show one GPU alone (CUDA_VISIBLE_DEVICES=0)"
        )


def check_threshold(args: TrainingArguments, threshold: Any) -> None:
    """threshold: PrivacyArguments' max_grad_norm; None if TrainingArguments' is meant."""
    default = next(item.default for item in dataclasses.fields(args) if item.name == "max_grad_norm")
    if threshold is None and not args.max_grad_norm:
        raise ConfigurationError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm!r}) is no threshold for the clip: give a positive "
            "one, or PrivacyArguments(max_grad_norm=...)"
        )
    if threshold is not None and args.max_grad_norm not in (None, 0, default, threshold):
        raise ConfigurationError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm!r}) and PrivacyArguments(max_grad_norm={threshold!r})"
            " differ: each record is clipped to one threshold. Leave one of them out"
        )


def check_data(collator: Any) -> None:
    """Refuse collators that put several records into one row."""
    if "Flattening" in type(collator).__name__ or getattr(collator, "padding_free", False):
        raise ConfigurationError(
            f"data_collator is a {type(collator).__name__}, which packs several records into one row: they cannot be "
            "told apart there, and clipping would not bound one of them. Use one that pads"
        )


def _is_set(item: "dataclasses.Field[Any]", value: Any) -> bool:
    """Whether a field has another value than TrainingArguments would give it."""
    empty: tuple[Any, ...] = (None, False, "", [], {})
    if item.name == "train_sampling_strategy":
        return value != "random"
    if item.name == "dataloader_in_order":
        return not value
    return value not in empty and value != item.default


def _check_known(args: TrainingArguments) -> None:
    """A field that a newer transformers has may mean anything: its default is right, as it is for everybody."""
    known = SUPPORTED | REFUSED.keys() | REFUSED_OF_TRL.keys()
    for item in dataclasses.fields(TrainingArguments):
        value = getattr(args, item.name)
        if item.name not in known and item.default is not dataclasses.MISSING and value != item.default:
            raise ConfigurationError(
                f"TrainingArguments({item.name}={value!r}): lsg does not know this setting, so it cannot say that it "
                "keeps the guarantee: leave it at its default"
            )
