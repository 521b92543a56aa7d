"""Lightning's own DeepSpeedStrategy, unmodified, on two ranks: training, validation, checkpoints."""

import pytest

from clients import lightning_runs
from clients.devices import DEVICES
from support import run_ranks

pytest.importorskip("pytorch_lightning")
pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


@pytest.mark.parametrize("device", DEVICES)
def test_stages_2_and_3_train_alike_and_resume(tmp_path, device):
    options = {"fresh": True, "init": False, "torchrun": True, "timeout": 250}
    count = 2 if device == "cpu" else 1  # Lightning gives every rank a GPU of its own
    runs = run_ranks(lightning_runs.run_all, count, str(tmp_path), device, **options)[0]
    assert len(runs[2]["losses"]) == 16 // count
    assert runs[3] == runs[2]
    assert runs[3]["merged"][:2] == (1, 8)
    assert runs[3]["straight"] == runs[3]["losses"] + runs[3]["resumed"]
