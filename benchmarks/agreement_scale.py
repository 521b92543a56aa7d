"""What the agreement of ranks asks of one store, with 64, 256 and 1024 simulated ranks.

    python benchmarks/agreement_scale.py --ranks 64,256,1024 --json benchmarks/results/DATE-agreement-scale.json

A few processes hold many ranks each. Every rank is a real `Agreement` with its threads and its own connection to one
real TCPStore in a process of its own; only the operations are not sent. All processes share this machine's cores with
the store, so seconds are upper bounds (`simulation_cpu_s` is what the ranks compute, on two cores instead of one each),
and `served_per_s`, what the store serves at most, is a lower bound: a store on a core of its own, asked by other
machines, serves more.

served_per_s      `check` requests a second that the store answers to clients that do nothing else
rest              every rank computes: requests and bytes a second, as a share of what is served
waits             all ranks wait for one that computes
meetings          the first three steps (initialize included), replayed from a real engine without tags: seconds that
                  they take without compute, operations, how many of them are met over, CPU seconds of the store
standstill        one rank waits for another operation in another channel: until every rank has the error
disagreement      one rank issues another operation
death             a process with 8 ranks is killed, and all others lose their connections at once
silent_death      the same, and no connection breaks
lost_host         as `death`, and no rank can see the processes that ended; otherwise all can, as on one host
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import shardwise
from shardwise.agreement.agreement import Agreement, Wire
from shardwise.comm import ProcessGroupComm
from shardwise.errors import DisagreementError
from shardwise.machine import env, process

PER_NODE = 8
RANKS_PER_PROCESS = 64
HISTORY = 300
REST_S, SERVED_S, LIMIT_S, STEP_LIMIT_S = 10.0, 4.0, 60.0, 90.0
BLOCKS = 32
CALLS = ["add", "append", "check", "compare_set", "delete_key", "get", "multi_get", "multi_set", "set", "wait"]


class CountingStore:
    """A connection to the store that counts requests, and the bytes of keys and values."""

    def __init__(self, tcp: dist.TCPStore, prefix: str, requests: Counter[str]) -> None:
        self._prefix, self._requests = prefix, requests
        self._store = dist.PrefixStore(prefix, tcp)

    def clone(self) -> CountingStore:
        return self  # no one else uses the connection

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name not in CALLS:
            return call

        def counted(*args: Any) -> Any:
            found = call(*args)
            keys = args[0] if isinstance(args[0], list) else [args[0]]
            size = sum(len(key) + len(self._prefix) + 1 for key in keys)
            self._requests["bytes"] += size + _size(args[1:]) + _size(found)
            self._requests[name] += 1
            return found

        return counted


def _size(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 8 if isinstance(value, int) else 0


class Held:
    """The work of an operation that ends only when its connections break."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def wait(self, *_: object) -> None:
        self.broken.wait()
        raise RuntimeError("Connection closed by peer")


class Rank:
    """One simulated rank: its agreement, and the thread that stands for its main thread."""

    def __init__(self, store: CountingStore, rank: int, world_size: int) -> None:
        self.rank = rank
        self.held = Held()
        self.ended_s = 0.0
        self.text = ""
        self.device_error: str | None = None
        wire = Wire(self.held.broken.set, lambda: self.device_error, 600.0)
        self.agreement = Agreement(store, rank, world_size, False, wire)

    def start(self, work: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(work, *args), daemon=True)
        thread.start()
        return thread

    def _run(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except DisagreementError as error:
            self.text = str(error)
        self.ended_s = time.monotonic()

    def wait(self, channel: str, text: str) -> None:
        self.agreement.wait(self.agreement.issue(channel, text, True), [self.held], [])

    def replay(self, calls: list[list[Any]]) -> None:
        for name, *args in calls:
            getattr(self.agreement, name)(*args)


class Holder:
    """The ranks of one process. The parent calls its methods."""

    def __init__(self, ranks: range, world_size: int, port: int) -> None:
        self.numbers, self.world_size, self.port = ranks, world_size, port
        # Made once: torch looks up the name of each peer, which takes seconds where name servers do not answer.
        limit = timedelta(seconds=LIMIT_S)
        self.connections = [dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit) for _ in ranks]
        self.requests: Counter[str] = Counter()
        self.ranks: list[Rank] = []
        self.threads: list[threading.Thread] = []

    def make(self, prefix: str, history: bool = True, is_seen: bool = True) -> None:
        self.ranks = []
        here = process.Identity.of_this_process()
        for number, connection in zip(self.numbers, self.connections, strict=True):
            store = CountingStore(connection, prefix, self.requests)
            host = f"node{number // PER_NODE}"
            identity = replace(here, host=host, view=here.view if is_seen else host)
            with mock.patch.object(process.Identity, "of_this_process", return_value=identity):
                self.ranks.append(Rank(store, number, self.world_size))
        for rank in self.ranks if history else ():
            for index in range(HISTORY):
                for channel, verb in (("gather", "gather"), ("reduce", "reduce")):
                    rank.agreement.issue(channel, f"{verb} model.layers.{index % BLOCKS}, 202383360 elements", True)

    def count(self) -> dict[str, int]:
        return dict(self.requests)

    def cpu_s(self) -> float:
        return time.process_time()

    def wait(self, operations: dict[int, tuple[str, str]], usual: tuple[str, str] | None) -> None:
        for rank in self.ranks:
            operation = operations.get(rank.rank, usual)
            if operation is not None:
                self.threads.append(rank.start(rank.wait, *operation))

    def lose(self) -> None:
        for rank in self.ranks:
            rank.held.broken.set()

    def replay(self, calls: list[list[Any]]) -> None:
        self.threads = [rank.start(rank.replay, calls) for rank in self.ranks]

    def ended(self, limit_s: float) -> tuple[float, list[str]]:
        """When the last rank ended, and the texts of the errors. A rank that has not ended counts as `inf`."""
        deadline = time.monotonic() + limit_s
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in self.threads)
        self.threads = []
        return max(r.ended_s for r in self.ranks) if has_ended else float("inf"), sorted({r.text for r in self.ranks})

    def close(self) -> None:
        for rank in self.ranks:
            rank.agreement.is_ending = True
        self.lose()
        closing = [threading.Thread(target=rank.agreement.close) for rank in self.ranks]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self.ranks = []

    def ask(self, seconds: float) -> int:
        """Requests that this process gets answered while it does nothing else."""
        counts = [0] * 4
        until = time.monotonic() + seconds

        def work(index: int) -> None:
            store = dist.PrefixStore("served", dist.TCPStore("127.0.0.1", self.port, is_master=False))
            while time.monotonic() < until:
                store.check(["news/0001"])
                counts[index] += 1

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(counts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)


def _serve(pipe: Any, ranks: range, world_size: int, port: int) -> None:
    # A thread that waits for Python's lock wakes up once in an interval: those of 64 ranks fill the cores with it.
    sys.setswitchinterval(0.2)
    holder = Holder(ranks, world_size, port)
    while True:
        name, args = pipe.recv()
        pipe.send(getattr(holder, name)(*args))


def _hold_store(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class HeldStore:
    """A store in a process of its own."""

    def __init__(self, context: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_hold_store, args=(theirs,), daemon=True)
        self._process.start()
        self.port = self._pipe.recv()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.kill()


class World:
    """The processes of one world: of at most 64 ranks each, and a node of 8 ranks that may be killed."""

    def __init__(self, world_size: int, store: HeldStore, context: Any) -> None:
        self.world_size, self.store, self._context = world_size, store, context
        last = world_size - PER_NODE
        count = -(-last // RANKS_PER_PROCESS)
        cuts = [last * index // count for index in range(count + 1)] + [world_size]
        self._started = [self._start(range(a, b)) for a, b in pairwise(cuts)]

    def _start(self, ranks: range) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        started = self._context.Process(
            target=_serve, args=(theirs, ranks, self.world_size, self.store.port), daemon=True
        )
        started.start()
        return started, ours

    def call(self, name: str, *args: Any) -> list[Any]:
        for _, pipe in self._started:
            pipe.send((name, args))
        return [pipe.recv() for _, pipe in self._started]

    def kill_node(self) -> None:
        victim, _ = self._started.pop()
        victim.kill()
        victim.join()

    def revive_node(self) -> None:
        self.call("close")
        self._started.append(self._start(range(self.world_size - PER_NODE, self.world_size)))

    def end(self) -> None:
        for started, _ in self._started:
            started.kill()
            started.join()

    def requests(self) -> Counter[str]:
        return sum((Counter(count) for count in self.call("count")), Counter())

    def counted(self, seconds: float) -> dict[str, float]:
        """Requests and bytes a second."""
        before, began = self.requests(), time.monotonic()
        time.sleep(seconds)
        after, took = self.requests(), time.monotonic() - began
        found = {name: (after[name] - before[name]) / took for name in after}
        return {"requests_per_s": round(sum(found.values()) - found["bytes"]), "bytes_per_s": round(found["bytes"])}

    def replayed(self, step: list[list[Any]]) -> dict[str, Any]:
        """One step of all ranks: until the last one is through, and what the store and the simulation computed."""
        before, store_s, ranks_s = self.requests(), self.store.cpu_s(), sum(self.call("cpu_s"))
        began = time.monotonic()
        self.call("replay", step)
        found = self.call("ended", STEP_LIMIT_S)
        asked = self.requests() - before
        return {
            "operations": sum(name == "issue" for name, *_ in step),
            "met": round(asked["add"] / self.world_size),
            "seconds": round(max(when for when, _ in found) - began, 2),
            "requests": sum(asked.values()) - asked["bytes"],
            "store_cpu_s": round(self.store.cpu_s() - store_s, 2),
            "simulation_cpu_s": round(sum(self.call("cpu_s")) - ranks_s, 2),
            "error": next((text[:300] for _, texts in found for text in texts if text), ""),
        }

    def stopped(self, began: float) -> dict[str, Any]:
        """Seconds until the last rank had the error, and its text."""
        found = self.call("ended", LIMIT_S)
        seconds = max(when for when, _ in found) - began
        texts = sorted({text for _, texts in found for text in texts})
        return {"seconds": round(seconds, 1), "texts": len(texts), "text": texts[0][:600]}


class WithoutTags(ProcessGroupComm):
    """As over NCCL: nothing on the wire tells operations apart."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sends_directly = False


def _record(rank: int, folder: str, pipe: Any) -> None:
    """What the agreement of a real engine is asked for in its first two steps: zero3, 32 blocks."""
    import torch

    from shardwise.models.built_in import MLP

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    steps: list[list[list[Any]]] = [[]]
    for name in ("issue", "name_units"):  # the latter only since operations are known by unit
        work = getattr(Agreement, name, None)

        def recorded(self: Agreement, *args: Any, name: str = name, work: Any = work) -> Any:
            steps[-1].append([name, *args])
            return work(self, *args)

        if work is not None:
            setattr(Agreement, name, recorded)
    model = MLP(width=16, depth=BLOCKS + 2)
    with mock.patch("shardwise.engine.initialize.ProcessGroupComm", WithoutTags):
        config = {"preset": "zero3", "runtime": {"min_unit_bytes": 1}, "gradients": {"clip_norm": 1.0}}
        engine = shardwise.initialize(model, torch.optim.AdamW(model.parameters()), config)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 16)))
        engine.step()
        steps.append([])
    pipe.send(steps[:3])
    engine.destroy()
    dist.destroy_process_group()


def recorded_steps(context: Any) -> list[list[list[Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        started = [context.Process(target=_record, args=(rank, folder, pipes[rank][1])) for rank in range(2)]
        for each in started:
            each.start()
        steps = pipes[0][0].recv()
        pipes[1][0].recv()
        for each in started:
            each.join()
    return steps  # type: ignore[no-any-return]


def measure(
    world_size: int, store: HeldStore, context: Any, steps: list[list[list[Any]]], parts: set[str]
) -> dict[str, Any]:
    row: dict[str, Any] = {"ranks": world_size}
    world = World(world_size, store, context)
    usual = ("gather", "gather model.layers.7, 202383360 elements")

    def began(prefix: str, operations: dict[int, tuple[str, str]], is_seen: bool = True) -> float:
        world.call("make", f"{prefix}-{world_size}", True, is_seen)
        time.sleep(2.0)
        world.call("wait", operations, usual)
        return time.monotonic()

    world.call("count")  # once all processes are connected
    if "rest" in parts:
        row["served_per_s"] = round(sum(world.call("ask", SERVED_S)) / SERVED_S)
        world.call("make", f"rest-{world_size}")
        time.sleep(3.0)
        row["rest"] = world.counted(REST_S)
        row["rest"]["percent_of_served"] = round(100 * row["rest"]["requests_per_s"] / row["served_per_s"], 2)
        world.call("wait", {5: None}, usual)
        time.sleep(3.0)
        row["waits"] = world.counted(REST_S)
        world.call("close")
        print(json.dumps(row), flush=True)
    if "meetings" in parts:
        world.call("make", f"meet-{world_size}", False)
        row["meetings"] = [world.replayed(step) for step in steps]
        world.call("close")
        print(json.dumps(row), flush=True)
    if "faults" in parts:
        start = began("standstill", {5: ("reduce", "reduce model.layers.9, 202383360 elements")})
        row["standstill"] = world.stopped(start)
        world.call("close")
        print(json.dumps(row), flush=True)
        start = began("differ", {5: ("gather", "gather model.layers.8, 202383360 elements")})
        row["disagreement"] = world.stopped(start)
        world.call("close")
        print(json.dumps(row), flush=True)
        for name in ("death", "silent_death", "lost_host"):
            began(name, dict.fromkeys(range(world_size - PER_NODE, world_size)), name != "lost_host")
            time.sleep(3.0)
            world.kill_node()
            start = time.monotonic()
            if name != "silent_death":
                world.call("lose")
            row[name] = world.stopped(start)
            print(json.dumps(row), flush=True)
            world.revive_node()
    world.end()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="64,256,1024")
    parser.add_argument("--parts", default="rest,meetings,faults")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardwise", "shardwise.models.built_in"])
    store = HeldStore(context)
    parts = set(options.parts.split(","))
    steps = recorded_steps(context) if "meetings" in parts else []
    rows = [measure(int(ranks), store, context, steps, parts) for ranks in options.ranks.split(",")]
    store.end()
    result = {**env.made(), "versions": env.versions(), "cores": os.cpu_count(), "rows": rows}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
