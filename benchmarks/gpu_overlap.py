"""How much of the communication of eight ranks lies under computation, shown on one GPU.

    python benchmarks/gpu_overlap.py --preset zero3

One process plays rank 0 of eight: collectives are replaced by delay kernels on the communication streams, as long as
400 Gb/s links would need for the bytes; everything else is the engine as it is. A profiler trace of a few steps and the
forward after them tells which part of the delays ran while kernels of the computation ran too. One JSON line.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.comm import Hop, ProcessGroupComm
from shardwise.config import Config
from shardwise.engine.engine import Engine
from shardwise.models.built_in import GPT

LINK_BYTES_PER_S = 400e9 / 8
LATENCY_S = 20e-6
WORLD_SIZE, LENGTH, WARM_STEPS, STEPS = 8, 2048, 3, 3


class Delay:
    """A collective that takes its time on a stream; `fill` puts numbers where others' would arrive."""

    def __init__(self, stream: torch.cuda.Stream, cycles: int, fill: Callable[[], object] = lambda: None) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fill()  # products of zeros or of NaN would take less power and so less time than real ones
            torch.cuda._sleep(cycles)
        self._event = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class DelayedComm(ProcessGroupComm):
    """Gathers and reductions on streams of their own, as NCCL has them, with delays for the links."""

    def __init__(self, device: torch.device, cycles_per_s: float) -> None:
        super().__init__(None, device)
        self._cycles_per_s = cycles_per_s
        self._gathers, self._reductions = torch.cuda.Stream(), torch.cuda.Stream()
        self.delay_s = 0.0

    def _delay(self, stream: torch.cuda.Stream, size_bytes: float, fill: Callable[[], object] = lambda: None) -> Delay:
        seconds = LATENCY_S + size_bytes * (self.world_size - 1) / self.world_size / LINK_BYTES_PER_S
        self.delay_s += seconds
        return Delay(stream, int(seconds * self._cycles_per_s), fill)

    def gather(self, full: torch.Tensor, kind: str, unit: str = "", axes: Sequence[str] = ()) -> Delay:
        parts = full.view(self.world_size, -1)
        return self._delay(self._gathers, full.numel() * full.element_size(), lambda: parts[1:].copy_(parts[:1]))

    def exchange(
        self, received: torch.Tensor, sent: torch.Tensor, kind: str, unit: str, hop: Hop
    ) -> tuple[Delay, list[torch.Tensor]]:
        delay = self._delay(self._reductions, sent.numel() * sent.element_size(), lambda: received.copy_(sent))
        return delay, list(received)

    def share(self, values: torch.Tensor, name: str = "", stream: str = "") -> torch.Tensor:
        self._delay(self._reductions, 0).wait()
        return values.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, unit: str = "") -> None:
        pass


def cycles_per_second() -> float:
    torch.cuda._sleep(10**8)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(10**9)
    end.record()
    torch.cuda.synchronize()
    return 1e9 / (start.elapsed_time(end) / 1e3)


def intervals(trace: Path) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Times of the delay kernels, and merged times of the kernels on other streams than theirs, in microseconds."""
    kernels = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    delays = [event for event in kernels if "spin_kernel" in event["name"]]
    streams = {event["args"]["stream"] for event in delays}
    others = [event for event in kernels if event["args"]["stream"] not in streams]
    return _spans(delays), merged(_spans(others))


def _spans(events: list[dict]) -> list[tuple[float, float]]:
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in events)


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for start, end in spans:
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def covered(delays: list[tuple[float, float]], computing: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(e, end) - max(s, start)) for s, e in delays for start, end in computing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="zero3")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--trace", help="write the trace here, for chrome://tracing")
    args = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(args.hidden, args.layers, args.hidden // 128, args.vocabulary, LENGTH)
    config = Config.load(
        {
            "preset": args.preset,
            "precision": {"compute": "bf16"},
            "gradients": {"clip_norm": 1.0},
            "checkpointing": {"enabled": True},
        }
    )
    comm = DelayedComm(torch.device("cuda", 0), cycles_per_second())
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config, comm)
    data = torch.randint(args.vocabulary, (args.batch, LENGTH), device="cuda")

    def issue(count: int) -> None:
        for _ in range(count):
            engine.backward(engine(data))
            engine.step()

    def steps(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        issue(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    steps(WARM_STEPS)
    comm.delay_s = 0.0
    step_s = steps(STEPS)
    delay_s = comm.delay_s / STEPS
    # Kernels alone: to note every operation of the host too would make the host the bottleneck.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        issue(STEPS)
        engine(data)  # under which the last step's gathers lie
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(args.trace or f"{folder}/trace.json")
        profile.export_chrome_trace(str(trace))
        delays, computing = intervals(trace)
    total = sum(end - start for start, end in delays)
    exposed = [end - start - covered([(start, end)], computing) for start, end in delays]
    comm._cycles_per_s = 0.0
    steps(1)
    print(
        json.dumps(
            {
                "preset": args.preset,
                "world_size": WORLD_SIZE,
                "layers": args.layers,
                "hidden": args.hidden,
                "vocabulary": args.vocabulary,
                "tokens": args.batch * LENGTH,
                "step_ms": round(step_s * 1e3, 1),
                "step_ms_without_delays": round(steps(STEPS) * 1e3, 1),
                "communication_ms": round(delay_s * 1e3, 1),
                "communication_ms_in_trace": round(total / 1e3, 1),
                "hidden_share": round(1 - sum(exposed) / total, 4),
                "most_exposed_ms": [round(value / 1e3, 2) for value in sorted(exposed, reverse=True)[: 4 * STEPS]],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
