"""Several NCCL ranks on one GPU."""

import os
import subprocess
import sys
from pathlib import Path


def nccl_environment(rank: int) -> dict[str, str]:
    """Each rank claims a host of its own, so that NCCL accepts several on one GPU and connects them by sockets."""
    off = dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"), "0")
    on = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", **off, **on}


def run_script(script: str, folder: Path, world_size: int, limit_s: float) -> None:
    """Run a script as `world_size` ranks, each with RANK and `folder` as its argument; all have to succeed."""
    (folder / "script.py").write_text(script)
    outputs = [folder / f"out{rank}" for rank in range(world_size)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            more = {"GLOO_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "WORLD_SIZE": str(world_size)}
            environment = {**os.environ, **nccl_environment(rank), **more, "RANK": str(rank), "LOCAL_RANK": "0"}
            with output.open("w") as out:
                command = [sys.executable, folder / "script.py", folder]
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        codes = [process.wait(limit_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * world_size, [out.read_text()[-3000:] for out in outputs]
