"""Training that continues by itself after a crash, and with another number of processes.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 3 --max-restarts 3 examples/elastic.py
torchrun --standalone --nproc-per-node 2 examples/elastic.py        # later: continues where that one ended
torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:PORT ...
                                                                    # on each machine; machines may join and leave

The variable gives each restart a new store. Without it torchrun reuses one store, in which Gloo finds the addresses of
processes that have ended.

Every start loads the newest complete checkpoint, written by any number of processes. The data is a function of the
step, and each process uses its share of it, so the global batches are the same for any number of processes.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import shardwise
from shardwise.models.built_in import GPT

BATCH, LENGTH, VOCABULARY = 12, 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait for a machine that does not answer")
    parser.add_argument("--pause", type=float, default=0, help="seconds between steps, to watch it")
    parser.add_argument("--crash", type=int, help="kill the last process at this step, the first time")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(hidden=64, layers=2, heads=2, vocabulary=VOCABULARY, length=LENGTH)
    config = {"preset": "zero3", "runtime": {"timeout": args.timeout}}
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    engine.load(args.dir, fallback=True, missing_ok=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"from step {engine.steps} on {world_size} processes", flush=True)
    while engine.steps < args.steps:
        if engine.steps == args.crash and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == world_size - 1:
            os.abort()
        loss = engine(batch(engine.steps)[rank::world_size])
        engine.backward(loss)
        engine.step()
        if engine.steps % args.every == 0:
            engine.save(args.dir, blocking=False, keep=2)
        time.sleep(args.pause)
    engine.save(args.dir, keep=2)
    if rank == 0:
        print(f"ended at step {engine.steps}, loss {loss.item():.3f}", flush=True)


def batch(step: int) -> torch.Tensor:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (starts + 3 * torch.arange(LENGTH)) % VOCABULARY


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
