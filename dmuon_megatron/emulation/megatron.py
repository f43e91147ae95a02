"""Faults of megatron-core 0.19's wheel, and of Megatron without Transformer Engine and Apex.

None of them has to do with DMuon: they stop stock Megatron on a machine without
NVIDIA's fused packages, and are put right here so that stock optimizers run beside ours.
"""

import logging
from pathlib import Path

import torch


def _use_prebuilt_helpers() -> None:
    """The wheel has the data helpers built, and lacks the Makefile that start-up would run."""
    import megatron.core.datasets.utils as dataset_utils

    if not (Path(dataset_utils.__file__).parent / "Makefile").exists():
        dataset_utils.compile_helpers = lambda: None


def _load_into_fresh_torch_adamw() -> None:
    """Let a DistributedOptimizer around torch's AdamW resume.

    With the fused Adam of Apex or Transformer Engine the step count belongs to the parameter group.
    torch keeps it as a tensor beside each parameter's moments, and there the loading code

    - reads it from the state of an optimizer that has none yet, and asserts that there is one;
    - copies the tensor of the fresh state over the loaded one, or finds no entry for it in
      checkpoints that list tensors by parameter;
    - gives all parameters the same tensor, which each of them then counts up in place;
    - writes into main parameters that are views of an fp32 model's leaves, in grad mode.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    sharded_state_dict = DistributedOptimizer.sharded_state_dict
    load_state_dict = DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def sharded_state_dict_with_state(self, model_state, is_loading=False, *args, **kwargs):
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return sharded_state_dict(self, model_state, is_loading, *args, **kwargs)

    def set_states_but_step(self, model_param, tensors):
        # An entry that is not a tensor is passed over.
        return set_states(self, model_param, {**tensors, "step": None})

    @torch.no_grad()
    def load_state_dict_unshared(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer.sharded_state_dict = sharded_state_dict_with_state
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step
    DistributedOptimizer.load_state_dict = load_state_dict_unshared


def _expect_one_generator() -> None:
    """Megatron warns when the CPU's random state moves with the device's: here they are one."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def install() -> None:
    """Put the faults right, for good."""
    _expect_one_generator()
    _use_prebuilt_helpers()
    _load_into_fresh_torch_adamw()
