"""`--explain`: the arithmetic behind the table, with the numbers of the plan put in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.config.costs import formula, resting_kinds, wire_formula
from shardwise.config.presets import PRESETS
from shardwise.planning.arithmetic import ACCOUNTINGS, STAGES, saving, state_bytes, total_bytes

if TYPE_CHECKING:
    from shardwise.planning.planner import Plan


_REST = formula(resting_kinds(PRESETS["zero3"], weights=2, grads=2, moments=8))
_SENT = {preset: f"{wire_formula(PRESETS[preset]).removesuffix('f').replace(' ', ''):<9}" for preset in STAGES}
_WHY = f"""\
Where the bytes come from, in 16-bit training with Adam:
  weights  2Ψ   what computes, in bf16 or fp16
  grads    2Ψ   one for each weight (4Ψ where several micro-batches are added up in fp32)
  optim   12Ψ   4Ψ the fp32 master copy of the weights, which small updates would otherwise be lost in,
                4Ψ Adam's first moment, 4Ψ its second, both in fp32
  in all  16Ψ = 2Ψ + 2Ψ + 12Ψ

What each stage divides by W, the number of ranks:
  zero1  2Ψ + 2Ψ + 12Ψ/W     the optimizer's; for many ranks 4Ψ remain: a quarter, so it tends to 4x
  zero2  2Ψ + (2Ψ + 12Ψ)/W   and gradients; 2Ψ remain: an eighth, so it tends to 8x
  zero3  (2Ψ + 2Ψ + 12Ψ)/W   everything; so it is W x, without end
  This engine casts zero3's weights from the master as they are gathered: {_REST} rest.

What a rank sends in a step, each element to every other rank, so times (W-1)/W:
  zero0, zero1   {_SENT["zero1"]} gradients out (Ψ) and, after the update, weights (zero0: reduced gradients) back (Ψ)
  zero2          {_SENT["zero2"]} gradients are reduced for every micro-batch; with K = 1 the same 2Ψ
  zero3          {_SENT["zero3"]} weights for the forward, again for the backward, gradients; for every micro-batch
"""


def explain(plan: Plan) -> str:
    """The formulas, then the same in numbers."""
    parameters, ranks = plan.model.trainable, plan.hardware.gpus
    lines = [_WHY, f"In numbers: Ψ = {parameters:,}, W = {ranks}, in GB"]
    lines.append(f"  {'':<8}{'weights':>9}{'grads':>9}{'optim':>9}{'in all':>9}{'saving':>9}{'W → ∞':>9}")
    each = ACCOUNTINGS["fp32" if plan.workload.precision == "fp32" else "full"]
    for preset in STAGES:
        split = state_bytes(preset, parameters, ranks, each)
        sizes = [*split.values(), total_bytes(preset, parameters, ranks, each)]
        limit = "W" if preset == "zero3" else f"{float(saving(preset, 10**12, each)):.3g}x"
        cells = "".join(f"{float(size) / 1e9:>9.4g}" for size in sizes)
        lines.append(f"  {preset:<8}{cells}{float(saving(preset, ranks, each)):>8.3g}x{limit:>9}")
    if plan.model.frozen:
        lines.append(f"Frozen: {plan.model.frozen:,} parameters have weights alone, 2 bytes each, sharded under zero3.")
    lines += ["", *_overheads(plan)]
    return "\n".join(lines)


def _overheads(plan: Plan) -> list[str]:
    reserved = plan.hardware.reserved_bytes / 1e9
    return [
        "What no formula of states contains, and the table does:",
        "  flight   units gathered ahead, gradients being packed, sent, received and added up",
        "  act.     what the forward keeps for the backward; with checkpointing, each layer's input and one layer",
        "  logits   12 bytes each: in fp32, their log-softmax, and its gradient",
        "  other    cuBLAS workspaces, 2 x 32 MiB on Hopper (2 x 8 MiB before); and besides tensors",
        f"           {reserved:.2g} GB for the driver's context, communicators and the allocator's part-filled pages",
    ]
