"""`deepspeed.ops`: its optimizers by name, which are torch's; its kernels, of which none is compiled."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shardwise.errors import CompatibilityError


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


class OpBuilder:
    """A kernel that needs no building."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        return self

    def builder_available(self) -> bool:
        return True


def _builder(class_name: str, name: str) -> type[OpBuilder]:
    return type(class_name, (OpBuilder,), {"NAME": name})


CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion")
UtilsBuilder = _builder("UtilsBuilder", "utils")
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
__compatible_ops__ = {
    "cpu_adam": True,
    "fused_adam": True,
    "cpu_adagrad": True,
    "cpu_lion": True,
    "async_io": True,
    "fused_lamb": False,
}
