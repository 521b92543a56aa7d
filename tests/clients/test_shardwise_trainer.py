"""`shardwise.integrations.transformers.ShardwiseTrainer` on two ranks, beside Trainer through DeepSpeed's API."""

import math

import pytest

from clients import plain_trainer_runs
from support import run_ranks

pytest.importorskip("transformers", reason="needs the extra hf")
pytest.importorskip("peft", reason="needs the extra hf")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]
OPTIONS = {"fresh": True, "init": False, "torchrun": True, "timeout": 300}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("trainer"))
    other = run_ranks(plain_trainer_runs.through_deepspeed, 2, folder, **OPTIONS)[0]
    found = run_ranks(plain_trainer_runs.without, 2, folder, **OPTIONS)[0]
    alone = run_ranks(plain_trainer_runs.alone, 1, folder, **OPTIONS)[0]
    return found | {"deepspeed": other, "alone": alone}


@pytest.mark.parametrize("name", ["1", "3", "K2 2", "K2 3", "bf16 3", "smooth 3"])
def test_it_trains_as_trainer_does_through_deepspeeds_api(runs, name):
    """Losses, learning rates, norms and the saved weights."""
    assert runs[name] == runs["deepspeed"][name]
    assert len(runs[name]["losses"]) == (2 if name.startswith("K2") else 4)


def test_stages_and_precisions(runs):
    assert runs["3"] == runs["1"] == runs["3 offload"]
    assert all(math.isfinite(loss) for loss in runs["fp16 3"]["losses"])
    assert runs["fp16 3"]["losses"] != runs["3"]["losses"]


def test_it_resumes_in_another_stage_and_on_another_number_of_ranks(runs):
    assert len(runs["whole"]["losses"]) == 8
    assert runs["resumed"] == runs["whole"]
    assert {"shardwise", "model.safetensors", "scheduler.pt", "trainer_state.json"} <= set(runs["files"])
    assert "optimizer.pt" not in runs["files"]
    assert runs["alone"]["losses"] == pytest.approx(runs["whole"]["losses"], rel=1e-3)
    assert runs["best"]["after"] == runs["best"]["lowest"]


def test_adapters_are_saved_and_the_base_is_untouched(runs):
    assert runs["LoRA"] == {"kept": True, "saved": True, "adapters": 8}


def test_a_contradiction_is_refused(runs):
    assert runs["refused"].startswith("ConfigError: TrainingArguments(bf16=True) and precision.compute: fp16 differ")
