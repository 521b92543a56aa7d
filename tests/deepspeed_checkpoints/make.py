"""Write the folders beside this file with DeepSpeed itself, in two CPU processes.

    make bench-env
    DS_ACCELERATOR=cpu .bench-env/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
        tests/deepspeed_checkpoints/make.py

Each folder is a checkpoint that `engine.save_checkpoint` wrote, and `expected.safetensors`: the whole values according
to DeepSpeed's own functions.
"""

import os
import shutil
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
CASES = {
    "zero1-fp16": {"stage": 1, "precision": "fp16"},
    "zero2-bf16": {"stage": 2, "precision": "bf16"},
    "zero2-fp32": {"stage": 2, "precision": "fp32"},
    "zero3-bf16": {"stage": 3, "precision": "bf16"},
    "zero3-fp32": {"stage": 3, "precision": "fp32"},
}


class Small(nn.Module):
    """Odd sizes, two optimizer groups, a frozen layer, a buffer, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((6,), 0.25))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = self.norm(self.frozen(x) + self.shift.to(x.dtype))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def configuration(stage: int, precision: str) -> dict:
    zero = {"stage": stage, "reduce_bucket_size": 200, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    return config


def make(name: str, stage: int, precision: str) -> None:
    torch.manual_seed(5)
    model = Small()
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=configuration(stage, precision)
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        loss = engine(torch.randint(11, (2, 4), generator=generator))
        engine.backward(loss)
        engine.step()
    folder = HERE / name
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    engine.save_checkpoint(str(folder), tag="global_step3", client_state={"epoch": 2})
    expected = {}
    for key, param in engine.module.named_parameters():
        expected[f"param/{key}"] = whole(param).float().clone()
        for state in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            expected[f"optim/{state}/{key}"] = moment(engine, param, state).float().clone()
    if dist.get_rank() == 0:
        save_file(expected, folder / "expected.safetensors")
        for script in folder.glob("*.py"):
            script.unlink()  # DeepSpeed copies its converters into every checkpoint
    dist.barrier()


def moment(engine: deepspeed.DeepSpeedEngine, param: nn.Parameter, state: str) -> torch.Tensor:
    """DeepSpeed's own function works for stage 3 only; stages 1 and 2 record where their fragments lie."""
    if hasattr(param, "ds_id"):
        return safe_get_full_optimizer_state(param, state)
    flat = torch.zeros(param.numel())
    fragment = param._hp_mapping
    if fragment is not None:
        here, there = fragment.hp_fragment_address, fragment.lp_fragment_address
        zero = engine.optimizer
        partition = zero.single_partition_of_fp32_groups[fragment.param_group_index]
        flat[there.start : there.start + there.numel] = zero.optimizer.state[partition][state][
            here.start : here.start + here.numel
        ]
    dist.all_reduce(flat)
    return flat.view(param.shape)


def whole(param: nn.Parameter) -> torch.Tensor:
    if param.requires_grad:
        return safe_get_full_fp32_param(param)
    with deepspeed.zero.GatheredParameters([param]) if hasattr(param, "ds_id") else torch.no_grad():
        return param.detach().clone()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for case in sys.argv[1:] or CASES:
        make(case, **CASES[case])
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads would keep the process alive
