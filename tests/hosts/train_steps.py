"""A rank of test_hosts: trains until it is told to stop, and prints each step and the error that ended it.

Arguments: preset, timeout in seconds, steps.
"""

import json
import os
import sys
import time

import torch

import shardwise
from shardwise.models.built_in import GPT


def main(preset: str, timeout: str, steps: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = GPT(hidden=64, layers=2, heads=2, vocabulary=64, length=32)
    config = {"preset": preset, "runtime": {"timeout": float(timeout)}}
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    say(f"rank {rank} pid {os.getpid()}")
    try:
        while engine.steps < int(steps):
            inputs = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(100 * engine.steps + rank))
            engine.backward(engine(inputs))
            engine.step()
            say(f"step {engine.steps}")
    except shardwise.DisagreementError as error:
        say(f"stopped {json.dumps(str(error))}")
        raise
    say("ended")


def say(text: str) -> None:
    print(f"{time.time():.2f} {text}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
