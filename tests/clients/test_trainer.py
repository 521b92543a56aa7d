"""Transformers' Trainer and PEFT, unmodified, on two ranks with DeepSpeed's configuration files."""

import pytest

from clients import trainer_runs
from support import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")
START = {"fresh": True, "init": False, "torchrun": True, "timeout": 300}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def runs(folder):
    return run_ranks(trainer_runs.run_all, 2, folder, **START)[0]


@pytest.mark.timeout(360)
def test_every_stage_gives_the_same_losses_and_the_same_file(runs):
    stages = [runs[stage] for stage in ("0", "1", "2", "3", "2 offload", "3 offload")]
    assert len(stages[0]["losses"]) == 4
    assert all(each["losses"] == stages[0]["losses"] for each in stages)
    assert {each["digest"] for each in stages} == {stages[0]["digest"]}
    assert stages[0]["losses"][-1] < stages[0]["losses"][0]
    assert stages[3]["norms"] == pytest.approx(stages[0]["norms"])


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(runs):
    assert runs["resumed"]["digest"] == runs["whole"]["digest"]
    assert runs["resumed"]["losses"] == runs["whole"]["losses"]
    assert {"model.safetensors", "latest", "global_step8", "zero_to_fp32.py", "scheduler.pt"} <= set(runs["files"])


def test_the_best_model_is_reloaded(runs):
    assert runs["best"]["after"] == pytest.approx(runs["best"]["lowest"])


@pytest.mark.parametrize("what", ["missing", "resized", "LoRA"])
def test_stage_3_starts_from_the_same_weights_as_stage_2(runs, what):
    assert runs[f"{what} 3"]["losses"] == runs[f"{what} 2"]["losses"]
    assert runs[f"{what} 3"]["digest"] == runs[f"{what} 2"]["digest"]


@pytest.mark.parametrize("run", ["LoRA 2", "LoRA 3", "DoRA 3"])
def test_the_frozen_base_of_adapters_is_untouched(runs, run):
    assert runs[run]["unchanged"] == runs[run]["frozen"] > 10


def test_ranks_may_generate_different_numbers_of_tokens(runs):
    assert runs["generated"] == 2


def test_a_smaller_batch_is_tried_when_memory_runs_out(runs):
    assert runs["batch size"] == [2, 2, 1, 1]


def test_optimizer_and_schedule_of_the_configuration(runs):
    assert runs["own optimizer"]["rates"] == pytest.approx([0.0, 0.01, 0.01, 0.01])


@pytest.mark.clients
@pytest.mark.timeout(360)
def test_one_rank_with_two_micro_batches_learns_the_same_as_two_ranks(runs, folder):
    alone = run_ranks(trainer_runs.alone, 1, folder, **START)[0]
    assert alone["K2 alone"]["losses"] == pytest.approx(runs["3"]["losses"], rel=1e-5)
    assert alone["resumed alone"]["losses"] == pytest.approx(runs["whole"]["losses"], rel=1e-4)
