"""A short training run on Megatron's own pieces, the same for every optimizer.

    result = train(Tiny(), steps=5, wrap=stock_ddp, build_optimizer=stock_optimizer)

``wrap`` and ``build_optimizer`` are what differs between Megatron's optimizers and ours.
"""

from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from tests.harness.tiny import (
    build_model,
    forward_loss,
    mean_over_data_parallel,
    microbatches,
    plain_name,
    start_megatron,
    transformer_config,
)
from tests.harness.types import Run, Tiny


def ddp_config(*, overlap: bool = True, **changes) -> DistributedDataParallelConfig:
    """A DDP configuration with several buckets, and both overlaps on or off."""
    settings = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap,
        "grad_reduce_in_fp32": True,
        # The tiny model has some 90 thousand parameters.
        "bucket_size": 20_000,
        "average_in_collective": False,
    }
    return DistributedDataParallelConfig(**(settings | changes))


def optimizer_config(tiny: Tiny, *, overlap: bool = True, **changes) -> OptimizerConfig:
    """An optimizer configuration that fits ``ddp_config``; Adam unless told otherwise."""
    settings = {
        "optimizer": "adam",
        "lr": 1e-2,
        "min_lr": 1e-2,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        # Adam blows gradients of the size of eps up to full steps, rounding included.
        "adam_eps": 1e-6,
        "clip_grad": 1.0,
        "log_num_zeros_in_grad": True,
        "bf16": tiny.bf16,
        "params_dtype": tiny.dtype,
        "use_distributed_optimizer": True,
        "overlap_param_gather": overlap,
    }
    return OptimizerConfig(**(settings | changes))


def stock_ddp(config, ddp, model) -> torch.nn.Module:
    """Megatron's own DDP wrapper."""
    return DistributedDataParallel(config, ddp, model)


def stock_optimizer(config: OptimizerConfig, chunks: list):
    """Megatron's own optimizer, with the parameter groups that its training loop asks for."""
    return get_megatron_optimizer(
        config, chunks, config_overrides=get_standard_config_overrides(config)
    )


def constant_schedule(optimizer, config: OptimizerConfig) -> OptimizerParamScheduler:
    """Megatron's scheduler, which also is what turns weight decay off where it should be off."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def train(
    tiny: Tiny,
    *,
    steps: int,
    wrap: Callable = stock_ddp,
    build_optimizer: Callable = stock_optimizer,
    ddp: DistributedDataParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    global_batch_size: int = 12,
    num_microbatches: int = 1,
    first_step: int = 0,
    eval_every: int = 0,
    snapshots: bool = False,
    parallel: dict | None = None,
    after_build: Callable | None = None,
    before_backward: Callable | None = None,
    before_step: Callable | None = None,
    after_step: Callable | None = None,
) -> Run:
    """Train the tiny model on this rank as Megatron's training loop would.

    Args:
        steps: optimizer steps.
        wrap: ``wrap(transformer_config, ddp_config, model)`` returns the model in DDP.
        build_optimizer: ``build_optimizer(optimizer_config, [model])`` returns the optimizer.
        ddp, optimizer: configurations; by default ``ddp_config()`` and ``optimizer_config(tiny)``.
        global_batch_size: samples a step over all ranks.
        num_microbatches: on each rank.
        first_step: number of the first step, which decides its data; for runs that resume.
        eval_every: evaluate on the next step's batch after every so many steps, forward hooks
            disabled and enabled again as megatron.training does; 0 for never.
        snapshots: keep the full weights after each step.
        parallel: arguments of ``start_megatron``.
        after_build, before_backward, before_step, after_step: called with the Run so far once
            everything is built, when gradients are zeroed, when they are reduced, and when the
            optimizer has stepped.
    """
    start_megatron(**(parallel or {}))
    ddp = ddp or ddp_config()
    config = transformer_config(tiny)
    run = Run()
    model = run.model = wrap(config, ddp, build_model(tiny, config))
    optimizer = optimizer or optimizer_config(tiny, overlap=ddp.overlap_param_gather)
    opt = run.optimizer = build_optimizer(optimizer, [model])
    scheduler = constant_schedule(opt, optimizer)

    config = get_model_config(model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = opt.scale_loss
    config.no_sync_func = model.no_sync if ddp.overlap_grad_reduce else None
    param_sync = (
        model.start_param_sync if ddp.overlap_param_gather and ddp.align_param_gather else None
    )
    # As in megatron.training, parameters are first published when a step has changed them.
    if ddp.overlap_param_gather:
        model.disable_forward_pre_hook(param_sync=False)
    _call(after_build, run)

    for step in range(first_step, first_step + steps):
        model.train()
        model.zero_grad_buffer()
        opt.zero_grad()
        _call(before_backward, run)
        batches = microbatches(tiny, step, global_batch_size, num_microbatches)
        run.losses.append(_forward_backward(model, batches))
        _call(before_step, run)
        successful, norm, zeros = opt.step()
        if successful:
            scheduler.step(global_batch_size)
        run.grad_norms.append(float(norm))
        run.num_zeros.append(zeros)
        if step == first_step and ddp.overlap_param_gather:
            model.enable_forward_pre_hook()
            config.param_sync_func = param_sync
        _call(after_step, run)
        if eval_every and (step + 1) % eval_every == 0:
            run.eval_losses.append(
                evaluate(run, microbatches(tiny, step + 1, global_batch_size, num_microbatches))
            )
        if snapshots:
            run.snapshots.append(full_weights(run))
    run.weights = full_weights(run)
    return run


def evaluate(run: Run, batches: list) -> float:
    """The mean loss of an evaluation, forward hooks off meanwhile if there are any."""
    hooks = bool(run.model.remove_forward_pre_hook_handles)
    if hooks:
        run.optimizer.prepare_model_params_for_param_sync()
        run.model.disable_forward_pre_hook()
    run.model.eval()
    with torch.no_grad():
        loss = _forward_backward(run.model, batches, forward_only=True)
    run.model.train()
    if hooks:
        run.model.enable_forward_pre_hook()
    return loss


def full_weights(run: Run) -> dict[str, torch.Tensor]:
    """Copies of all weights by name, after whatever is still being published has arrived."""
    if run.model.ddp_config.overlap_param_gather:
        run.optimizer.prepare_model_params_for_param_sync()
        run.model.start_param_sync(force_sync=True)
    return {
        plain_name(name): param.detach().clone() for name, param in run.model.named_parameters()
    }


def _forward_backward(model, batches, forward_only=False) -> float:
    """All microbatches; returns the mean loss over the data-parallel group (nan mid-pipeline)."""

    def forward_step(iterator, model):
        tokens, labels = next(iterator)

        def loss_of(output):
            loss = output.float().mean()
            # A copy, since the schedule scales the loss in place.
            return loss, {"loss": loss.detach().clone()}

        return forward_loss(model, tokens, labels), loss_of

    size, length = batches[0][0].shape
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=size,
        forward_only=forward_only,
    )
    if not parallel_state.is_pipeline_last_stage():
        return float("nan")
    return mean_over_data_parallel(torch.stack([output["loss"] for output in outputs]).mean())


def _call(hook, run):
    if hook is not None:
        hook(run)
