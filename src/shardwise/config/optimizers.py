"""Optimizers by name: check the settings of an optimizer section, build it, and two that torch does not have."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from shardwise.config.values import flag, left_open_out, nearest, real
from shardwise.errors import ConfigError

_REFUSED = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it needs sparse gradients",
    "Optimizer": "it is the base class",
}
_FLAGS = {"amsgrad", "bias_correction", "capturable", "centered", "decoupled_weight_decay", "differentiable"} | {
    "foreach",
    "fused",
    "maximize",
    "nesterov",
}
_NUMBERS = {"alpha", "dampening", "eps", "initial_accumulator_value", "lambd", "lr", "lr_decay", "momentum"} | {
    "momentum_decay",
    "rho",
    "t0",
    "weight_decay",
}


def check(name: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The canonical name of an optimizer and its parameters in their types; ValueError if either is wrong."""
    known = {other.lower(): other for other in [*_torch_names(), "Lion"]}
    found = known.get(name.strip().lower())
    if found is None:
        raise ValueError(f"name {name!r}: neither Lion nor a name of torch.optim{nearest(name, known.values())}")
    if found in _REFUSED:
        raise ValueError(f"name {name!r}: {found} is not supported: {_REFUSED[found]}")
    allowed = _parameters(found)
    result = {}
    for key, value in left_open_out(params).items():
        if key not in allowed:
            raise ValueError(f"params.{key}: unknown key of {found}{nearest(key, allowed)}")
        try:
            result[key] = _typed(key, value)
        except ValueError as error:
            raise ValueError(f"params.{key} = {value!r}: {error}") from None
    return found, result


def build(name: str, settings: Mapping[str, Any], params: Iterable[Any]) -> Optimizer:
    """The optimizer `name` on `params` (tensors, named tensors or parameter groups), from checked settings.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> build("AdamW", {"lr": 1e-4}, [weight]).defaults["lr"]
    0.0001
    """
    arguments = dict(settings)
    kind: Any = Lion if name == "Lion" else getattr(torch.optim, name)
    if not arguments.pop("bias_correction", True):
        kind, arguments["decoupled"] = UncorrectedAdam, name == "AdamW"
    try:
        built: Optimizer = kind(params, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {name} with {settings}: {error}") from error
    return built


def _torch_names() -> list[str]:
    everything = vars(torch.optim).items()
    return [name for name, kind in everything if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]


def _parameters(name: str) -> list[str]:
    kind: Any = Lion if name == "Lion" else getattr(torch.optim, name)
    own = [key for key in inspect.signature(kind.__init__).parameters if key not in ("self", "params")]
    return [*own, "bias_correction"] if name in ("Adam", "AdamW") else own


def _typed(key: str, value: Any) -> Any:
    if key in _FLAGS:
        return None if value is None else flag(value)
    if key in _NUMBERS:
        number = real(value)
        if number < 0:
            raise ValueError("expected a number >= 0")
        return number
    if key == "betas":
        pair = tuple(real(each) for each in value) if isinstance(value, list | tuple) else ()
        if len(pair) != 2 or not all(0 <= each < 1 for each in pair):
            raise ValueError("expected two numbers in [0, 1), such as [0.9, 0.999]")
        return pair
    return value


class _Elementwise(Optimizer):
    """An optimizer that updates each element independently: any division of the parameters gives the same result."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(_Elementwise):
    """Lion (Chen et al., 2023): the sign of an interpolation of gradient and momentum, with decoupled weight decay.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([3.0, -0.1])
    >>> _ = Lion([weight], lr=0.5).step()
    >>> weight.tolist()
    [0.5, 1.5]
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        mean, (beta1, beta2) = state["exp_avg"], group["betas"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(mean.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
        mean.lerp_(grad, 1 - beta2)


class UncorrectedAdam(_Elementwise):
    """Adam and AdamW without bias correction, as BERT was trained (`"bias_correction": false`)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, defaults)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        mean, square, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        if group["decoupled"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        param.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])
