"""The harness itself: what a test may rely on, and that no failure of a rank is lost or waited for too long."""

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import CommandFailed, Outcome, RanksFailed, covering, matrix, ranks, run_command, run_ranks
from support.fork_server import Forked
from support.matrix import cases
from support.ranks import values_of

TESTS = Path(__file__).parent


@ranks(1, 2, 3, 4)
def test_every_rank_runs_in_one_group(rank, world_size):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world_size))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("factor", [2, 3])
@ranks(1, 2)
@pytest.mark.parametrize("offset", [0, 5])
def test_ranks_combines_with_parameters_and_fixtures(rank, world_size, factor, offset, tmp_path):
    (tmp_path / str(rank)).write_text(str(factor * rank + offset))
    dist.barrier()
    assert [int((tmp_path / str(r)).read_text()) for r in range(world_size)] == [
        factor * r + offset for r in range(world_size)
    ]


def product(rank, world_size, tensor, power=1):
    return rank, (tensor * (rank + 1)) ** power


def test_results_come_back_by_rank():
    results = run_ranks(product, 2, torch.ones(3), power=2)
    assert [rank for rank, _ in results] == [0, 1]
    assert torch.equal(results[1][1], torch.full((3,), 4.0))


def process_id(rank, world_size):
    return os.getpid()


def fail_on_one_rank(rank, world_size):
    print(f"hello from {rank}")
    if rank == 1:
        left, right = [1, 2], 3
        assert len(left) == right
    dist.barrier()


def test_workers_are_shared_until_a_failure_and_fresh_ones_are_not():
    before = run_ranks(process_id, 1)
    assert run_ranks(process_id, 1) == before
    assert run_ranks(process_id, 1, fresh=True) != before
    with pytest.raises(RanksFailed, match="ZeroDivisionError"):
        run_ranks(divide, 1, 0)
    assert run_ranks(process_id, 1) != before


def divide(rank, world_size, divisor):
    return 1 / divisor


def test_a_failure_shows_every_rank_the_failing_one_first():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(fail_on_one_rank, 3, grace=1)
    message = str(failure.value)
    assert message.index("-- rank 1: raised") < message.index("-- rank 0") < message.index("-- rank 2")
    assert "assert 2 == 3" in message  # both sides, as under pytest
    assert "in fail_on_one_rank" in message
    assert "still running" in message
    assert "barrier" in message  # the stacks of those who wait
    assert "hello from 0" in message


def hang_on_one_rank(rank, world_size):
    if rank == 0:
        time.sleep(1000)


def test_a_timeout_dumps_the_stacks_and_ends_the_workers():
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="no end after 1 s") as failure:
        run_ranks(hang_on_one_rank, 2, timeout=1)
    assert time.monotonic() - started < 60
    hung, finished = failure.value.outcomes
    assert "in hang_on_one_rank" in hung.stacks
    assert finished.ok


def segfault_on_the_last_rank(rank, world_size):
    print("last words")
    if rank == world_size - 1:
        ctypes.string_at(0)
    time.sleep(1000)


def test_a_dead_rank_fails_the_test_at_once():
    started = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(segfault_on_the_last_rank, 2, grace=0.2)
    assert time.monotonic() - started < 55  # starting a pool included; the other rank would sleep for 1000 s
    message = str(failure.value)
    assert message.index("-- rank 1: died (SIGSEGV)") < message.index("-- rank 0: still running")
    assert "in segfault_on_the_last_rank" in message
    assert "last words" in message


def survive(rank, world_size):
    if rank == 0:
        os._exit(7)
    return "alive"


def test_outcomes_tell_the_dead_from_the_living():
    dead, living = run_ranks(survive, 2, check=False)
    assert (dead.finished, dead.exitcode) == (False, 7)
    assert "died (exit code 7)" in dead.describe()
    assert (living.ok, living.value) == (True, "alive")


def bf16_product(rank, world_size):
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    return (x @ x).sum().item()


def test_bf16_matrix_products_run_on_this_machine():
    assert run_ranks(bf16_product, 1) == [64.0**3]


def dirty(rank, world_size):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BEHIND"] = "1"
    dist.new_group(list(range(world_size)))
    return torch.rand(2)


def state(rank, world_size):
    clean = torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    clean = clean and not torch.are_deterministic_algorithms_enabled() and "LEFT_BEHIND" not in os.environ
    return clean, torch.rand(2), len(dist.distributed_c10d._world.pg_map)


def test_state_is_clean_between_tests():
    run_ranks(dirty, 2)
    run_ranks(dirty, 2)
    for clean, numbers, groups in run_ranks(state, 2):
        assert clean
        assert torch.equal(numbers, torch.rand(2, generator=torch.Generator().manual_seed(0)))
        assert groups == 1


def group_state(rank, world_size):
    return dist.is_initialized(), os.environ.get("WORLD_SIZE")


def start_group_as_torchrun_does(rank, world_size):
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank(), dist.get_world_size()


def test_workers_without_a_process_group():
    assert run_ranks(group_state, 1, fresh=True, init=False) == [(False, None)]
    results = run_ranks(start_group_as_torchrun_does, 2, fresh=True, init=False, torchrun=True)
    assert results == [(0, 2), (1, 2)]
    with pytest.raises(ValueError, match="fresh=True"):
        run_ranks(group_state, 1, init=False)


def test_what_cannot_travel_is_refused_with_a_reason():
    def closure(rank, world_size): ...

    with pytest.raises(ValueError, match="top level"):
        run_ranks(closure, 1)
    with pytest.raises(ValueError, match="cannot be pickled"):
        run_ranks(product, 1, lambda: None)
    with pytest.raises(TypeError, match="rank, world_size"):
        ranks(1)(lambda world_size: None)


def skip(rank, world_size):
    pytest.skip("no such device")


def test_skip_on_every_rank_is_a_skip_and_on_some_a_failure():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        run_ranks(skip, 2)
    with pytest.raises(RanksFailed, match="some ranks skipped"):
        values_of([Outcome(0, skipped="no such device", finished=True), Outcome(1, finished=True)], "test", timeout=1)


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from support import run_ranks
import test_support
print(*run_ranks(test_support.process_id, 2), flush=True)
run_ranks(test_support.hang_on_one_rank, 2)
"""


@pytest.mark.programs
def test_workers_end_when_pytest_is_killed():
    command = [sys.executable, "-c", PARENT.format(tests=str(TESTS))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(alive(pid) for pid in workers), limit_s=10)


def eventually(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    """A zombie that nobody reaps (no init in a container) is not alive."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_is_limited_and_takes_its_children_along():
    assert run_command([sys.executable, "-c", "print(6 * 7)"]).stdout == "42\n"
    with pytest.raises(CommandFailed, match="exit code 3"):
        run_command([sys.executable, "-c", "raise SystemExit(3)"])
    sleeper = "import subprocess; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"
    with pytest.raises(CommandFailed) as failure:
        run_command([sys.executable, "-c", sleeper], timeout=2)
    lines = str(failure.value).splitlines()
    assert "no end after 2 s" in lines[0]
    assert any("in wait" in line for line in lines)
    child = next(int(line) for line in lines if line.isdigit())
    assert eventually(lambda: not alive(child), limit_s=5)


SCRIPT = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["WORD"], os.environ.get("OMP_NUM_THREADS"), sys.stdin.read() == "")
print("to errors", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def test_a_forked_process_is_like_a_started_one(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for code in ("0", "3"):
        command, options = [sys.executable, "script.py", code], {"cwd": tmp_path, "env": {"WORD": "é"}, "check": False}
        started, forked = run_command(command, **options), run_command(command, **options, forked=True)
        assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)
        assert "to errors" in forked.stderr
    (tmp_path / "script.py").write_text("1 / 0")
    with pytest.raises(CommandFailed, match="ZeroDivisionError"):
        run_command(command, cwd=tmp_path, forked=True)


def test_the_support_is_imported_without_hypothesis(tmp_path):
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nsys.modules['hypothesis'] = None\nimport conftest\n"
    )
    run_command([sys.executable, "script.py"], cwd=tmp_path, timeout=60, forked=True)


def test_a_forked_process_ends_by_signals(tmp_path):
    (tmp_path / "script.py").write_text("import time; time.sleep(1000)")
    process = Forked([sys.executable, tmp_path / "script.py"])
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM
    assert process.poll() == process.returncode == -signal.SIGTERM


PARAMETERS = {"stage": [0, 1, 2, 3], "dtype": [torch.float32, torch.bfloat16], "K": [1, 3], "world_size": [1, 2, 3]}


def no_stage_three_alone(row):
    return not (row["stage"] == 3 and row["world_size"] == 1)


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("constraint", [None, no_stage_three_alone])
def test_a_covering_array_covers(strength, constraint):
    rows = covering(PARAMETERS, strength, constraint)
    product = [dict(zip(PARAMETERS, values, strict=True)) for values in itertools.product(*PARAMETERS.values())]
    allowed = [row for row in product if constraint is None or constraint(row)]
    assert all(row in allowed for row in rows)
    for names in itertools.combinations(PARAMETERS, strength):
        wanted = {tuple(row[name] for name in names) for row in allowed}
        assert {tuple(row[name] for name in names) for row in rows} == wanted
    assert len(rows) <= {1: 5, 2: 16, 3: 34}[strength]


def test_a_covering_array_is_small_and_the_same_every_time():
    parameters = {f"p{i}": [0, 1, 2, 3] for i in range(6)}
    rows = covering(parameters)
    assert rows == covering(parameters) != covering(parameters, seed=1)
    assert 16 <= len(rows) <= 34  # of 4096
    with pytest.raises(ValueError, match="allows no row"):
        covering(parameters, constraint=lambda row: False)


def test_a_matrix_marks_the_rest_of_the_product_full():
    rows = cases(PARAMETERS)
    assert len(rows) == 4 * 2 * 2 * 3
    ordinary = [row for row in rows if not row.marks]
    assert len(ordinary) == len(covering(PARAMETERS))
    assert {mark.name for row in rows for mark in row.marks} == {"full"}
    assert len({row.id for row in rows}) == len(rows)
    assert [row.id for row in cases(PARAMETERS, full=False)] == [row.id for row in ordinary]


@matrix({"world_size": [1, 2], "value": [3, 5]}, strength=1)
@ranks()
def test_a_matrix_sets_the_world_size(rank, world_size, value):
    x = torch.tensor(value)
    dist.all_reduce(x)
    assert x == value * world_size
