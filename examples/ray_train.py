"""Training under Ray Train that continues after a worker or its node has died.

pip install "shardwise[ray]"
python examples/ray_train.py --workers 2                      # starts a cluster on this machine
RAY_ADDRESS=auto python examples/ray_train.py --workers 16 --gpu --storage /shared/runs      # on a cluster

Ray starts the workers again after a failure, on nodes that are left or new; every start continues from the checkpoint
that was last reported, also on another number of workers.
"""

import argparse
import os
from pathlib import Path

import ray
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

BATCH, LENGTH, VOCABULARY = 12, 32, 64


def train(config: dict) -> None:
    """The loop of one worker."""
    import torch
    import torch.distributed as dist

    import shardwise
    from shardwise.integrations.ray import report, resume
    from shardwise.models.built_in import GPT

    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = GPT(hidden=64, layers=2, heads=2, vocabulary=VOCABULARY, length=LENGTH).to(device)
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "zero3")
    resume(engine)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} from step {engine.steps} on {world_size} workers", flush=True)
    while engine.steps < config["steps"]:
        generator = torch.Generator().manual_seed(engine.steps)  # the same global batches on any number of workers
        starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        batch = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
        loss = engine(batch[rank::world_size].to(device))
        engine.backward(loss)
        engine.step()
        crashed = Path(config["storage"]) / "crashed"
        if engine.steps == config["crash"] and rank == world_size - 1 and not crashed.exists():
            crashed.touch()
            os.abort()
        if engine.steps % config["every"] == 0:
            report(engine, {"step": engine.steps, "loss": loss.item()})
    print(f"rank {rank} ended at step {engine.steps}, loss {loss.item():.3f}", flush=True)
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--storage", default="runs/ray", help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--crash", type=int, help="kill the last worker at this step, the first time")
    args = parser.parse_args()

    storage = os.path.abspath(args.storage)
    os.makedirs(storage, exist_ok=True)
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=args.workers)
    loop = {"steps": args.steps, "every": args.every, "crash": args.crash, "storage": storage}
    trainer = TorchTrainer(
        train,
        train_loop_config=loop,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if args.gpu else "gloo", timeout_s=300),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(
            name="shardwise",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"ended with {result.metrics}, checkpoint {result.checkpoint.path}", flush=True)


if __name__ == "__main__":
    main()
