"""The optimizer that `deepspeed.initialize` returns."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.compat.engine.clients import DeepSpeedZeRoOffload


class DeepSpeedOptimizer:
    """What clients look for on an optimizer under ZeRO; the torch optimizer that works on shards is `optimizer`."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        self._engine = engine
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups: a learning rate that is written here is used by the next update."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """This rank's elements of the master copy."""
        return [piece.detach() for group in self.param_groups for piece in group["params"]]

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        """The norm before clipping of the last step, by the name that scripts read."""
        return self._engine.grad_norm  # type: ignore[no-any-return]

    def refresh_fp32_params(self) -> None:
        """Make what was written into the weights in place the value that is updated. A collective.

        It has the precision of the weights then.
        """
        from shardwise.engine.access import gathered

        with gathered(self._engine.module.parameters(), write=True):
            pass

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, in fp16."""
        return bool(self._engine.was_skipped)

    @property
    def cur_scale(self) -> float:
        return float(self._engine.loss_scale)

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.needs_scaler() and bool(self._engine.config.precision.loss_scale.dynamic)

    @property
    def loss_scaler(self) -> DeepSpeedOptimizer:
        """Itself: it has the attributes of DeepSpeed's scaler."""
        return self

    dynamic = dynamic_loss_scale

    @property
    def cur_iter(self) -> int:
        """How many steps there were, skipped ones included."""
        return int(self._engine.steps)

    @property
    def scale_window(self) -> int:
        """How many good steps double the scale."""
        return int(self._engine.config.precision.loss_scale.window)

    @property
    def min_loss_scale(self) -> float:
        return float(self._engine.config.precision.loss_scale.minimum)

    min_scale = min_loss_scale

    def needs_scaler(self) -> bool:
        """Whether the loss has to be multiplied, as `engine.backward` and `engine.scale` do: in fp16."""
        return bool(self._engine.config.precision.compute == "fp16")

    def state_dict(self) -> dict[str, Any]:
        """This rank's part; `save_checkpoint` saves all parts."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], **options: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        """Refuses, and says what to call."""
        self.optimizer.step(closure)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._engine.backward(loss)

    def destroy(self) -> None:
        """Does nothing: `engine.destroy()` frees the optimizer's states too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class FP16_Optimizer(DeepSpeedOptimizer):
    """Of stage 0, where weights have 16 bits."""


class BF16_Optimizer(DeepSpeedOptimizer):
    """Of DeepSpeed's stage 1 in bf16 with pipelines; never made here."""


class LossScaler:
    """The name of DeepSpeed's scaler, for `torch.serialization.add_safe_globals`; never made here."""


class DynamicLossScaler(LossScaler):
    """The same, with a scale that follows overflows."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """Of DeepSpeed's stage 0 with optimizers that need whole tensors; never made here."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Of stages 1 to 3."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Of stages 1 and 2."""

    single_partition_of_fp32_groups = DeepSpeedOptimizer.fp32_groups_flat


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Of stage 3."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(engine, optimizer)
        self.parameter_offload = DeepSpeedZeRoOffload(engine.module)

    fp32_partitioned_groups_flat = DeepSpeedOptimizer.fp32_groups_flat

    def refresh_fp32_params(self) -> None:
        """Does nothing: weights in shards are written through `GatheredParameters`, which keeps both."""

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Does nothing. Scripts call it before `optimizer.state_dict()`, which always has the master copy here."""

    _clear_fp32_optimizer_param_groups = _set_fp32_optimizer_param_groups


OPTIMIZERS = (FP16_Optimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
"""By stage."""
