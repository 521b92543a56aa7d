"""pytest's side of the test support: two settings for all processes, and workers that end with the session."""

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

# Some virtual machines announce AMX and then kill whoever uses it (bf16 matrix products end in SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Fresh buffers hold NaN, in this process and in all that tests start: a value that is read too early shows.
os.environ.setdefault("SHARDWISE_POISON", "1")
# torch's store looks up the names of its peers: a name server that is silent holds it up for a second, not for five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest
import torch
import torch.distributed as dist

from support import close_pools
from support.fork_server import Forked, fork_server
from support.groups import destroy_extra_groups, groups
from support.matrix import leave_out_full

with contextlib.suppress(ImportError):  # the environments of test-gpu, test-swift and test-ray have none
    import hypothesis

    hypothesis.settings.register_profile("shardwise", deadline=None)  # a busy machine is no fault
    hypothesis.settings.load_profile("shardwise")
torch.set_num_threads(1)  # as on the ranks: two cores are shared with them


def pytest_configure(config: pytest.Config) -> None:
    if "not full" in config.option.markexpr:
        leave_out_full()


def pytest_collection_finish(session: pytest.Session) -> None:
    # What thousands of tests and their imports are made of is never garbage: collections and observers of live tensors
    # need not go through it each time.
    gc.collect()
    gc.freeze()
    if any("world_size" in item.fixturenames for item in session.items if isinstance(item, pytest.Function)):
        fork_server()  # imports while the first tests run


def pytest_unconfigure(config: pytest.Config) -> None:
    close_pools()


@pytest.fixture(autouse=True)
def _groups_end_with_their_test() -> Iterator[None]:
    kept = set(groups())  # of fixtures that live longer
    yield
    destroy_extra_groups(kept)


@pytest.fixture(scope="session")
def forked_ranks() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Within it, local ranks are forked. test_compare_run also has comparisons that start them as users do."""
    forked = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    return lambda: mock.patch("shardwise.machine.local_ranks.subprocess", forked)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`shardwise ...` in this process, which has torch already: exit code, output and errors."""
    from shardwise.cli import main

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwise", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    """This process as the only rank of an NCCL group, on the first GPU."""
    torch.cuda.set_device(0)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
