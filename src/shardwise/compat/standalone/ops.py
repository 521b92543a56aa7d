"""`deepspeed.ops`: its optimizers by name, which are torch's; its kernels, of which none is compiled."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from shardwise.errors import CompatibilityError


def with_adam_mode(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, with DeepSpeed's attribute that tells AdamW from Adam."""
    if isinstance(optimizer, torch.optim.Adam):
        optimizer.adam_w_mode = isinstance(optimizer, torch.optim.AdamW)  # type: ignore[attr-defined]  # DeepSpeed's
    return optimizer


def _adam(params: Any, is_decoupled: bool, amsgrad: bool, **settings: Any) -> Any:
    from shardwise.config.optimizers import build

    if amsgrad:
        settings["amsgrad"] = True  # Adam without bias correction has no such setting
    return with_adam_mode(build("AdamW" if is_decoupled else "Adam", settings, params))


class _NamedAdam(type):
    """Instances are torch's optimizers, which the engine runs on shards, on the device or the host."""

    _kinds: tuple[type[torch.optim.Optimizer], ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._kinds)


class DeepSpeedCPUAdam(metaclass=_NamedAdam):
    """torch's AdamW, or Adam with `adamw_mode=False`. Its states are fp32."""

    _kinds = (torch.optim.Adam,)

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return _adam(model_params, adamw_mode, amsgrad, bias_correction=bias_correction, **settings)


class FusedAdam(DeepSpeedCPUAdam):
    """The same, with the arguments of DeepSpeed's kernel for GPUs, which have another order."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        return super().__new__(cls, params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdagrad(metaclass=_NamedAdam):
    """torch's Adagrad."""

    _kinds = (torch.optim.Adagrad,)

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(metaclass=_NamedAdam):
    """Lion, as an `optimizer` section of that name builds it."""

    _kinds = (torch.optim.Optimizer,)

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        from shardwise.config.optimizers import build

        return build("Lion", {"lr": lr, "betas": betas, "weight_decay": weight_decay}, model_params)


class FusedLion(DeepSpeedCPULion):
    """The same, with the arguments of DeepSpeed's kernel for GPUs."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> Any:
        return super().__new__(cls, params, lr, betas, weight_decay)


class RefusedOptimizer:
    """An optimizer of DeepSpeed's that shardwise does not have."""

    def __init__(self, *args: Any, **options: Any) -> NoReturn:
        raise CompatibilityError(
            f"{type(self).__name__} is not element-wise, or compresses what it sends: take AdamW, Lion or Muon"
        )


FusedLamb = type("FusedLamb", (RefusedOptimizer,), {})
OnebitAdam = type("OnebitAdam", (RefusedOptimizer,), {})


class OpBuilder:
    """A kernel that needs no building: torch's stands for it."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        return self

    def builder_available(self) -> bool:
        return True


class MissingOpBuilder(OpBuilder):
    """A kernel that shardwise does not have: scripts that ask first go without it."""

    def is_compatible(self, verbose: bool = False) -> bool:
        return False

    def load(self, verbose: bool = False) -> NoReturn:
        raise CompatibilityError(f"DeepSpeed's kernel {self.NAME!r} is not there: use torch's own operators")


def _builder(class_name: str, name: str, kind: type[OpBuilder] = OpBuilder) -> type[OpBuilder]:
    return type(class_name, (kind,), {"NAME": name})


CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion")
UtilsBuilder = _builder("UtilsBuilder", "utils")
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn", MissingOpBuilder)
FPQuantizerBuilder = _builder("FPQuantizerBuilder", "fp_quantizer", MissingOpBuilder)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", MissingOpBuilder)
GDSBuilder = _builder("GDSBuilder", "gds", MissingOpBuilder)
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", MissingOpBuilder)
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer", MissingOpBuilder)
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd", MissingOpBuilder)
SparseAttnBuilder = _builder("SparseAttnBuilder", "sparse_attn", MissingOpBuilder)
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", "spatial_inference", MissingOpBuilder)
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", "stochastic_transformer", MissingOpBuilder)
TransformerBuilder = _builder("TransformerBuilder", "transformer", MissingOpBuilder)
_BUILDERS = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, OpBuilder)]
__compatible_ops__ = {kind.NAME: kind().is_compatible() for kind in _BUILDERS if kind.NAME}
