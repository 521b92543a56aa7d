"""Train a small byte-level GPT on the texts that come with Python, under any preset.

shardwise run -n 2 examples/train_gpt.py --preset zero3
torchrun --nproc-per-node 2 examples/train_gpt.py --preset zero3
python examples/train_gpt.py --preset zero1
"""

import argparse
import pydoc_data.topics
import time

import torch
import torch.distributed as dist

import shardwise
from shardwise.models import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="zero3")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(hidden=128, layers=4, heads=4, vocabulary=256, length=128)
    engine = shardwise.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        {
            "preset": args.preset,
            "precision": {"compute": args.precision},
            "batch": {"accumulation": args.accumulate},
            "gradients": {"clip_norm": 1.0},
        },
    )
    rank = dist.get_rank()
    text = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))
    generator = torch.Generator().manual_seed(rank)
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        for _ in range(args.accumulate):
            starts = torch.randint(len(text) - 128, (8,), generator=generator)
            loss = engine(torch.stack([text[start : start + 128] for start in starts]))
            engine.backward(loss)
            engine.step()
        if rank == 0 and (step % 5 == 0 or step == 1):
            rate = step / (time.perf_counter() - started)
            print(f"step {step:4}  loss {loss.item():.4f}  norm {engine.grad_norm.item():.3f}  {rate:.1f} steps/s")
    if rank == 0:
        print(engine.report())


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
