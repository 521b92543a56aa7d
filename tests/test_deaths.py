"""Ranks that died, stand still or are late are named, and a store that is gone or silent stops nobody for long."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.agreement import agreement, judge, jury, sight
from shardwise.agreement.agreement import Agreement, Wire
from shardwise.agreement.board import Board, Pace
from shardwise.agreement.jury import Jury
from shardwise.agreement.posts import Answer, Post, RankState, Silence, digest
from shardwise.agreement.sight import RankHost, describe_hosts, this_host
from shardwise.agreement.store_link import StoreLink, StoreSilentError, own_connection
from shardwise.comm.groups import set_timeout
from shardwise.machine import process
from shardwise.machine.local_ranks import FOLDER
from shardwise.machine.process import Condition, Identity
from support import ranks, run_ranks
from support.fork_server import Forked
from support.training import train_step
from test_agreement import WithoutTags, begin, commit, train_on

LIMIT_S = 40


def join(rank, world_size, store, timeout_s=30.0):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))


def told(work, *args):
    """The text of the DisagreementError that `work` ends with."""
    with pytest.raises(shardwise.DisagreementError) as caught:
        work(*args)
    return str(caught.value)


# Worlds


def two_worlds(process, count, folder):
    """Processes 0 and 1 have an engine; then 1 and 2 form another world, in which only one had an engine before."""
    for name, members in (("first", (0, 1)), ("second", (1, 2))):
        if process in members:
            rank = members.index(process)
            join(rank, 2, dist.FileStore(f"{folder}/{name}", 2), 77.0)
            # As over NCCL, where ranks meet in the store before their first operation.
            with mock.patch("shardwise.engine.initialize.ProcessGroupComm", WithoutTags):
                engine = begin("zero3")
            timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in engine._comm._groups.own}
            assert timeouts == {timedelta(seconds=77)}
            train_step(engine, rank, 0)
            engine.destroy()
            dist.destroy_process_group()


def test_a_process_may_have_had_an_engine_in_another_world(tmp_path):
    """And the groups of an engine have the timeout of the world."""
    run_ranks(two_worlds, 3, tmp_path, fresh=True, init=False, timeout=LIMIT_S)


# A rank that stands still, or is late


def one_stops(rank, world_size):
    os.environ[agreement.FROZEN_VARIABLE] = "1.5"
    engine = begin("zero2")
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    train_step(engine, rank, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    text = told(commit, train_on, engine, rank)
    os.kill(pids[1], signal.SIGCONT)
    return text


def test_a_rank_that_stands_still_is_named():
    texts = run_ranks(one_stops, 3, fresh=True, timeout=LIMIT_S)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1 did not answer for 2 s while others wait for ")
    assert "is stopped (SIGSTOP, Ctrl-Z or a debugger)" in texts[0]


@ranks(2)
def test_the_timeout_of_the_configuration_counts_for_every_group(rank, world_size):
    """And a rank may be silent for that long."""
    before = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    engine = begin("zero3", runtime={"min_unit_bytes": 1, "timeout": 33})
    try:
        groups = [dist.group.WORLD, *engine._comm._groups.own]
        timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
        assert timeouts == {timedelta(seconds=33)}
        assert engine._comm._agreement.frozen_s == 33
    finally:
        set_timeout(None, before.total_seconds())
        engine.destroy()


def load_slowly(seconds):
    time.sleep(seconds)


def one_is_late(rank, world_size, folder):
    join(rank, world_size, dist.FileStore(f"{folder}/store", world_size), timeout_s=2.0)
    engine = begin("zero3")
    train_step(engine, rank, 0)
    if rank == 1:
        load_slowly(4.0)
    return told(commit, train_on, engine, rank)


def test_a_rank_that_is_late_is_named_with_the_place_where_it_is(tmp_path):
    texts = run_ranks(one_is_late, 2, tmp_path, fresh=True, init=False, timeout=LIMIT_S)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1 did not arrive within the process group's timeout of 2 s while others wait for")
    assert "in load_slowly" in texts[0]
    assert "longer timeout" in texts[0]


# The store


def store_is_hit(process, count, folder, number):
    """Processes 0 and 1 train; process 2 holds their store. Rank 0 waits for rank 1 when the signal comes."""
    os.environ[agreement.FROZEN_VARIABLE] = "1.5"
    path = folder / "address"
    if process == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(f"{store.port} {os.getpid()}")
        (folder / "new").rename(path)
        while not (folder / "done").exists():
            time.sleep(0.05)
        return ""
    while not path.exists():
        time.sleep(0.02)
    port, holder = map(int, path.read_text().split())
    join(process, 2, dist.TCPStore("127.0.0.1", port, is_master=False))
    engine = begin("zero3")
    train_step(engine, process, 0)
    if process == 0:
        os.kill(holder, number)
    while process == 1 and not (folder / "done").exists():
        time.sleep(0.05)
    started = time.monotonic()
    text = told(commit, train_on, engine, process)
    assert time.monotonic() - started < 20
    if process == 0 and number == signal.SIGSTOP:
        os.kill(holder, signal.SIGCONT)
    (folder / "done").touch()
    return text


@pytest.mark.parametrize(("number", "why"), [(signal.SIGKILL, "is gone"), (signal.SIGSTOP, "has not answered for")])
def test_ranks_stop_if_the_store_does(tmp_path, number, why):
    outcomes = run_ranks(
        store_is_hit, 3, tmp_path, number, fresh=True, init=False, check=False, timeout=LIMIT_S, grace=25
    )
    text = outcomes[0].value
    assert text is not None, outcomes[0].describe()
    assert text.startswith("rank 0 waits for gather "), text
    assert f"the store through which the ranks exchange their states {why}" in text
    assert "it is held by the process at 127.0.0.1:" in text
    assert f"  ranks 0, 1: on {socket.gethostname()}, this host\n" in text


def test_a_call_to_the_store_has_a_deadline():
    answers = threading.Event()
    link = StoreLink(answers, limit_s=0.3)
    with pytest.raises(StoreSilentError, match="did not answer"):
        link.run(lambda store: store.wait(30))
    dropped = []
    link.limit_s, began = 30.0, time.monotonic()
    with pytest.raises(StoreSilentError):
        link.run(dropped.append)
    assert time.monotonic() - began < 5  # a call is overdue: others do not wait their whole limit
    link.limit_s = 0.3
    with pytest.raises(ZeroDivisionError):
        link.run(lambda store: None, check=lambda: 1 / 0)
    answers.set()
    assert link.run(lambda store: store.is_set())
    assert not dropped
    with pytest.raises(KeyError):
        link.run(lambda store: {}["x"])
    link.close()
    assert not link._thread.is_alive()


def test_a_link_whose_call_never_returns_does_not_hold_the_exit():
    never = threading.Event()
    link = StoreLink(never, limit_s=0.1)
    with pytest.raises(StoreSilentError):
        link.run(lambda store: store.wait())
    began = time.monotonic()
    link.close()
    assert link._thread not in process._running  # what the end of the interpreter waits for
    assert time.monotonic() - began < 0.1
    never.set()


def test_all_engines_of_a_process_use_one_connection_which_ends_with_the_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection = own_connection(store)
    assert connection is own_connection(store)
    assert connection is not store
    gone = weakref.ref(connection)
    del connection, store
    assert gone() is None


class BusyStore(dist.HashStore):
    """A store that looks up names when a rank starts, as torch's does."""

    def set(self, key, value):
        if key.startswith("identity/"):
            time.sleep(0.5)
        super().set(key, value)


def test_a_store_that_is_busy_at_the_start_is_waited_for():
    board = Board(BusyStore(), 0, 1, limit_s=0.1)
    assert [post.state for post in board.read()] == [RankState.RUNS]
    board.close()


# The end of a process

SCRIPT = """
import atexit, os, sys, threading, time
def look():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise")], flush=True)
atexit.register(look)  # first, so it runs last
os.environ["SHARDWISE_AGREEMENT_POLL_S"] = "0.02"
import torch, torch.distributed as dist, shardwise
from shardwise.models.built_in import MLP
from shardwise.agreement.agreement import Agreement
poll = Agreement.poll
def poll_slowly(self):
    time.sleep(0.3)  # as a call to a busy store: the interpreter ends meanwhile
    poll(self)
Agreement.poll = poll_slowly
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
def engine():
    model = MLP(width=8, depth=3)
    return shardwise.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
dropped, kept = engine(), engine()
del dropped
kept.backward(kept(torch.ones(2, 8)))
kept.step()
kept.full_param("layers.0.weight")
dist.barrier()
"""


def test_no_thread_is_left_when_the_interpreter_ends(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    processes = []
    for rank in range(2):
        with (tmp_path / f"out{rank}").open("w") as out:
            command = [sys.executable, tmp_path / "script.py", tmp_path / "store"]
            processes.append(Forked(command, env=os.environ | {"RANK": str(rank)}, stdout=out))
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == ["[]\n", "[]\n"]


@ranks(2)
def test_what_a_death_leaves_in_a_buffer_is_no_object(rank, world_size):
    """On a device an operation that was broken off ends like any other; what it should have received is zeros."""
    engine = begin("zero0")
    share = engine.comm.share

    def broken_off(values, name="norm", channel="reduce"):
        rows = share(values, name, channel)
        if name == "checkpoint":
            rows[1 - rank] = 0
        return rows

    at_once = mock.patch.object(jury, "ANSWER_S", 0.2)
    fails = pytest.raises(shardwise.DisagreementError, match="broke")
    with mock.patch.object(engine.comm, "share", broken_off), at_once, fails:
        engine.comm.share_object({"wrote": True}, "checkpoint")
    assert engine.comm.has_failed


@ranks(2)
def test_what_a_death_leaves_in_a_buffer_decides_nothing(rank, world_size):
    """The first pass gathers what the ranks' numbers name: of a meeting that was broken off they are any numbers."""
    engine = begin("zero3")
    share = engine.comm.share

    def broken_off(values, name="norm", channel="reduce"):
        rows = share(values, name, channel)
        if "gathers next" in name:
            rows[1 - rank] = 10**9
            engine.comm._agreement.failure = "rank 1 died while others wait for it"
        return rows

    fails = pytest.raises(shardwise.DisagreementError, match="rank 1 died")
    with mock.patch.object(engine.comm, "share", broken_off), fails:
        train_step(engine, rank, 0)
    engine.destroy()


def test_an_error_of_the_device_is_explained_where_values_are_read():
    store, wakes = dist.HashStore(), []
    wire = Wire(lambda: wakes.append(1), lambda: "REMOTE_ERROR", 1.0)
    agreement = Agreement(store, 0, 2, True, wire, 0.05)
    with (
        mock.patch.object(jury, "ANSWER_S", 0.1),
        pytest.raises(shardwise.DisagreementError, match="while others wait"),
    ):
        agreement.check()
    assert wakes
    agreement.close()


@ranks(2)
def test_a_forked_process_does_not_speak_for_its_rank(rank, world_size):
    engine = begin("zero3")
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            engine._comm._agreement.close("the child ended")
        os._exit(0)
    os.waitpid(pid, 0)
    train_step(engine, rank, 0)
    assert not any(post.state is RankState.GONE for post in engine._comm._agreement._board.read())
    dist.barrier()
    engine.destroy()


# Judgements alone


def waits(at=("gather", 1), texts=("a", "b"), state=RankState.WAITS, **rest):
    return Post(state, at, issued(at[0], texts), waits_for=texts[at[1]], **rest)


def runs(gather=("a",)):
    return Post(RankState.RUNS, None, issued("gather", gather))


def issued(channel, texts):
    return {channel: (0, [digest(text) for text in texts])}


def test_a_death_names_the_operation_and_not_the_loop():
    lost = waits(("gather", 1), ["a", "gather head"], RankState.LOST)
    text = judge.died([lost, runs()], {1: "its process (7 on x) was ended by signal SIGSEGV; its output is in /log"})
    assert text.startswith("rank 1 died while others wait for gather head, so none of them can continue:\n")
    assert (
        "  rank 0: gather head\n  rank 1: its process (7 on x) was ended by signal SIGSEGV; its output is in /log"
        in text
    )
    assert "loop that ends early" not in text
    gone = Post(RankState.GONE, None, issued("gather", ["a"]), "it ended with ValueError: x")
    assert "Read the error of that rank" in judge.judge([waits(), gone]).text
    gone = Post(RankState.GONE, None, issued("gather", ["a"]), "its process ended")
    assert "loop that ends early" in judge.judge([waits(), gone]).text
    assert judge.died([lost, lost], {}).startswith("connections between the ranks broke while others wait")


def test_a_rank_without_the_store_names_the_hosts():
    hosts = [RankHost("a", True), RankHost("a", True), RankHost("b", False), RankHost("c", False)]
    text = judge.without_store(2, "gather head", "rank 0 at a:29500", "does not answer", describe_hosts(hosts, 2))
    assert text.splitlines()[1:4] == [
        "  ranks 0, 1: on a, where the store is",
        "  rank 2: on b, this host",
        "  rank 3: on c, which cannot be asked without the store",
    ]


def test_a_rank_knows_whether_the_store_is_on_its_host():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert this_host(dist.PrefixStore("x", store)) == RankHost(socket.gethostname(), True)
    elsewhere = mock.Mock(spec=["host"], host="192.0.2.1")  # an address that no host has
    assert not this_host(elsewhere).has_store
    assert not this_host(dist.HashStore()).has_store


def test_the_exit_that_the_launcher_saw_is_told(monkeypatch, tmp_path):
    (tmp_path / "rank1.exit").write_text("-11")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    identity = Identity.of_this_process()
    ended = type(identity)(identity.view, "here", 2**22 + 1, 0, "/log")
    condition, text = sight.see_process(1, ended)
    assert condition is Condition.ENDED
    assert text == f"its process ({2**22 + 1} on here) was ended by signal SIGSEGV; its output is in /log"


def test_silence_is_counted_from_the_first_call_without_an_answer():
    silence, others = Silence(), [Answer(2, ""), None]
    assert silence.listen([Answer(0, ""), None], 3.0) == [0.0, 0.0]
    silence.hear(1, 5.0)
    silence.hear(1, 6.0)
    silence.hear(2, 7.0)
    assert silence.listen([Answer(0, ""), *others], 9.0) == [4.0, 0.0, 0.0]
    assert silence.listen([Answer(1, ""), *others], 9.0) == [2.0, 0.0, 0.0]
    assert silence.listen([Answer(2, ""), *others], 9.0) == [0.0, 0.0, 0.0]
    silence.hear(9, 10.0)  # those in between were made while this rank did not poll
    assert silence.listen([Answer(2, ""), Answer(8, "")], 11.0) == [1.0, 1.0]


class ReadBoard:
    """A board with prepared readings."""

    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        return self.readings.pop(0)

    def decide(self, text):
        return text


def standstill(first_polls, second_polls, second_at=("reduce", 0)):
    return [waits(("gather", 0), ["a"], polls=first_polls), waits(second_at, ["r", "s"], polls=second_polls)]


@pytest.mark.parametrize(
    ("second", "is_real"),
    [
        pytest.param(standstill(4, 4), True, id="nobody moved"),
        pytest.param(standstill(4, 3), False, id="one has not polled again"),
        pytest.param(standstill(4, 4, ("reduce", 1)), False, id="one waits for something else"),
        pytest.param([*standstill(4, 4)[:1], runs()], False, id="one runs"),
    ],
)
def test_a_standstill_counts_only_if_a_second_reading_repeats_it(second, is_real):
    jury = Jury(ReadBoard(standstill(3, 3), second), None, Pace.of(2, 0.5), 120.0)
    # After no polls, a final finding would wait for other posts.
    assert jury._judge(0, 0.0) is None
    assert (jury._judge(0, 0.0) is not None) == is_real


def test_a_rank_that_left_need_not_poll_again():
    gone = Post(RankState.GONE, None, issued("reduce", ["r"]), "its process ended")
    jury = Jury(ReadBoard(), None, Pace.of(2, 0.5), 120.0)
    first, second = [waits(("gather", 0), ["a"], polls=3), gone], [waits(("gather", 0), ["a"], polls=4), gone]
    assert not jury._is_confirmed(first)
    assert jury._is_confirmed(second)
