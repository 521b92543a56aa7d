"""`deepspeed.ops.op_builder`: kernels are torch's, so nothing is compiled and everything is compatible."""

from __future__ import annotations

from typing import Any


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
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")
__compatible_ops__ = {
    "cpu_adam": True,
    "fused_adam": True,
    "cpu_adagrad": True,
    "cpu_lion": True,
    "async_io": True,
    "fused_lamb": False,
}
