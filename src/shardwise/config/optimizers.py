"""Optimizers by name: check the settings of an optimizer section, build it, and two that torch does not have."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from shardwise.config.values import any_value, at_least_zero, flag, nearest, read_params, real
from shardwise.errors import ConfigError

REFUSED = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it needs sparse gradients",
    "Optimizer": "it is the base class",
}


def _betas(value: object) -> tuple[float, ...]:
    pair = tuple(map(real, value)) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(0 <= each < 1 for each in pair):
        raise ValueError("expected two numbers in [0, 1), such as [0.9, 0.999]")
    return pair


def check(name: str, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The canonical name of an optimizer and its parameters in their types; ValueError if either is wrong."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    known = {kind.__name__.lower(): kind for kind in [*kinds, Lion]}
    kind = known.get(name.strip().lower())
    if kind is None:
        names = [other.__name__ for other in known.values()]
        raise ValueError(f"name {name!r}: neither Lion nor a name of torch.optim{nearest(name, names)}")
    found = kind.__name__
    if found in REFUSED:
        raise ValueError(f"name {name!r}: {found} is not supported: {REFUSED[found]}")
    arguments = inspect.signature(kind).parameters.values()
    readers = {argument.name: _reader(argument) for argument in arguments if argument.name != "params"}
    if found in ("Adam", "AdamW"):
        readers["bias_correction"] = flag
    return found, read_params(params, readers, found)


def _reader(argument: inspect.Parameter) -> Callable[[Any], Any]:
    """The reader of an argument, by its type in the optimizer's signature."""
    types = (argument.annotation, *get_args(argument.annotation))
    if argument.name == "betas":
        return _betas
    if bool in types:
        return flag
    is_number = float in types and isinstance(argument.default, int | float)
    return at_least_zero if is_number and argument.default >= 0 else any_value  # Adafactor's beta2_decay is negative


def optimizer_class(name: str) -> type[Optimizer]:
    """Lion, or a class of torch's."""
    kind: type[Optimizer] = Lion if name == "Lion" else getattr(torch.optim, name)
    return kind


def build(name: str, settings: Mapping[str, Any], params: Iterable[Any]) -> Optimizer:
    """The optimizer `name` on `params` (tensors, named tensors or parameter groups), from checked settings.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> build("AdamW", {"lr": 1e-4}, [weight]).defaults["lr"]
    0.0001
    """
    arguments = dict(settings)
    kind: Any = optimizer_class(name)
    if not arguments.pop("bias_correction", True):
        kind, arguments["decoupled"] = UncorrectedAdam, name == "AdamW"
    try:
        built: Optimizer = kind(params, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {name} with {settings}: {error}") from error
    return built


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
