"""What many ranks ask of one store: bounded at rest, in meetings and after a death, and the error says the same.

The ranks are simulated (benchmarks/agreement_scale.py): real agreements of one process, with connections of their own.
"""

import doctest
import importlib.util
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.agreement import agreement, board, jury, log, posts
from shardwise.agreement.board import Board
from shardwise.agreement.log import Turns

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RANKS = 24
GATHER = ("gather", "gather model.layers.7, 202383360 elements")


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("agreement_scale", BENCHMARKS / "agreement_scale.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["agreement_scale"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["agreement_scale"]


@pytest.fixture(scope="module")
def crowd(scale):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, scale.Holder(range(RANKS), RANKS, store.port)


@pytest.fixture
def holder(crowd, request):
    _, made = crowd
    made.make(request.node.name, history=False)
    yield made
    made.close()


def test_the_examples_of_the_pure_modules():
    for module in (board, posts, log):
        found = doctest.testmod(module)
        assert (found.failed, found.attempted > 0) == (0, True)


def test_a_rank_at_rest_asks_one_question_a_poll(holder):
    time.sleep(0.5)
    before = Counter(holder.requests)
    time.sleep(2.0)
    asked = Counter(holder.requests) - before
    assert set(asked) == {"check", "bytes"}
    assert 0.5 * RANKS <= asked["check"] / 2.0 <= RANKS / agreement.POLL_S * 1.2


def test_an_operation_that_was_not_described_is_asked_for(holder):
    """Rank 5 issued another operation and went on in its own code: its post has only a digest of it."""
    holder.ranks[5].agreement.issue("gather", "gather model.layers.8, 202383360 elements", True)
    holder.wait({5: None}, GATHER)
    holder.ranks[5].agreement._post(agreement.RankState.RUNS)
    _, texts = holder.ended(30.0)
    [text] = [text for text in texts if text]
    assert text.startswith("the ranks disagree on the next operation")
    assert "rank 5: gather model.layers.8, 202383360 elements" in text
    assert "not described" not in text


def test_ranks_that_lose_their_connections_at_once_get_one_text(holder):
    holder.wait({}, GATHER)
    time.sleep(0.2)
    before = Counter(holder.requests)
    holder.lose()
    _, texts = holder.ended(30.0)
    assert len(texts) == 1
    assert texts[0].startswith("connections between the ranks broke while others wait for gather model.layers.7")
    # Eight of them read what all have posted; the rest wait for their verdict.
    assert (Counter(holder.requests) - before)["multi_get"] < 8 * 3 * 60


def test_if_those_that_find_out_are_lost_a_few_others_do(holder, monkeypatch):
    monkeypatch.setattr(jury, "ANSWER_S", 0.5)
    asking, call = [], jury.Inquiry._call
    monkeypatch.setattr(jury.Inquiry, "_call", lambda self, *args: (asking.append(self), call(self, *args))[1])
    for _ in range(board.JUDGES):  # ranks that died after they enlisted
        holder.ranks[0].agreement._board.enlist("inquiry/0")
    holder.wait({}, GATHER)
    time.sleep(0.2)
    holder.lose()
    _, texts = holder.ended(30.0)
    assert len(texts) == 1
    assert texts[0].startswith("connections between the ranks broke while others wait for gather model.layers.7")
    assert 1 <= len(set(asking)) <= board.JUDGES


def test_ranks_that_close_lose_nothing(holder, monkeypatch):
    """Their connections end one after another, as an operation breaks and as the device sees it."""
    enlisted, enlist = [], Board.enlist
    monkeypatch.setattr(Board, "enlist", lambda self, name: (enlisted.append(name), enlist(self, name))[1])
    holder.wait({}, GATHER)
    time.sleep(0.2)
    ranks = holder.ranks
    for rank in ranks:
        rank.agreement.is_ending, rank.device_error = True, "REMOTE_ERROR"
    time.sleep(1.2)
    holder.close()
    assert {rank.text for rank in ranks} == {""}
    assert {rank.agreement.failure for rank in ranks} == {None}
    assert not enlisted  # to find out why


def test_ranks_that_meet(holder, monkeypatch):
    units = [f"blocks.{number}" for number in range(30)]
    calls = [["name_units", units], *(["issue", "gather", f"gather {unit}, 8 elements", False, unit] for unit in units)]
    met, arrive = [], Board.arrive
    monkeypatch.setattr(Board, "arrive", lambda self, name, check: (met.append(name), arrive(self, name, check))[1])
    holder.replay(calls)
    ended, texts = holder.ended(30.0)
    assert (ended < float("inf"), texts) == (True, [""])
    assert met == ["gather/0/gather blocks.0, 8 elements"] * RANKS


def test_a_rank_that_deviates_is_never_let_through():
    """After one history all ranks know the same single operation."""
    units = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    one, other = Turns(), Turns()
    for each in (one, other):
        each.name_units(units)
        for unit in units[:4]:
            each.take("gather", f"gather {unit}, 8 elements", unit)
    assert one.take("gather", "gather blocks.3, 8 elements", "blocks.3")
    for text, unit in [("gather blocks.2", "blocks.2"), ("reduce blocks.3", "blocks.3"), ("gather head", "head")]:
        assert not other.take("gather", f"{text}, 8 elements", unit)
        other.restart("gather", "the forward was broken off")


def test_after_what_an_exchange_announced_the_same_exchange_is_expected_alone():
    one, other = Turns(), Turns()
    for each in (one, other):
        each.name_units(["embed", "blocks.0", "blocks.1"])
        assert not each.take("gather", "share what is next, 2 elements", "")
        for unit in ("blocks.1", "embed"):
            assert each.take("gather", f"gather {unit}, 8 elements", unit, is_announced=True)
    assert one.take("gather", "share what is next, 2 elements", "")
    assert not other.take("gather", "gather blocks.0, 8 elements", "blocks.0")
    assert not other.take("gather", "share what is next, 2 elements", "")


def test_a_rank_that_starts_late_was_not_silent_before():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = Board(store, 0, 2, 5.0)
    for _ in range(3):
        first.call_roll()
    late = Board(store, 1, 2, 5.0)
    assert [answer.number for answer in first.answers()] == [3, 3]
    assert not late.hear(lambda: "")
    first.decide("the end")
    assert late.hear(lambda: f"at {os.getpid()}")
    assert late.verdict() == "the end"
    first.close()
    late.close()


def test_an_answer_keeps_its_operation_when_the_roll_is_called_again():
    """Whoever asked may read the answers late, and calls without a question come from any rank at any time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asking, asked = (Board(store, rank, 2, 5.0, lambda at: f"{at[0]} {at[1]}") for rank in (0, 1))
    asking.call_roll(("gather", 41))
    assert asked.hear(lambda: "")
    asking.call_roll()
    assert asked.hear(lambda: "")
    assert asking.answers()[1].text == "gather 41"
    store.set(f"news/{asking.called + 1}", "null")  # another rank calls the roll at the same moment
    asking.call_roll(("reduce", 7))
    assert asked.hear(lambda: "")
    assert asking.answers()[1] == (asking.called, "", "reduce 7")
    asking.close()
    asked.close()
