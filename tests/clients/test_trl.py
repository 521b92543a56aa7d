"""TRL, unmodified, on two ranks: the same losses and files under stages 2 and 3."""

import pytest

from clients import trl_runs
from support import run_ranks

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("trl"))
    return run_ranks(trl_runs.run_all, 2, folder, fresh=True, init=False, torchrun=True, timeout=500)[0]


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_stage_3_trains_as_stage_2(runs, method, adapters):
    two, three = runs[method, "2", adapters], runs[method, "3", adapters]
    assert len(two["losses"]) == 2
    assert three["losses"] == two["losses"]
    assert three["digest"] == two["digest"]
