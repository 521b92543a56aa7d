"""Transformers' Trainer and PEFT, unmodified, on two ranks with DeepSpeed's configuration files."""

import pytest

from clients import trainer_runs
from clients.devices import DEVICES
from support import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(360)  # for whichever test comes first, and waits for a fixture of the module
START = {"fresh": True, "init": False, "torchrun": True, "timeout": 300}


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, device):
    return str(tmp_path_factory.mktemp(f"trainer-{device}"))


@pytest.fixture(scope="module")
def runs(folder, device):
    return run_ranks(trainer_runs.run_all, 2, folder, device, **START)[0]


@pytest.fixture(scope="module")
def more(folder, device):
    return run_ranks(trainer_runs.run_more, 2, folder, device, **START)[0]


@pytest.mark.parametrize("steps", [4, 2], ids=["K1", "K2"])
def test_every_stage_gives_the_same_losses_and_the_same_file(runs, steps):
    names = ("0", "1", "3") if steps == 4 else [f"K2 {stage}" for stage in trainer_runs.STAGES]
    first, *others = (runs[name] for name in names)
    assert len(first["losses"]) == steps
    assert first["losses"][-1] < first["losses"][0]
    for other in others:
        assert other["losses"] == first["losses"]
        assert other["digest"] == first["digest"]
        assert other["norms"] == pytest.approx(first["norms"])


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(runs):
    assert runs["resumed"]["digest"] == runs["whole"]["digest"]
    assert runs["resumed"]["losses"] == runs["whole"]["losses"]
    assert {"model.safetensors", "latest", "global_step8", "zero_to_fp32.py", "scheduler.pt"} <= set(runs["files"])


def test_the_best_model_is_reloaded(runs):
    assert runs["best"]["after"] == pytest.approx(runs["best"]["lowest"])


@pytest.mark.parametrize("what", ["missing", "resized", "LoRA", "LoRA resized", "DoRA", "prompt"])
def test_stage_3_starts_from_the_same_weights_as_stage_2(runs, what, device):
    if device == "cuda" and what not in ("LoRA", "prompt"):
        pytest.skip("the clients make these weights on the host for stage 2, and on the GPU for gathered parameters")
    assert runs[f"{what} 3"]["losses"] == runs[f"{what} 2"]["losses"]
    assert runs[f"{what} 3"]["digest"] == runs[f"{what} 2"]["digest"]


@pytest.mark.parametrize("run", ["LoRA 2", "LoRA 3", "DoRA 3"])
def test_the_frozen_base_of_adapters_is_untouched(runs, run):
    assert runs[run]["unchanged"] == runs[run]["frozen"] > 10


def test_frozen_parameters_are_left_out_of_checkpoints_with_adapters(runs):
    saved, left_out = runs["left out"]
    assert (saved, left_out) == (8, runs["LoRA 3"]["frozen"])
    assert runs["LoRA resumed"]["digest"] == runs["LoRA 3"]["digest"]
    assert runs["LoRA resumed"]["unchanged"] == left_out


@pytest.mark.clients
@pytest.mark.parametrize("stage", trainer_runs.MORE_STAGES)
def test_other_offloads_give_the_same_losses_and_the_same_file(runs, more, stage):
    assert more[f"K2 {stage}"]["losses"] == runs["K2 0"]["losses"]
    assert more[f"K2 {stage}"]["digest"] == runs["K2 0"]["digest"]


@pytest.mark.clients
def test_an_encoder_and_a_decoder_generate_in_evaluations(more):
    assert more["T5 3"] == more["T5 2"]
    assert len(more["T5 3"]["made"]) == 2


@pytest.mark.clients
def test_train_may_be_called_again(more):
    losses = more["second train"]
    assert losses["3", 0] == losses["2", 0]
    assert losses["3", 1] == losses["2", 1]
    assert sum(losses["2", 1]) < sum(losses["2", 0])


@pytest.mark.clients
def test_steps_that_overflow_in_fp16_are_skipped(more):
    one, three = more["fp16"]["1"], more["fp16"]["3"]
    for key in ("losses", "digest", "skipped", "scale"):
        assert three[key] == one[key]
    assert 0 < one["skipped"] < one["steps"] == 16
    assert one["scale"] < 2**26
    assert one["losses"][-1] < one["losses"][0]


def test_all_ranks_may_save_what_rank_0_has_gathered(runs):
    assert len(set(runs["saved by all"])) == 1


def test_ranks_may_generate_different_numbers_of_tokens(runs):
    assert runs["generated"] == 2


def test_a_smaller_batch_is_tried_when_memory_runs_out(runs):
    assert runs["batch size"] == [2, 2, 1, 1]


def test_optimizer_and_schedule_of_the_configuration(runs):
    assert runs["own optimizer"]["rates"] == pytest.approx([0.0, 0.01, 0.01, 0.01])


@pytest.mark.clients
def test_one_rank_with_two_micro_batches_learns_the_same_as_two_ranks(runs, folder, device):
    alone = run_ranks(trainer_runs.alone, 1, folder, device, **START)[0]
    assert alone["K2 alone"]["losses"] == pytest.approx(runs["3"]["losses"], rel=1e-5)
    assert alone["resumed alone"]["losses"] == pytest.approx(runs["whole"]["losses"], rel=1e-4)
