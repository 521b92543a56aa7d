"""`shardwise.integrations.lightning.ShardwiseStrategy` on two ranks: as DDP trains, in every stage."""

import pytest
import torch

from clients import strategy_runs
from support import run_ranks

pytest.importorskip("lightning", reason="needs the extra lightning")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
OPTIONS = {"fresh": True, "init": False, "torchrun": True, "timeout": 250}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("lightning"))
    found = run_ranks(strategy_runs.run_all, 2, folder, **OPTIONS)[0]
    return found | {"alone": run_ranks(strategy_runs.alone, 1, folder, **OPTIONS)[0]}


def close(one, other, **options):
    torch.testing.assert_close(one["losses"], other["losses"], **options)
    torch.testing.assert_close(one["weights"], other["weights"], **options)


@pytest.mark.parametrize("stage", strategy_runs.STAGES)
def test_it_trains_as_ddp_does_and_alike_in_every_stage(runs, stage):
    """With accumulation, clipping by norm, a schedule for each epoch, and validation."""
    close(runs[stage], runs["ddp"], rtol=1e-4, atol=1e-6)
    assert runs[stage]["losses"] == runs["zero3"]["losses"]
    assert runs[stage]["val"] == runs["zero3"]["val"]
    assert all(torch.equal(value, runs["zero3"]["weights"][name]) for name, value in runs[stage]["weights"].items())


def test_precision_is_that_of_the_trainer(runs):
    close(runs["bf16-mixed"], runs["ddp bf16"], rtol=2e-2, atol=1e-3)
    assert runs["bf16-true"]["losses"] == runs["zero2 bf16-true"]["losses"]
    for name in ("bf16-true", "16-true"):
        assert runs[name]["losses"] != runs["zero3"]["losses"]
        count = 2 if name == "16-true" else None  # later it has skipped steps, until the loss scale fits
        torch.testing.assert_close(runs[name]["losses"][:count], runs["ddp"]["losses"][:count], rtol=0.1, atol=0.02)
        assert {value.dtype for value in runs[name]["weights"].values()} == {torch.float32}


def test_manual_optimization_and_a_deferred_model(runs):
    close(runs["manual"], runs["ddp manual"], rtol=1e-4, atol=1e-6)
    assert runs["deferred"]["losses"] == runs["zero3"]["losses"]


def test_it_resumes_in_another_stage_and_with_another_number_of_processes(runs):
    assert runs["halves"] == runs["straight"]
    assert len(runs["files"]) == 1  # it was saved after each epoch, and the older one is gone
    assert runs["alone"]["steps"] == 6 * 2 // 2 + 6  # two epochs of 6 batches a rank, then one of 12
    assert 0 < runs["tested"] < 10


def test_weights_alone_are_a_file_of_lightnings_own(runs):
    read = runs["alone"]["weights"]
    assert all(torch.equal(value, read[name]) for name, value in runs["after two"].items())


def test_what_cannot_be_done_is_refused_by_name(runs):
    assert len(runs["refused"]) == 2
    assert "DoublePrecision (64-true)" in runs["refused"][0]
    assert "gradient_clip_algorithm is" in runs["refused"][1]


def test_a_fit_that_fails_ends_with_the_modules_own_error(runs):
    """The engine is destroyed then, as with `keeps_model=False`, and Lightning leaves the empty model where it is."""
    assert runs["raised"] == "KeyError: 'a bad batch'"
