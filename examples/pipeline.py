"""A small decoder in a pipeline of two stages, each under ZeRO on two ranks, on the CPU:

torchrun --nproc-per-node 4 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.models.built_in import GPT

STEPS, BATCH, LENGTH, VOCABULARY = 20, 16, 32, 64


def batch_of(step: int, replica: int) -> torch.Tensor:
    """Sequences that count upwards from a random start: every rank of a pipeline makes the same ones."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    return (start + torch.arange(LENGTH + 1)) % VOCABULARY


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_world_size() % 2:
        raise SystemExit(f"two stages cannot share {dist.get_world_size()} ranks equally: start an even number")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    pipe = shardwise.pipeline(
        GPT(hidden=32, layers=4, heads=2, vocabulary=VOCABULARY, length=LENGTH, tied=True),
        mesh,
        lambda params: torch.optim.AdamW(params, lr=3e-3),
        {"preset": "zero2", "gradients": {"clip_norm": 1.0}},
        schedule="1F1B",
        micro_batches=4,
    )
    for step in range(STEPS):
        loss = pipe.train_step(batch_of(step, mesh["dp"].get_local_rank()))
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {pipe.grad_norm.item():.3f}", flush=True)
    pipe.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
