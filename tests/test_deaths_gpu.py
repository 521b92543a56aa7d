"""Over NCCL, with several ranks on one GPU: a rank that dies or stands still is named as it is over Gloo."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from support.nccl import nccl_environment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LIMIT_S = 180

SCRIPT = """
import os, signal, sys, time
rank, preset, act = int(os.environ["RANK"]), sys.argv[2], sys.argv[3]
import torch, torch.distributed as dist, shardwise
from shardwise.models.built_in import MLP
torch.cuda.set_device(0)
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.FileStore(sys.argv[1], 3), rank=rank, world_size=3)
torch.manual_seed(0)
model = MLP(width=64, depth=4).cuda()
engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), preset)
x = torch.ones(4, 64, device="cuda")
try:
    for step in range(200):
        if rank == 1 and step == 20:
            torch.cuda.synchronize()
            if act == "raise":
                raise ValueError("a bad batch")
            os.kill(os.getpid(), getattr(signal, act))
        engine.backward(engine(x))
        engine.step()
        if step % 5 == 0:
            engine.full_param("layers.0.weight").sum().item()
except shardwise.DisagreementError as error:
    print("NAMED", error, flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("SIGKILL", ["rank 1 died while others wait for", "signal SIGKILL"]),
        ("SIGSTOP", ["rank 1 did not answer for", "is stopped (SIGSTOP"]),
        ("raise", ["rank 1 left while others wait for", "it ended with ValueError: a bad batch"]),
    ],
)
def test_a_rank_that_dies_over_nccl_is_named(tmp_path, preset, act, words):
    (tmp_path / "script.py").write_text(SCRIPT)
    settings = {"SHARDWISE_FROZEN_S": "5", "SHARDWISE_AGREEMENT_POLL_S": "0.1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(3):
        environment = {**os.environ, **nccl_environment(rank), **settings, "RANK": str(rank)}
        with (tmp_path / f"out{rank}").open("w") as out:
            command = [sys.executable, tmp_path / "script.py", tmp_path / "store", preset, act]
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + LIMIT_S
    try:
        codes = [processes[rank].wait(deadline - time.monotonic()) for rank in (0, 2)]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    texts = [(tmp_path / f"out{rank}").read_text() for rank in range(3)]
    assert codes == [7, 7], texts
    for text in (texts[0], texts[2]):
        named = text[text.index("NAMED") :]
        # The process that was killed is a zombie while this test runs, so its signal is known.
        assert all(word in named for word in words), text
    for process in processes:
        process.wait()
