"""The optimizer that `deepspeed.initialize` returns, and DeepSpeed's optimizers by name."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.errors import CompatibilityError


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
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """This rank's elements of the master copy."""
        return [piece.detach() for group in self.param_groups for piece in group["params"]]

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
        """Itself: it has the attributes `loss_scale`, `cur_scale` and `dynamic` of DeepSpeed's scaler."""
        return self

    dynamic = dynamic_loss_scale

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
        self.parameter_offload = ParameterOffload(engine.module)

    fp32_partitioned_groups_flat = DeepSpeedOptimizer.fp32_groups_flat


OPTIMIZERS = (FP16_Optimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
"""By stage."""


class ParameterOffload:
    """What TRL looks for to generate without gathering layer by layer: it removes the hooks and puts them back.

    The engine's hooks stay: a forward on gathered parameters gathers nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module, *details: Any) -> None:
        pass


class _NamedAdam(type):
    """Instances are torch's optimizers, which the engine runs on shards, on the device or the host."""

    _kinds: tuple[type[torch.optim.Optimizer], ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._kinds)


class DeepSpeedCPUAdam(metaclass=_NamedAdam):
    """torch's AdamW, or Adam with `adamw_mode=False`."""

    _kinds = (torch.optim.Adam,)

    def __new__(
        cls, model_params: Any, *args: Any, adamw_mode: bool = True, adam_w_mode: bool = True, **options: Any
    ) -> Any:
        from shardwise.config.optimizers import build

        for name in ("fp32_optimizer_states", "set_grad_none"):
            options.pop(name, None)
        options |= dict(zip(("lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad"), args, strict=False))
        options.setdefault("weight_decay", 0.0)
        return build("AdamW" if adamw_mode and adam_w_mode else "Adam", options, model_params)


class FusedAdam(DeepSpeedCPUAdam):
    """The same, with the names of arguments of DeepSpeed's kernel for GPUs."""

    def __new__(cls, params: Any, *args: Any, **options: Any) -> Any:
        return super().__new__(cls, params, *args, **options)


class DeepSpeedCPUAdagrad(metaclass=_NamedAdam):
    """torch's Adagrad."""

    _kinds = (torch.optim.Adagrad,)

    def __new__(cls, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, **options: Any) -> Any:
        options = {key: value for key, value in options.items() if key in ("weight_decay", "lr_decay")}
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, **options)


class DeepSpeedCPULion(metaclass=_NamedAdam):
    """Lion, as an `optimizer` section of that name builds it."""

    _kinds = (torch.optim.Optimizer,)

    def __new__(cls, model_params: Any, **options: Any) -> Any:
        from shardwise.config.optimizers import build

        options = {key: value for key, value in options.items() if key in ("lr", "betas", "weight_decay")}
        return build("Lion", options, model_params)


class FusedLion(DeepSpeedCPULion):
    """The same, with the names of arguments of DeepSpeed's kernel for GPUs."""

    def __new__(cls, params: Any, **options: Any) -> Any:
        return super().__new__(cls, params, **options)


class RefusedOptimizer:
    """An optimizer of DeepSpeed's that shardwise does not have."""

    def __init__(self, *args: Any, **options: Any) -> NoReturn:
        raise CompatibilityError(
            f"{type(self).__name__} is not element-wise, or compresses what it sends: take AdamW, Lion or Muon"
        )


FusedLamb = type("FusedLamb", (RefusedOptimizer,), {})
OnebitAdam = type("OnebitAdam", (RefusedOptimizer,), {})
