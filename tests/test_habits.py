"""Habits from plain torch, DDP and other libraries: each is right, refused, or warned about once."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import HabitWarning, ModelChangedError
from support import ranks
from support.training import make_batch, make_model, make_sgd, start, train_step

PRESETS = ["zero1", "zero3"]


def notices(caught):
    return [str(warning.message) for warning in caught if issubclass(warning.category, HabitWarning)]


# torch.autocast, and model(x) instead of engine(x)


class Probe(nn.Module):
    """Two layers that remember the dtypes they computed in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        y = self.second(torch.tanh(self.first(x)))
        self.seen.append((x.dtype, y.dtype))
        return y


def on_probe(precision, preset="zero1"):
    model = Probe()
    return shardwise.initialize(model, make_sgd(model), {"preset": preset, "precision": precision})


@ranks(1, 2)
@pytest.mark.parametrize("preset", PRESETS)
def test_an_outer_autocast_is_honoured(rank, world_size, preset):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    weights = []
    for how in ("outer", "configured"):
        engine = on_probe({"compute": "bf16", "autocast": True} if how == "configured" else {}, preset)
        for _ in range(2):
            # All of the step inside: autocast keeps casts of the weights until it ends.
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "outer"):
                engine.backward(engine(x).float().square().mean())
                engine.step()
        assert set(engine.module.seen) == {(torch.float32, torch.bfloat16)}
        weights.append(engine.full_param("first.weight"))
        engine.destroy()
    assert torch.equal(*weights)


def test_an_outer_autocast_that_contradicts_the_configuration_is_refused():
    x = torch.randn(4, 8)
    for precision in ({"compute": "bf16"}, {"compute": "bf16", "autocast": True}):
        engine = on_probe(precision)
        with torch.autocast("cpu", torch.float16), pytest.raises(shardwise.ConfigError, match="give both the same"):
            engine(x)
        engine.backward(engine(x).float().sum())
        engine.destroy()
    engine = on_probe({})
    with torch.autocast("cpu", torch.float16), pytest.raises(shardwise.ConfigError, match="and leave torch"):
        engine(x)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert engine(x).dtype == torch.float16
    engine.destroy()


def test_buffers_of_another_dtype_are_explained():
    class Buffered(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("base", torch.eye(8))

        def forward(self, x):
            return super().forward(x @ self.base)

    for precision, says in (({"compute": "bf16"}, True), ({"compute": "bf16", "autocast": True}, False)):
        model = Buffered()
        engine = shardwise.initialize(model, make_sgd(model), {"preset": "zero1", "precision": precision})
        if says:
            with pytest.raises(RuntimeError, match="same dtype") as caught:
                engine(torch.randn(4, 8))
            assert any("precision.autocast: true" in note for note in caught.value.__notes__)
        else:
            engine(torch.randn(4, 8))
        engine.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("precision", [{"compute": "bf16"}, {"compute": "bf16", "autocast": True}])
def test_calling_the_model_is_calling_the_engine(rank, world_size, preset, precision):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    weights = []
    for how in ("engine", "model"):
        engine = on_probe(precision, preset)
        call = engine if how == "engine" else engine.module
        for _ in range(2):
            engine.backward(call(x).float().square().mean())
            engine.step()
        weights.append(engine.full_param("first.weight"))
        with torch.no_grad():
            weights.append(call(x))
        seen = torch.float32 if precision.get("autocast") else torch.bfloat16
        assert set(engine.module.seen) == {(seen, torch.bfloat16)}
        engine.destroy()
        assert not {"_call_impl", "_compiled_call_impl"} & vars(engine.module).keys()
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_an_exception_in_a_direct_call_leaves_the_engine_at_rest(rank, world_size, preset):
    engine = start("mlp", {"preset": preset})
    expected = [train_step(engine, rank, step) for step in range(2)]
    engine.destroy()
    engine = start("mlp", {"preset": preset})
    hook = engine.module.layers[1].register_forward_hook(lambda *_: 1 / 0)
    for call in (engine, engine.module):
        with pytest.raises(ZeroDivisionError):
            call(make_batch(engine.module, rank, 0))
    hook.remove()
    assert [train_step(engine, rank, step) for step in range(2)] == expected
    engine.destroy()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_that_is_recomputed_or_calls_itself(preset):
    from torch.utils.checkpoint import checkpoint

    x, weights = torch.randn(4, 8), []
    for recomputed in (False, True):
        engine = on_probe({"compute": "bf16"}, preset)
        out = checkpoint(engine.module, x, use_reentrant=False) if recomputed else engine(x)
        engine.backward(out.float().square().mean())
        engine.step()
        weights.append(engine.full_param("first.weight"))
        engine.destroy()
    assert torch.equal(*weights)


def test_copies_of_a_model_have_their_own_call():
    engine = on_probe({"compute": "bf16"})
    for plain in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):
        assert "_call_impl" not in vars(plain)
        assert plain.float()(torch.randn(4, 8)).dtype == torch.float32
    engine.destroy()


@pytest.mark.parametrize("how", ["before", "after", "engine", "wrapped"])
def test_a_model_compiled_as_a_whole_keeps_its_precision(how):
    from torch._dynamo.utils import counters

    preset = "zero3"
    torch._dynamo.reset()
    counters.clear()
    model, x = Probe(), torch.randn(4, 8)
    if how == "before":
        model.compile(backend="aot_eager")
    engine = shardwise.initialize(model, make_sgd(model), {"preset": preset, "precision": {"compute": "bf16"}})
    if how == "after":
        model.compile(backend="aot_eager")
    call = engine if how == "engine" else model
    if how in ("engine", "wrapped"):
        call = torch.compile(call, backend="aot_eager")
    for _ in range(2):
        out = call(x)
        assert out.dtype == torch.bfloat16
        engine.backward(out.float().square().mean())
        engine.step()
    assert counters["frames"]["ok"] >= 1
    plain = on_probe({"compute": "bf16"}, preset)
    for _ in range(2):
        plain.backward(plain(x).float().square().mean())
        plain.step()
    torch.testing.assert_close(engine.full_param("first.weight"), plain.full_param("first.weight"))
    engine.destroy()
    plain.destroy()


# A model that changes under its engine


@ranks(1, 2)
@pytest.mark.parametrize("preset", PRESETS)
def test_new_trainable_parameters_are_named(rank, world_size, preset):
    engine = on_probe({}, preset)
    engine.module.extra = nn.ReLU()
    engine.module.register_parameter("frozen", nn.Parameter(torch.zeros(8), requires_grad=False))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.module.second = nn.Linear(8, 8)
    engine.backward(engine(x).square().mean())
    for _ in range(2):
        with pytest.raises(ModelChangedError, match=r"'second.weight' and 1 more parameters are .* before shardwise"):
            engine.step()
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_rebound_parameters_are_refused_or_kept(rank, world_size, preset):
    engine = on_probe({"compute": "bf16"}, preset)
    x, weight = torch.randn(4, 8), engine.module.first.weight
    with shardwise.gathered(weight, write=True):
        weight.data = torch.full_like(weight, 0.5)
    assert engine.full_param("first.weight").eq(0.5).all()
    with pytest.raises(ModelChangedError, match="resize before"), shardwise.gathered(weight, write=True):
        weight.data = torch.zeros(9, 8, dtype=torch.bfloat16)
    engine.destroy()
    engine = on_probe({}, preset)
    engine.backward(engine(x).square().mean())
    attempt = engine.step
    if preset == "zero1":
        engine.module.first.weight.data = torch.zeros(8, 8)
    else:
        attempt = partial(setattr, engine.module.first.weight, "data", torch.zeros(8, 8))
    with pytest.raises(RuntimeError, match=r"inside `with shardwise.gathered\(params, write=True\):`"):
        attempt()
    engine.destroy()


class Normalises(nn.Linear):
    """Gives its weight other storage in each forward, while `is_on`."""

    is_on = True

    def forward(self, x):
        if self.is_on:
            self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


@ranks(1, 2)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_rebound_in_a_forward_are_refused(rank, world_size, preset, place):
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    layers[place] = Normalises(8, 8)
    model = nn.Sequential(*layers)
    config = {"preset": preset, "runtime": {"min_unit_bytes": 1}, "precision": {"compute": "bf16"}}
    engine = shardwise.initialize(model, make_sgd(model), config)

    def train():
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()

    before = engine.full_param(f"{place}.weight")
    with pytest.raises(ModelChangedError, match=rf"'{place}\.weight' was given other storage"):
        train()
    if preset == "zero3":  # a pass without gradients, a part called alone; then training goes on with the old values
        for call in (engine, model, model[place]):
            with pytest.raises(ModelChangedError, match="was given other storage"), torch.no_grad():
                call(torch.ones(2, 8, dtype=torch.bfloat16))
        assert torch.equal(engine.full_param(f"{place}.weight"), before)
        with shardwise.gathered(model.parameters(), write=True):
            engine(torch.ones(2, 8))  # kept
        assert not torch.equal(engine.full_param(f"{place}.weight"), before)
        model[place].is_on = False
        train()
    engine.destroy()


def test_resized_embeddings_are_named_by_the_backward():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
    engine = shardwise.initialize(model, make_sgd(model), "zero1")
    model[0].weight.data = torch.randn(9, 4)
    loss = engine(torch.tensor([[0, 8]])).sum()
    with pytest.raises(ModelChangedError, match=r"'0.weight' was given other storage .* resize before shardwise"):
        engine.backward(loss)
    engine.destroy()


def adapted():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Probe(), peft.LoraConfig(target_modules=["first", "second"], init_lora_weights=False))
    return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("safe", [False, True])
def test_adapters_merge_under_an_engine(rank, world_size, preset, safe):
    model, optimizer = adapted()
    engine = shardwise.initialize(model, optimizer, preset)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(x).square().mean())
    engine.step()
    plain = copy.deepcopy(model)
    before = engine(x)
    model.merge_adapter(safe_merge=safe)
    torch.testing.assert_close(engine(x), before)
    plain.merge_adapter()
    name = "base_model.model.first.base_layer.weight"
    assert torch.equal(engine.full_param(name), plain.get_parameter(name).detach())
    model.unmerge_adapter()
    torch.testing.assert_close(engine(x), before)
    engine.backward(engine(x).square().mean())
    engine.step()
    with pytest.raises(ModelChangedError, match=r"copy.deepcopy\(engine.module\).merge_and_unload\(\)"):
        model.merge_and_unload()
    merged = copy.deepcopy(model).merge_and_unload()
    torch.testing.assert_close(merged(x), engine(x))
    engine.destroy()
    assert "merge_adapter" not in vars(model.base_model)


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_adapters_added_afterwards_are_named(rank, world_size, preset):
    peft = pytest.importorskip("peft")
    engine = on_probe({}, preset)
    model = peft.get_peft_model(engine.module, peft.LoraConfig(target_modules=["first"]))
    engine.backward(model(torch.randn(4, 8)).square().mean())
    with pytest.raises(ModelChangedError, match=r"'first.lora_A.default.weight' and 1 more"):
        engine.step()
    engine.destroy()


# What is said once


def test_a_scheduler_that_the_loop_steps_too_is_noticed():
    for habit in (False, True):
        model = make_model("mlp")
        optimizer = make_sgd(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        engine = shardwise.initialize(model, optimizer, "zero1", lr_scheduler=scheduler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(5):
                train_step(engine, 0, step)
                if habit:
                    scheduler.step()
                if step == 1:
                    scheduler.load_state_dict(scheduler.state_dict() | {"_step_count": 20, "last_epoch": 19})
        assert len(notices(caught)) == habit
        assert not habit or "remove scheduler.step() from the loop" in notices(caught)[0]
        engine.destroy()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_scheduler_that_needs_a_metric_is_refused(preset):
    model = make_model("mlp")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    for given in (plateau(make_sgd(model)), plateau):
        with pytest.raises(shardwise.ConfigError, match="ReduceLROnPlateau: its step needs metrics"):
            shardwise.initialize(model, make_sgd(model), preset, lr_scheduler=given)
    engine = shardwise.initialize(model, make_sgd(model), preset)
    own = plateau(engine.optimizer, patience=0, factor=0.5)
    for step in range(3):
        train_step(engine, 0, step)
        own.step(1.0)
    assert engine.optimizer.param_groups[0]["lr"] < 0.05
    engine.destroy()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda out, count: out.square().mean() / count, True),
        (lambda out, count: torch.nn.functional.mse_loss(out, torch.zeros_like(out)) / float(count), True),
        (lambda out, count: out.square().mean(), False),
        (lambda out, count: out.square().mean() / (count + 1), False),
        (lambda out, count: out.square().sum() / count, False),  # a mean over samples
        (lambda out, count: (out.mean() + out.square().mean()) / count, False),  # a mean of terms
        (lambda out, count: torch.nn.functional.mse_loss(out, torch.zeros_like(out), reduction="sum") / count, False),
        (lambda out, count: out.square().mean() / torch.tensor(float(count)), False),
    ],
)
@pytest.mark.parametrize("scale", [True, False])
def test_a_loss_that_is_divided_twice_is_noticed(make, said, scale):
    model = Probe()
    engine = shardwise.initialize(model, make_sgd(model), {"preset": "zero1", "batch": {"accumulation": 2}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            engine.backward(make(engine(torch.randn(4, 8)), 2), scale=scale)
            engine.step()
    assert len(notices(caught)) == (said and scale)
    assert not notices(caught) or "engine.backward(loss, scale=False)" in notices(caught)[0]
    engine.destroy()


@pytest.mark.parametrize("backwards", [1, 2, 3])
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_a_step_in_every_kth_backward_is_noticed(preset, backwards):
    """By a habit from plain torch it would update after K x K backwards."""
    model = Probe()
    engine = shardwise.initialize(model, make_sgd(model), {"preset": preset, "batch": {"accumulation": 3}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(7):
            for _ in range(backwards):
                engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
    assert len(notices(caught)) == (backwards == 3)
    assert not notices(caught) or "call step() after each of them" in notices(caught)[0]
    engine.destroy()


def test_clipping_at_zero_clips_everything():
    model = Probe()
    engine = shardwise.initialize(model, make_sgd(model), "zero2")
    before = engine.full_param("first.weight")
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    assert engine.clip_grad_norm_(0.0) > 0
    engine.step()
    assert torch.equal(engine.full_param("first.weight"), before)
    engine.destroy()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_16_bit_model_is_widened_with_a_word_or_kept(preset):
    expected = {None: torch.float32, "fp32": torch.float32, "model": torch.bfloat16, "bf16": torch.bfloat16}
    for compute, dtype in expected.items():
        model = Probe().bfloat16()
        config = {"preset": preset, "precision": {"compute": compute} if compute else {}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = shardwise.initialize(model, make_sgd(model), config)
        assert len(notices(caught)) == (compute is None)
        assert not notices(caught) or "set precision.compute: model" in notices(caught)[0]
        assert engine.units[0].weights.policy.weight_dtype == dtype
        assert engine.units[0].weights.policy.master_dtype == torch.float32
        assert engine(torch.randn(4, 8)).dtype == dtype
        engine.destroy()


def test_an_fp64_model_is_narrowed_with_a_word():
    for precision in ({}, {"compute": "fp32"}):
        model = Probe().double()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = shardwise.initialize(model, make_sgd(model), {"precision": precision})
        assert ["fp64 parameters" in said for said in notices(caught)] == [True] * (not precision)
        engine.destroy()


@ranks(2)
def test_a_mixed_model_keeps_its_dtypes(rank, world_size):
    finals = []
    for preset in ("zero0", "zero1", "zero2", "zero3"):
        model = Probe()
        model.first.bfloat16()
        config = {"preset": preset, "precision": {"compute": "model"}, "gradients": {"order": "sharded"}}
        engine = shardwise.initialize(model, make_sgd(model), config)
        kept = {unit.weights.policy.weight_dtype: unit.weights.policy for unit in engine.units}
        assert kept.keys() == {torch.float32, torch.bfloat16}
        assert kept[torch.float32].accumulate_dtype == kept[torch.float32].reduce_dtype == torch.float32
        model.second.register_forward_pre_hook(lambda _, args: args[0].float())
        for _ in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).bfloat16()
            engine.backward(engine(x).square().mean())
            engine.step()
        finals.append(torch.cat([engine.full_param(name).flatten() for name, _ in model.named_parameters()]))
        engine.destroy()
    assert all(torch.equal(final, finals[0]) for final in finals)


def test_dtypes_that_a_model_cannot_keep_are_refused():
    config = {"precision": {"compute": "model"}}
    model = Probe()
    model.first.half()
    with pytest.raises(shardwise.ConfigError, match="fp16 needs one loss scale"):
        shardwise.initialize(model, make_sgd(model), config)
    model = Probe().double()
    with pytest.raises(shardwise.ConfigError, match="convert them to fp32"):
        shardwise.initialize(model, make_sgd(model), config)
    with pytest.raises(shardwise.ConfigError, match="autocast needs a 16-bit dtype"):
        shardwise.Config.load({"precision": {"compute": "model", "autocast": True}})
    model = Probe().half()
    engine = shardwise.initialize(model, make_sgd(model), config)
    assert engine.config.precision.compute == "fp16"
    assert engine.loss_scale > 1
    engine.destroy()


# Ranks that were started differently, or train on the same data


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lr", r"optimizer group 0, lr: 0\.1 on rank 0; 0\.2 on rank 1"),
        ("option", r"optimizer group 0, momentum: 0 on rank 0; 0\.5 on rank 1"),
        ("optimizer", "optimizer: SGD on rank 0; AdamW on rank 1"),
        ("clip", r"configuration gradients\.clip_norm: None on rank 0; 1\.0 on rank 1"),
        ("shape", r"parameter first\.weight: \(8, 8\), torch.float32, in group 0 on rank 0; \(9, 8\)"),
        ("frozen", r"parameter first\.weight: .* in group 0 on rank 0; .* frozen on rank 1"),
        ("missing", r"parameter extra\.bias: missing on rank 0; \(2,\)"),
        ("scheduler", "lr_scheduler: NoneType on rank 0; StepLR on rank 1"),
    ],
)
def test_ranks_that_were_started_differently_stop(rank, world_size, preset, what, words):
    differs = {what} if rank == 1 else set()
    model = Probe()
    if "shape" in differs:
        model.first = nn.Linear(8, 9)
    if "missing" in differs:
        model.extra = nn.Linear(2, 2)
    model.first.requires_grad_("frozen" not in differs)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.2 if "lr" in differs else 0.1, momentum=0.5 if "option" in differs else 0)
    if "optimizer" in differs:
        optimizer = torch.optim.AdamW(params)
    config = {"preset": preset, "gradients": {"clip_norm": 1.0 if "clip" in differs else None}}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5) if "scheduler" in differs else None
    with pytest.raises(shardwise.DisagreementError, match=words):
        shardwise.initialize(model, optimizer, config, lr_scheduler=scheduler)


@ranks(2, fresh=True)
def test_learning_rates_that_drift_apart_stop_all_ranks(rank, world_size):
    engine = start("mlp", {"preset": "zero1"}, make_sgd)
    train_step(engine, rank, 0)
    engine.optimizer.param_groups[0]["lr"] = 0.25 if rank else 0.5
    with pytest.raises(shardwise.DisagreementError, match=r"options \(lr 0\.5;.*\n.*options \(lr 0\.25;"):
        list(map(partial(train_step, engine, rank), range(1, 12)))


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("data", ["same", "own", "constant"])
def test_ranks_that_train_on_the_same_data_are_told(rank, world_size, preset, data):
    engine = start("mlp", {"preset": preset}, make_sgd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            train_step(engine, rank if data == "own" else 0, 0 if data == "constant" else step)
    assert len(notices(caught)) == (data == "same" and rank == 0)
    assert not notices(caught) or "DistributedSampler" in notices(caught)[0]
    engine.destroy()


# The report


@ranks(2)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_report_counts_this_processs_steps_and_no_evaluation(rank, world_size, preset, tmp_path):
    engine = start("mlp", {"preset": preset}, make_sgd)
    for step in range(4):
        train_step(engine, rank, step)
    sent = per_step(engine.report())
    with torch.no_grad():
        for step in range(3):
            engine(make_batch(engine.module, rank, step))
    report = engine.report()
    assert per_step(report) == sent
    assert ("gather, sent" in str(report)) == (preset == "zero3")
    engine.save(tmp_path)
    engine.destroy()
    engine = start("mlp", {"preset": preset}, make_sgd)
    engine.load(tmp_path)
    for step in range(2):
        train_step(engine, rank, step)
    report = engine.report()
    assert (report.steps, report.steps_here) == (6, 2)
    assert "after 6 step(s), 2 of them in this process" in str(report)
    assert per_step(report) == sent
    engine.destroy()


def per_step(report):
    """The bytes of weights and gradients that the printed table has."""
    rows = [line.split() for line in str(report).partition("sent per step")[2].partition("host time")[0].splitlines()]
    return {row[0]: row[1] for row in rows if row and row[0] in ("gather", "reduce", "update")}


def test_compute_model_in_explain_and_in_a_plan():
    config = shardwise.Config.load({"preset": "zero2", "precision": {"compute": "model"}})
    assert "the dtype of the model's parameters" in " ".join(config.explain().split())

    class Scalar(Probe):
        def forward(self, x):
            return super().forward(x).float().square().mean()

    def build():
        return Scalar().bfloat16(), lambda rank, step: {"x": torch.ones(4, 8)}

    peaks = {
        compute: shardwise.foresee(build, {"preset": "zero2", "precision": {"compute": compute}}, 2, "cpu").peak_bytes
        for compute in ("model", "bf16", "fp32")
    }
    assert peaks["model"] == peaks["bf16"] != peaks["fp32"]
