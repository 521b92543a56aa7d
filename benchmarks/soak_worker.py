"""One rank of a run of the soak test: it trains, saves and resumes, and commits the fault that it was given.

    RANK=0 python benchmarks/soak_worker.py SPEC.json

It leaves a file `rank0.json` in the folder of the run: how it ended, what it loaded, and the digests of its states.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.checkpoint import files
from shardwise.errors import ShardwiseError
from support.training import digest, make_batch, make_model, make_optimizer

FILLER = "filler"
ROOM_BYTES = 4096


class InjectedError(RuntimeError):
    """The exception of faults that raise."""


class Fails(torch.autograd.Function):
    """The identity, whose backward commits a fault."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Any) -> torch.Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act("backward")
        return grad, None


class Fault:
    """What is to go wrong on this rank: at a step, at a place in it, once."""

    def __init__(self, spec: dict[str, Any] | None, rank: int, run: Path, folder: Path) -> None:
        self._spec = spec or {"kind": "none", "step": -1, "at": "", "ranks": []}
        self.kind = self._spec["kind"]
        self._is_mine = rank in self._spec["ranks"]
        self._rank, self._run, self._folder = rank, run, folder
        self._fired = False
        self.step = -1
        self.pids: list[int] = []

    def is_now(self) -> bool:
        return self.step == self._spec["step"]

    def act(self, at: str) -> None:
        """Commit the fault if this is its rank, step and place."""
        # Saves that do not block, and updates of what is offloaded, may run during a later step.
        is_now = self.step >= self._spec["step"] if at in ("save", "optimizer") else self.is_now()
        if not (self._is_mine and is_now and at == self._spec["at"]) or self._fired:
            return
        self._fired = True
        note(self._run / f"fired{self._rank}", str(time.time()))
        if self.kind == "raise":
            raise InjectedError(f"injected in {at}")
        if self.kind == "full disk":
            fill(self._folder)
        elif self.kind == "preempt":
            for pid in self.pids:
                os.kill(pid, signal.SIGTERM)
        else:
            os.kill(os.getpid(), self._spec["signal"])
            time.sleep(30)  # the signal may take effect in another thread first

    def arm_optimizer(self) -> None:
        """Before the engine is made: it looks the optimizer's step up once."""
        if self._spec["at"] == "optimizer":
            step = torch.optim.AdamW.step

            def act_first(*args: Any, **kwargs: Any) -> Any:
                self.act("optimizer")
                return step(*args, **kwargs)

            torch.optim.AdamW.step = act_first  # type: ignore[method-assign]  # the fault

    def arm(self, engine: shardwise.Engine) -> None:
        at = self._spec["at"]
        modules = [module for module in engine.module.modules() if list(module.parameters(recurse=False))]
        module = modules[self._spec.get("module", 0) % len(modules)]
        if at == "forward":
            module.register_forward_pre_hook(lambda *_: self.act("forward"))
        elif at == "backward":
            module.register_forward_hook(lambda module, args, output: Fails.apply(output, self.act))
        elif at == "hook":
            engine.register_grad_hook(lambda name, shard: self.act("hook"))
        elif at == "save":
            write = files.BlockWriter.write

            def act_first(writer: files.BlockWriter, data: memoryview) -> None:
                if self.kind != "full disk":
                    write(writer, data[: len(data) // 2])
                    self.act("save")
                    data = data[len(data) // 2 :]
                write(writer, data)

            files.BlockWriter.write = act_first  # type: ignore[method-assign]  # the fault


class StopsTogether:
    """SIGTERM is noted; after each step the ranks agree on whether one of them was told to stop."""

    def __init__(self, fault: Fault) -> None:
        self._is_told = torch.zeros(1)
        signal.signal(signal.SIGTERM, lambda *_: self._is_told.fill_(1))  # before any rank knows whom to tell
        fault.pids = [0] * dist.get_world_size()
        dist.all_gather_object(fault.pids, os.getpid())

    def agreed(self) -> bool:
        is_told = self._is_told.clone()  # the signal may come after the reduction
        dist.all_reduce(is_told, dist.ReduceOp.MAX)
        return bool(is_told.item())


def fill(folder: Path) -> None:
    """Leave a few kB on the disk of `folder`; where that is not a small one, limit the size of files instead."""
    if os.path.ismount(folder):
        with (folder / FILLER).open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(1 << 16)):
                pass
        size_bytes = (folder / FILLER).stat().st_size
        os.truncate(folder / FILLER, size_bytes - ROOM_BYTES)
        return
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * ROOM_BYTES, resource.RLIM_INFINITY))


def note(path: Path, text: str) -> None:
    """Write a small file that is there as a whole or not at all."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def train(spec: dict[str, Any], rank: int, told: dict[str, Any]) -> None:
    run, folder = Path(spec["run"]), Path(spec["folder"])
    device = torch.device("cuda", 0) if spec["backend"] == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.TCPStore("127.0.0.1", spec["port"], is_master=False)
    timeout = timedelta(seconds=spec["timeout_s"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=spec["world_size"], timeout=timeout)
    model = make_model(spec["model"]).to(device)
    fault = Fault(spec["fault"], rank, run, folder)
    fault.arm_optimizer()
    engine = shardwise.initialize(model, make_optimizer(model), spec["config"])
    stops = StopsTogether(fault) if fault.kind == "preempt" else None
    done = 0
    if spec["load_from"]:
        state = engine.load(spec["load_from"], spec["load_tag"], fallback=spec["load_tag"] == "latest")
        done = state["step"]
        told["loaded"] = {"step": done, "launch": state["launch"], "digest": digest(engine)}
        told["digests"][done] = told["loaded"]["digest"]
        note(run / "loaded.json", json.dumps(told["loaded"]))  # at once: this rank may not live to tell it
    fault.arm(engine)
    for step in range(done, spec["steps"]):
        fault.step = step
        fault.act("data")
        train_step(engine, rank, step)
        is_last = stops.agreed() if stops is not None else fault.kind in ("other W", "cut") and fault.is_now()
        if is_last or not (step + 1) % spec["every"]:
            fault.act("before save")
            blocking = spec["blocking"]
            state = {"step": step + 1, "launch": spec["launch"]}
            engine.save(folder, f"launch-{spec['launch']}-step-{step + 1}", blocking, state, spec["keep"])
            if blocking and rank == 0:
                note(run / "saved", str(step + 1))
        if spec["is_reference"]:
            told["digests"][step + 1] = digest(engine)
        if is_last:
            note(run / f"fired{rank}", str(time.time()))
            break
    engine.finish_save()
    told["steps"] = engine.steps
    told["digest"] = digest(engine)
    if spec["destroys"]:
        engine.destroy()
        dist.destroy_process_group()


def train_step(engine: shardwise.Engine, rank: int, step: int) -> None:
    count = engine.config.batch.accumulation
    for micro in range(count):
        batch = make_batch(engine.module, rank, step * count + micro).to(next(engine.module.parameters()).device)
        engine.backward(engine(batch))
        engine.step()


def main() -> None:
    rank, spec = int(os.environ["RANK"]), json.loads(Path(sys.argv[1]).read_text())
    faulthandler.register(signal.SIGUSR1)
    told: dict[str, Any] = {"digests": {}}
    try:
        train(spec, rank, told)
    except BaseException as error:
        told |= {"error": type(error).__name__, "is_ours": isinstance(error, ShardwiseError), "text": str(error)}
        raise
    finally:
        note(Path(spec["run"]) / f"rank{rank}.json", json.dumps({**told, "ended": time.time()}))


if __name__ == "__main__":
    main()
