"""What leaves a node, and what a step takes, with reductions over all ranks at once and in two hops.

    sudo python benchmarks/two_hops.py            # two network namespaces, 2 ranks each, a link of 200 Mbit/s

Two network namespaces on this machine are the nodes; a token-bucket filter limits what each sends. Bytes are those of
the interface, headers and control messages included. Needs root, `ip` and `tc`. Writes results/DATE-two-hops.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.machine import env
from shardwise.models.built_in import MLP

RESULTS = Path(__file__).parent / "results"
NODES, PER_NODE = 2, 2
WIDTH, DEPTH, ACCUMULATION = 512, 8, 2
STEPS = 6
FLAT = {"ranks_per_node": NODES * PER_NODE}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1, all at once": ("zero1", FLAT),
    "zero1, two hops": ("zero1", {}),
    "zero3, all at once": ("zero3", FLAT),
    "zero3, two hops": ("zero3", {}),
    "zero3_hybrid": ("zero3_hybrid", {}),
}


def worker(name: str) -> None:
    """One rank: trains, and on rank 0 prints seconds and bytes of a step."""
    torch.set_num_threads(1)
    preset, communication = CASES[name]
    config = {"preset": preset, "communication": communication, "batch": {"accumulation": ACCUMULATION}}
    torch.manual_seed(0)
    model = MLP(width=WIDTH, depth=DEPTH)
    engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)
    data = torch.randn(1, WIDTH)

    def step() -> None:
        for _ in range(ACCUMULATION):
            engine.backward(engine(data))
            engine.step()

    def settle() -> float:
        """The time when all ranks have the new weights."""
        for unit in engine.units:
            unit.weights.wait_streams()
        dist.barrier()
        return time.perf_counter()

    step()
    settle()
    before, started = node_sent_bytes(), settle()
    for _ in range(STEPS):
        step()
    seconds = settle() - started
    sent = node_sent_bytes() - before
    if dist.get_rank() == 0:
        parameters = sum(unit.layout.numel for unit in engine.units)
        print(json.dumps({"sent": sent / STEPS, "s": seconds / STEPS, "parameters": parameters}), flush=True)
    engine.destroy()


def node_sent_bytes() -> int:
    """Bytes that this node has sent so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


def up(rate: str) -> None:
    run("ip", "link", "add", "hopbr", "type", "bridge")
    run("ip", "link", "set", "hopbr", "up")
    for node in range(NODES):
        space = f"hop{node}"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", f"hopv{node}", "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", f"hopv{node}", "master", "hopbr")
        run("ip", "link", "set", f"hopv{node}", "up")
        run("ip", "-n", space, "addr", "add", f"10.78.0.{node + 1}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *limit)


def down() -> None:
    for node in range(NODES):
        subprocess.run(["ip", "link", "del", f"hopv{node}"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", f"hop{node}"], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", "hopbr"], check=False, capture_output=True)


def train(name: str, folder: Path) -> dict[str, float]:
    """One case on both nodes."""
    processes = []
    for rank in range(NODES * PER_NODE):
        node = rank // PER_NODE
        variables = {
            "RANK": rank,
            "WORLD_SIZE": NODES * PER_NODE,
            "LOCAL_RANK": rank % PER_NODE,
            "LOCAL_WORLD_SIZE": PER_NODE,
            "MASTER_ADDR": "10.78.0.1",
            "MASTER_PORT": 29411,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
        }
        environment = os.environ | {key: str(value) for key, value in variables.items()}
        command = ["ip", "netns", "exec", f"hop{node}", sys.executable, __file__, "--worker", name]
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True))
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{name}:\n" + "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log"))))
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def main(rate: str) -> None:
    rows = []
    up(rate)
    try:
        for name in CASES:
            with tempfile.TemporaryDirectory() as folder:
                found = train(name, Path(folder))
            elements = found["sent"] / 4 / found["parameters"]
            rows.append(
                {"case": name, "step_s": found["s"], "node_sent_bytes": found["sent"], "per_parameter": elements}
            )
            print(
                f"{name:<20}{found['s']:>7.2f} s a step, a node sends {found['sent'] / 1e6:>6.1f} MB = {elements:.2f} Ψ"
            )
    finally:
        down()
    settings = {"nodes": NODES, "ranks_per_node": PER_NODE, "rate": rate, "accumulation": ACCUMULATION, "steps": STEPS}
    made = env.made()
    path = RESULTS / f"{made['date']}-two-hops.json"
    path.write_text(json.dumps({**made, "versions": env.versions(), **settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--worker")
    options = parser.parse_args()
    worker(options.worker) if options.worker else main(options.rate)
