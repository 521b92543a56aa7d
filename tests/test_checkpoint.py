"""Contract C6: what is saved loads at any other layout with every bit, and resuming is never having stopped."""

import pytest
import torch

from support import ranks
from support.training import digest, start, train_step

STAGES = ["zero0", "zero1", "zero2", "zero3"]


@ranks(1, 2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("blocking", [True, False])
def test_resuming_is_never_having_stopped(rank, world_size, preset, blocking, tmp_path):
    engine = start("odd", {"preset": preset})
    for step in range(2):
        train_step(engine, rank, step)
    engine.save(tmp_path, state={"epoch": 3, "seen": torch.arange(4)}, blocking=blocking)
    expected = []
    for step in range(2, 4):
        train_step(engine, rank, step)
        expected.append(digest(engine))
    drawn = torch.rand(3)
    engine.finish_save()
    engine.destroy()

    engine = start("odd", {"preset": preset})
    torch.manual_seed(99)
    state = engine.load(tmp_path)
    assert state["epoch"] == 3
    assert torch.equal(state["seen"], torch.arange(4))
    assert engine.steps == 2
    seen = []
    for step in range(2, 4):
        train_step(engine, rank, step)
        seen.append(digest(engine))
    assert seen == expected
    assert torch.equal(torch.rand(3), drawn)
    engine.destroy()
