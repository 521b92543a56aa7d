"""Operations on a model under an engine work as in plain torch, or raise an error that says what to do."""

import contextlib
import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import shardwise
from shardwise.engine.module_guard import ModuleGuard
from shardwise.errors import CheckpointError, GradientError, NotGatheredError
from support import ranks
from support.awkward import (
    COLLECTED,
    Chain,
    Gated,
    Recurrent,
    block,
    linear,
    square,
    with_collected,
)
from support.chain import assert_same, begin, data, weights
from support.conduct import conduct
from support.training import digest, make_batch, make_optimizer, make_sgd, start, train_step

STAGES = ["zero0", "zero1", "zero2", "zero3"]
SHARDED = {"gradients": {"order": "sharded"}}


def train(engine, rank, steps=1):
    for step in range(steps):
        engine.backward(square(engine.module, engine(data(rank, step)), None))
        engine.step()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": lambda model: reload(model),
}


def reload(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@conduct(
    "`copy.deepcopy(model)`, `pickle`, `torch.save(model)`",
    "works",
    "gives a plain model with whole values and without the engine; under `zero3` a collective, called on all ranks",
)
@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_model_is_plain_and_whole(rank, world_size, preset, how):
    engine = begin(preset)
    train(engine, rank)
    plain = COPIES[how](engine.module)
    assert_same(weights(engine), {name: param.detach() for name, param in plain.named_parameters()})
    assert all(type(param) is nn.Parameter and not vars(param) for param in plain.parameters())
    for module in plain.modules():
        assert not any(table for name, table in vars(module).items() if "hooks" in name), type(module)
        assert not {"__reduce_ex__", "_apply"} & vars(module).keys()
    assert torch.equal(plain(data(rank)), engine(data(rank)))
    make_sgd(plain.half().float()).step()
    again = shardwise.initialize(plain, make_sgd(plain), preset)
    train(again, rank)
    engine.destroy()
    again.destroy()
    assert not any("_apply" in vars(module) for module in engine.module.modules())


class Parametrized(nn.Sequential):
    """Its first layer copies itself: torch gives the class of a parametrized module a `__deepcopy__`."""

    def __init__(self):
        super().__init__(nn.utils.parametrizations.orthogonal(linear()), linear())


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_copy_of_a_module_that_copies_itself_is_plain(rank, world_size, preset):
    model = Parametrized()
    engine = shardwise.initialize(model, make_sgd(model), preset)
    for _ in range(2):
        train(engine, rank)
        plain = copy.deepcopy(engine.module)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, engine.state_dict()[name]), name
        assert torch.equal(plain(data(rank)), engine(data(rank)))
        assert not any(
            type(value).__name__ == "partial" for module in plain.modules() for value in vars(module).values()
        )
    train(engine, rank)
    engine.destroy()


@conduct("`copy.deepcopy(engine)`, `pickle.dumps(engine)`", "refused", "copy `engine.module`, or use `state_dict()`")
def test_an_engine_cannot_be_copied():
    engine = begin("zero1")
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"copy.deepcopy\(engine.module\)"):
            attempt(engine)
    engine.destroy()


@conduct(
    "`model.to(...)`, `half()`, `float()`, `cuda()` after `initialize`",
    "refused",
    "unless the call changes nothing: convert before `initialize`, or set `precision.compute`",
)
@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_conversions_that_change_something_are_refused(rank, world_size, preset):
    engine = begin(preset)
    before = weights(engine)
    for target in (engine, engine.module, engine.module.layers[1]):
        assert target.to("cpu").float() is target
        with pytest.raises(RuntimeError, match=r"precision\.compute"):
            target.half()
        with pytest.raises(RuntimeError, match="cannot become float32 on meta"):
            target.to("meta")
    assert_same(before, weights(engine))
    train(engine, rank)
    engine.destroy()


def test_recurrent_networks_do_not_move_their_weights():
    model = Recurrent()
    calls = []
    model.lstm.__class__ = type("Counted", (nn.LSTM,), {"flatten_parameters": lambda self: calls.append(1)})
    overrides = ModuleGuard(model, lambda: None)
    model.lstm.flatten_parameters()
    assert not calls
    overrides.remove()
    model.lstm.flatten_parameters()
    assert calls


@conduct("`nn.Embedding(sparse=True)`", "refused", "by `initialize`: build it with `sparse=False`")
def test_sparse_embeddings_are_refused():
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(shardwise.ConfigError, match=r"'0' makes sparse gradients.*sparse=False"):
        shardwise.initialize(model, make_sgd(model), "zero1")


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@conduct(
    "complex parameters",
    "refused",
    "by `initialize`: make `torch.view_as_real(value)` the parameter; complex buffers work",
)
@conduct("modules of `torch.jit`", "refused", "by `initialize`: use the modules that they were made from")
@conduct(
    "`nn.Embedding(max_norm=...)`, which writes into its weight in each forward",
    "refused",
    "by `initialize`: normalise the rows after a step, inside `shardwise.gathered(weight, write=True)`",
)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Complex, "'weight' is torch.complex64, .* torch.view_as_real"),
        (lambda: nn.Sequential(linear(), torch.jit.script(linear())), "'1' is compiled by torch.jit"),
        (lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), "'0' has max_norm, .* after a step"),
        (lambda: nn.Sequential(nn.EmbeddingBag(4, 4, max_norm=1.0)), "'0' has max_norm, .* after a step"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(make, words):
    model = make()
    with pytest.raises(shardwise.ConfigError, match=words):
        shardwise.initialize(model, make_sgd(model), "zero1")


@conduct(
    "`requires_grad_(False)` between steps",
    "works",
    "the parameter keeps its value and its state, as in torch; its step count advances with that of the unit. Refused "
    "by `step()` where states are offloaded",
)
@ranks(2)
@pytest.mark.parametrize("optimizer", [make_sgd, make_optimizer])
def test_a_parameter_frozen_later_is_left_alone(rank, world_size, optimizer):
    seen = []
    for preset in STAGES:
        engine = begin(preset, optimizer=optimizer, **SHARDED)
        train(engine, rank, 2)
        frozen = engine.module.layers[1][0].weight.requires_grad_(False)
        before, state = weights(engine), engine.full_state("layers.1.0.weight")
        train(engine, rank, 2)
        assert torch.equal(engine.full_param("layers.1.0.weight"), before["layers.1.0.weight"])
        assert not torch.equal(engine.full_param("layers.1.0.bias"), before["layers.1.0.bias"])
        for key, value in engine.full_state("layers.1.0.weight").items():
            assert key == "step" or torch.equal(value, state[key]), key
        frozen.requires_grad_(True)
        train(engine, rank)
        assert not torch.equal(engine.full_param("layers.1.0.weight"), before["layers.1.0.weight"])
        seen.append(weights(engine))
        engine.destroy()
    assert_same(*seen)


@ranks(2)
def test_a_parameter_frozen_before_the_first_step_begins_without_state(rank, world_size):
    engine = begin("zero3", optimizer=make_optimizer)
    before = weights(engine)
    engine.module.last.weight.requires_grad_(False)
    train(engine, rank, 2)
    assert torch.equal(engine.full_param("last.weight"), before["last.weight"])
    state = engine.full_state("last.weight")
    assert not any(value.any() for key, value in state.items() if key != "step")
    engine.destroy()


@ranks(1, 2, 3)
def test_what_is_frozen_on_one_rank_alone_is_the_same_in_every_stage(rank, world_size, tmp_path):
    """The second half of a block is all that the last rank owns of it."""
    seen = []
    for preset in STAGES:
        engine = begin(preset, optimizer=lambda model: torch.optim.AdamW(model.parameters()), **SHARDED)
        half = engine.module.layers[1][2].requires_grad_(False)
        train(engine, rank, 2)
        engine.save(tmp_path / preset)  # every part of a parameter has state, or none has
        half.requires_grad_(True)
        train(engine, rank, 2)
        seen.append(
            weights(engine) | {f"state/{key}": value for key, value in engine.full_state("layers.1.2.weight").items()}
        )
        engine.load(tmp_path / preset)
        train(engine, rank, 2)
        assert_same(
            seen[-1],
            weights(engine) | {f"state/{key}": value for key, value in engine.full_state("layers.1.2.weight").items()},
        )
        engine.destroy()
    assert_same(*seen)


@ranks(2)
@pytest.mark.parametrize("optimizer", [make_sgd, make_optimizer])
@pytest.mark.parametrize("precision", [{}, {"compute": "fp16", "loss_scale": {"initial": 2.0**10}}])
def test_blocks_thawed_one_by_one_train_as_in_torch(rank, world_size, optimizer, precision):
    """The state of a block begins with the first step that updates it, beside blocks that have theirs."""
    plain = begin("zero1", optimizer=optimizer).module  # the values of rank 0
    plain = copy.deepcopy(plain)
    seen = []
    for preset in STAGES:
        engine = begin(preset, optimizer=optimizer, precision=precision, **SHARDED)
        engine.module.layers.requires_grad_(False)
        for step in range(4):
            for layer in engine.module.layers[:step]:
                layer.requires_grad_(True)
            train(engine, rank)
        seen.append(weights(engine))
        engine.destroy()
    assert_same(*seen)
    chosen = optimizer(plain)
    plain.layers.requires_grad_(False)
    for step in range(4):
        for layer in plain.layers[:step]:
            layer.requires_grad_(True)
        (sum(square(plain, plain(data(each)), None) for each in range(world_size)) / world_size).backward()
        chosen.step()
        chosen.zero_grad()
    close = {"rtol": 1e-2, "atol": 2e-3} if precision else {"rtol": 1e-5, "atol": 1e-6}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(seen[0][name].float(), param.detach(), **close)


@ranks(2)
@pytest.mark.parametrize("preset", ["zero2_offload", "zero3_offload"])
def test_freezing_what_rests_off_the_device_is_refused_before_any_update(rank, world_size, preset):
    engine = begin(preset, optimizer=make_optimizer)
    train(engine, rank)
    before = weights(engine)
    engine.module.last.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'last.weight' was trainable .* states rest off the device"):
        train(engine, rank)
    assert_same(before, weights(engine))
    engine.module.last.requires_grad_(True)
    engine.zero_grad()
    train(engine, rank)
    engine.destroy()


def with_frozen_last():
    model = Chain()
    model.last.requires_grad_(False)
    return model


@conduct(
    "`requires_grad_(True)` on a parameter that was frozen at `initialize`",
    "refused",
    "by `step()`: make it trainable before `initialize` and freeze it afterwards",
)
@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_parameter_thawed_later_is_refused(rank, world_size, preset):
    engine = begin(preset, with_frozen_last)
    engine.module.last.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'last.weight' was frozen when the engine was made"):
        train(engine, rank)
    engine.module.last.requires_grad_(False)
    engine.zero_grad()
    train(engine, rank)
    engine.destroy()


class Breaks(Chain):
    breaks = True

    def forward(self, x):
        x = super().forward(x)
        if self.breaks:
            x.register_hook(self.fail)
            x = x * 1
        return x

    @staticmethod
    def fail(grad):
        raise ValueError("in the backward")


@conduct(
    "an exception in a plain `loss.backward()`, then another backward",
    "works",
    "the engine drops the gradients accumulated so far, and the accumulation starts again",
)
@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_a_backward_after_a_broken_one(rank, world_size, preset):
    engine, reference = begin(preset, Breaks), begin(preset, Breaks)
    broken = square(None, engine(data(rank)), None)
    engine.module.breaks = reference.module.breaks = False
    good = square(None, engine(data(rank, 1)), None)
    with pytest.raises(ValueError, match="in the backward"):
        broken.backward()
    good.backward()
    engine.step()
    square(None, reference(data(rank, 1)), None).backward()
    reference.step()
    assert_same(weights(engine), weights(reference))
    engine.destroy()
    reference.destroy()


@conduct("several forwards, then one backward of the sum", "works", "each unit is reduced once")
@ranks(2)
def test_several_forwards_before_a_backward(rank, world_size):
    seen = []
    for preset in STAGES:
        engine = begin(preset, **SHARDED)
        for _ in range(2):
            losses = [square(None, engine(data(rank, step)), None) for step in range(3)]
            engine.backward(sum(losses))
            engine.step()
        seen.append(weights(engine))
        engine.destroy()
    assert_same(*seen)


@conduct(
    "several backwards before `step()`, or of one graph (`retain_graph=True`)",
    "works",
    "where gradients are replicated, run all but the last backward inside `engine.no_sync()`",
)
@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
@pytest.mark.parametrize("how", ["loss", "engine"])
def test_several_backwards_before_a_step(rank, world_size, preset, how):
    engine, reference = begin(preset), begin(preset)
    loss = square(None, engine(data(rank)), None)
    with engine.no_sync():
        if how == "loss":
            loss.backward(retain_graph=True)
        else:
            engine.backward(loss, retain_graph=True)
    loss.backward()
    engine.step()
    reference.backward(2 * square(None, reference(data(rank)), None))
    reference.step()
    for name, value in weights(reference).items():
        torch.testing.assert_close(engine.full_param(name), value, rtol=1e-5, atol=1e-7)
    engine.destroy()
    reference.destroy()


@conduct(
    "a loss that comes from two engines",
    "works",
    "call `backward` of one of them, once; then `step()` of both. In fp16 each scales by itself: freeze the other's "
    "model (a GAN's discriminator), or compute in bf16",
)
@ranks(2)
def test_a_loss_from_two_engines(rank, world_size):
    seen = []
    for presets in [("zero0", "zero0"), ("zero3", "zero3"), ("zero2", "zero3")]:
        first, second = (begin(preset, **SHARDED) for preset in presets)
        for step in range(2):
            first.backward(square(None, second(first(data(rank, step))), None))
            first.step()
            second.step()
        seen.append([weights(first), weights(second)])
        first.destroy()
        second.destroy()
    for each in zip(*seen, strict=True):
        assert_same(*each)


@ranks(2)
def test_in_fp16_the_other_model_of_a_loss_is_frozen(rank, world_size):
    first, second = (begin("zero3", precision={"compute": "fp16"}) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"freeze it meanwhile \(requires_grad_\(False\)\)"):
        first.backward(square(None, second(first(data(rank))), None))
    second.zero_grad()
    second.module.requires_grad_(False)
    first.backward(square(None, second(first(data(rank))), None))
    first.step()
    second.module.requires_grad_(True)
    train(second, rank)
    first.destroy()
    second.destroy()


@conduct(
    "evaluation and generation between steps, under `no_grad`, `inference_mode` or neither",
    "works",
    "under `zero3` on all ranks; where weights are replicated, some ranks may do it alone",
)
@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_evaluation_between_steps_changes_nothing(rank, world_size, preset):
    engine, reference = begin(preset), begin(preset)
    for step in range(3):
        if preset != "zero3" and rank == 1:
            with torch.no_grad():
                engine.eval()(data(rank, 50 + step))
        with torch.no_grad():
            x = data(rank, 60 + step)
            for _ in range(3):
                x = engine.module(x)
        engine(data(rank, 70 + step))
        engine.train()
        for one in (engine, reference):
            one.backward(square(None, one(data(rank, step)), None))
            one.step()
    assert_same(weights(engine), weights(reference))
    engine.destroy()
    reference.destroy()


@ranks(1, 2)
@pytest.mark.parametrize("preset", [*STAGES, "zero2_offload", "zero3_offload"])
def test_passes_in_inference_mode_between_steps(rank, world_size, preset):
    def optimizer(model):  # makes its state in the first pass after a step, where it is offloaded
        return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)

    engine, reference = begin(preset, optimizer=optimizer), begin(preset, optimizer=optimizer)
    for step in range(2):
        train(engine, rank)
        train(reference, rank)
        with torch.inference_mode():
            engine(data(rank, 60 + step))
        train(engine, rank, 2)
        train(reference, rank, 2)
    assert_same(weights(engine), weights(reference))
    engine.destroy()
    reference.destroy()


class Encodes(Chain):
    def encode(self, x):
        return torch.nn.functional.linear(x, self.last.weight)


@conduct(
    "a parameter read between steps: weight averages, methods of the model other than `forward`",
    "refused",
    "under `zero3`: use it inside `with shardwise.gathered(params):`, or read it with `engine.full_param(name)`",
)
@ranks(2)
def test_a_parameter_read_between_steps(rank, world_size):
    engine = begin("zero3", Encodes)
    model = engine.module
    average = AveragedModel(model)
    norms = [engine.full_param(name).norm() for name, _ in model.named_parameters()]
    for read in (
        lambda: model.last.weight.isnan(),
        lambda: model.encode(data(rank)),
        lambda: average.update_parameters(model),
        lambda: [param.norm() for param in model.parameters()],
        lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
    ):
        with pytest.raises(NotGatheredError, match=r"is sharded and not gathered, .*, read it with engine\.full_param"):
            read()
    train(engine, rank)
    with shardwise.gathered(model.parameters()), torch.no_grad():
        assert not model.encode(data(rank)).isnan().any()
        assert not torch.equal(torch.stack([param.norm() for param in model.parameters()]), torch.stack(norms))
        average.update_parameters(model)
    assert not any(param.isnan().any() for param in average.parameters())
    engine.destroy()


@ranks(2)
@pytest.mark.parametrize("wrap", [checkpoint_wrapper, partial(torch.compile, backend="eager")])
@pytest.mark.parametrize("is_early", [True, False])
def test_the_state_dict_of_wrapped_blocks_is_whole(rank, world_size, wrap, is_early):
    engine = begin("zero3")
    expected = {name.replace("_orig_mod.", ""): value for name, value in engine.state_dict().items()}
    engine.destroy()

    def wrap_blocks(model):
        for index in (1, 2):
            model.layers[index] = wrap(model.layers[index])
        return model

    engine = begin("zero3", lambda: wrap_blocks(Chain()) if is_early else Chain())
    model = engine.module if is_early else wrap_blocks(engine.module)
    for read in (contextlib.nullcontext(), shardwise.gathered(model.layers[1].parameters())):
        with read:
            state = model.state_dict()
        assert_same(expected, {name.replace("_orig_mod.", ""): value for name, value in state.items()})
    engine.destroy()


@conduct(
    "`state_dict()` of a part of the model",
    "refused",
    "under `zero3` its tensors have a shape and no values, and every read of one raises: call it inside `with "
    "shardwise.gathered(part.parameters()):`, or `state_dict()` of the model",
)
@ranks(2)
def test_the_state_dict_of_a_part_refuses_reads(rank, world_size):
    engine = begin("zero3")
    part = engine.module.layers[1]
    if rank == 0:  # names and shapes are there on one rank alone
        state = part.state_dict()
        assert {key: value.shape for key, value in state.items()} == {
            key: param.shape for key, param in part.named_parameters()
        }
        for read in (
            lambda: torch.save(state, io.BytesIO()),
            lambda: copy.deepcopy(state),
            lambda: pickle.dumps(state),
            lambda: {key: value.cpu().numpy() for key, value in state.items()},
            lambda: block().load_state_dict(state),
        ):
            # load_state_dict reports each error of a copy in one of its own
            with pytest.raises(RuntimeError, match="is sharded and not gathered"):
                read()
    with shardwise.gathered(part.parameters()):
        whole = {key: value.clone() for key, value in part.state_dict().items()}
    expected = {key.removeprefix("layers.1."): value for key, value in engine.state_dict().items()}
    assert_same(whole, {key: expected[key] for key in whole})
    engine.destroy()


@conduct(
    "penalties on parameters: `loss + sum(p.square().sum() for p in model.parameters())`",
    "works",
    "after the forward; under `zero3` inside `with shardwise.gathered(model.parameters()):`, and the backward gathers "
    "them again",
)
@ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["after", "around", "plain"])
def test_penalties_on_gathered_parameters(rank, world_size, precision, where):
    seen = []
    for preset in [*STAGES, "zero3_offload"]:
        engine = begin(preset, precision={"compute": precision}, **SHARDED)
        params = list(engine.module.parameters())
        for step in range(3):
            if where != "around":
                loss = square(engine.module, engine(data(rank, step)), None)
            with shardwise.gathered(params):
                if where == "around":
                    loss = square(engine.module, engine(data(rank, step)), None)
                loss = loss + sum(0.1 * param.square().sum() for param in params)  # saves the parameter
                loss = loss + sum(param.view(-1)[:4].tanh().dot(param.reshape(-1)[:4]) for param in params)  # views
            if where == "plain":
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        if preset == "zero3":
            with pytest.raises(NotGatheredError):
                params[0].isnan()
        seen.append(weights(engine))
        engine.destroy()
    for other in seen[1:]:
        assert_same(seen[0], other)
    without = begin("zero0", precision={"compute": precision}, **SHARDED)
    train(without, rank, 3)
    assert not torch.equal(seen[0]["last.weight"], without.full_param("last.weight"))
    without.destroy()


@ranks(2)
def test_graphs_made_inside_gathered(rank, world_size):
    engine = begin("zero3")
    train(engine, rank)
    weight = engine.module.last.weight
    whole = engine.full_param("last.weight")
    with shardwise.gathered(weight):
        penalty, stale = weight.square().sum(), weight.square().sum()
        alias, kept = weight.data, weight.detach().clone()
        transformed = torch.func.grad(lambda value: (value * weight.detach()).square().sum())(torch.ones_like(whole))
        own = torch.func.grad(lambda value: value.square().sum())(weight)
        copied = copy.deepcopy(weight)
        with torch.no_grad():
            engine(data(rank))
        assert torch.equal(alias, whole)
    assert torch.equal(kept, whole)
    assert torch.equal(copied, whole)
    torch.testing.assert_close(transformed, 2 * whole.square())
    assert torch.equal(own, 2 * whole)
    transform = torch.func.grad(lambda value: (value * weight.detach()).sum())
    for read in (
        alias.sum,
        lambda: pickle.dumps(alias),
        lambda: weight.sum(),
        lambda: transform(torch.ones_like(whole)),
    ):
        with pytest.raises(NotGatheredError, match=r"'last\.weight'"):
            read()
    (grad,) = torch.autograd.grad(penalty, weight)
    assert torch.equal(grad, 2 * whole)
    with pytest.raises(NotGatheredError):  # released again
        weight.sum()
    train(engine, rank)
    with pytest.raises(RuntimeError, match="were changed between their use"):
        torch.autograd.grad(stale, weight)
    train(engine, rank)
    engine.destroy()


class WritesInPlace(Chain):
    def forward(self, x):
        output = super().forward(x).exp()
        output.add_(1)  # exp saves what it returns
        return output


@ranks(2)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_saved_tensors_that_were_written_in_place_are_found(rank, world_size, preset):
    engine = begin(preset, WritesInPlace)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
        ):
            train(engine, rank)
    engine.destroy()


class Catches(Chain):
    """A hook on an inner module stores a loss of its output, which no module returns or holds."""

    def __init__(self):
        super().__init__(Gated)
        for layer in self.layers:
            layer.gate.register_forward_hook(lambda module, args, output: COLLECTED.append(output.square().mean()))


class CollectsLate(Chain):
    class Block(Gated):
        def forward(self, x):
            output = torch.tanh(self.inner(x))
            COLLECTED.append(self.aside(x))
            return output

    def __init__(self):
        super().__init__(self.Block)


@conduct(
    "losses in a list of your own, or stored by a hook on an inner module",
    "works",
    "if the first training step has such a loss; for one that first appears in a later step, `zero3` does not gather "
    "units: return it, or store it in an attribute of the module",
)
@ranks(2)
@pytest.mark.parametrize("make", [Catches, CollectsLate])
def test_losses_that_no_module_shows(rank, world_size, make):
    seen = []
    for preset in STAGES:
        engine = begin(preset, make, **SHARDED)
        for step in range(3):
            engine.backward(with_collected(engine.module, engine(data(rank, step)), None))
            engine.step()
        seen.append(weights(engine))
        engine.destroy()
    assert_same(*seen)


@ranks(2)
@pytest.mark.parametrize("make", [Chain, CollectsLate])
def test_saved_tensors_are_watched_once_unless_that_found_something(rank, world_size, make):
    engine = begin("zero3", make)
    watched = []
    for step in range(3):
        calls = []
        pack = engine._schedule.saved_tensors._pack
        engine._schedule.saved_tensors._pack = lambda tensor, calls=calls, pack=pack: calls.append(1) or pack(tensor)
        engine.backward(with_collected(engine.module, engine(data(rank, step)), None))
        engine._schedule.saved_tensors._pack = pack
        engine.step()
        watched.append(bool(calls))
    assert watched == [True, make is CollectsLate, make is CollectsLate]
    engine.destroy()


@conduct(
    "`torch.jit.trace`, TensorBoard's `add_graph`",
    "refused",
    "under `zero3`: trace `copy.deepcopy(engine.module)`",
)
@ranks(2)
def test_traces_of_sharded_weights_are_refused(rank, world_size):
    for preset in ("zero1", "zero3"):
        engine = begin(preset)
        train(engine, rank)
        target = engine.module if preset == "zero1" else copy.deepcopy(engine.module)
        if preset == "zero3":
            for part in (engine.module, engine.module.layers[1]):
                with pytest.raises(RuntimeError, match=r"trace a plain copy, copy\.deepcopy\(engine\.module\)"):
                    torch.jit.trace(part, data(rank))
        with torch.no_grad():
            traced = torch.jit.trace(target, data(rank), check_trace=False)
            assert torch.equal(traced(data(rank, 1)), engine(data(rank, 1)))
        train(engine, rank)
        engine.destroy()


class Transforms(Chain):
    def forward(self, x):
        return torch.func.grad(lambda x: super(Transforms, self).forward(x).sum())(x)


@conduct(
    "`torch.func.grad` and similar transforms of modules", "refused", "use `torch.autograd.grad`, or transform a copy"
)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_transforms_are_refused(preset):
    engine = begin(preset, Transforms, precision={"compute": "bf16"})
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        engine(data(0))
    plain = copy.deepcopy(engine.module)
    assert plain(data(0).bfloat16()).any()
    engine.destroy()


class Gathers(Chain):
    """Uses another module's weights inside `gathered`, in the middle of its forward."""

    def forward(self, x):
        x = super().forward(x)
        with shardwise.gathered(self.layers[0].parameters()):
            weight = self.layers[0][0].weight * 2
        return x @ weight.t() @ self.layers[1][0].weight.t()


@conduct("`shardwise.gathered` inside a forward", "works", "its units are also gathered in the backward")
@ranks(2)
def test_gathered_inside_a_forward(rank, world_size):
    seen = []
    for preset in STAGES:
        engine = begin(preset, Gathers, **SHARDED)
        train(engine, rank, 3)
        seen.append(weights(engine))
        engine.destroy()
    assert_same(*seen)


class Differentiates(Chain):
    """Its blocks differentiate by their own input, inside their forward."""

    class Block(Gated):
        def forward(self, x):
            output = torch.tanh(self.inner(x))
            (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(grad.sum(), x, retain_graph=True)
            return self.inner(output + grad) + again

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, x):
        return super().forward(x.requires_grad_() * 1)


@conduct(
    "`torch.autograd.grad` by a block's own input, inside the block's forward", "works", "with `create_graph` or not"
)
@ranks(1, 2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_that_differentiate_by_their_inputs(rank, world_size, checkpointing):
    seen = []
    for preset in STAGES:
        config = {"checkpointing": {"enabled": True}} if checkpointing else {}
        engine = begin(preset, Differentiates, **SHARDED, **config)
        train(engine, rank, 2)
        assert engine.steps == 2
        seen.append(weights(engine))
        engine.destroy()
    assert_same(*seen)
    torch.manual_seed(3)
    plain = Differentiates()
    optimizer = make_sgd(plain)
    for step in range(2):
        sum(square(None, plain(data(rank, step)), None) / world_size for rank in range(world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(seen[0][name], param.detach(), rtol=1e-4, atol=1e-6)


def penalise_gradients(engine, x):
    """A penalty on the gradients of the inputs, through a plain second-order backward."""
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(engine(x).square().mean(), x, create_graph=True)
    (grad.square().sum() - 1).square().backward()


@ranks(2)
@pytest.mark.parametrize("make", [Chain, linear])
def test_a_plain_second_order_backward_alone(rank, world_size, make):
    """In a linear model, the second backward has no node of the first graph; the engine must detect it all the same."""
    seen = []
    for preset in STAGES:
        engine = begin(preset, make, **SHARDED)
        for step in range(2):
            penalise_gradients(engine, data(rank, step))
            engine.step()
        assert engine.steps == 2
        seen.append(weights(engine))
        engine.destroy()
    assert_same(*seen)


@ranks(2)
def test_weights_are_released_after_autograd_grad_and_after_the_step_of_a_double_backward(rank, world_size):
    engine = begin("zero3")
    x = data(rank).requires_grad_()
    output = engine(x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    with pytest.raises(NotGatheredError):
        engine.module.last.weight.isnan()
    torch.autograd.grad(output.sum(), x, create_graph=True)
    assert not engine.module.last.weight.isnan().any()
    engine.backward(output.sum())
    engine.step()
    with pytest.raises(NotGatheredError):
        engine.module.last.weight.isnan()
    engine.destroy()


@ranks(2)
def test_a_second_order_backward_after_the_step_is_refused(rank, world_size):
    engine = begin("zero3")
    x = data(rank).requires_grad_()
    (grad,) = torch.autograd.grad(engine(x).square().mean(), x, create_graph=True)
    train(engine, rank)
    with pytest.raises(RuntimeError, match="were changed between this forward and its backward"):
        grad.sum().backward()
    engine.zero_grad()
    train(engine, rank)
    engine.destroy()


@ranks(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_update_that_breaks_off_leaves_no_gradients_behind(rank, world_size, precision):
    """Some units are already updated, so a step on the remaining gradients would be half a step."""
    engine = start("gpt", {"preset": "zero2", "precision": {"compute": precision}})
    train_step(engine, rank, 0)
    engine.backward(engine(make_batch(engine.module, rank, 1)))
    calls = []

    def fail_the_second_time():
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        step()

    pieces = engine._updater._pieces
    step, pieces._step = pieces._step, fail_the_second_time
    with pytest.raises(torch.OutOfMemoryError) as failure:
        engine.step()
    assert "load the last checkpoint" in failure.value.__notes__[0]
    assert all(piece.param.grad is None for unit in engine.units for piece in unit.weights.pieces)
    assert engine.is_at_rest
    before = digest(engine)
    engine.step()
    assert digest(engine) == before, "nothing to step on"
    train_step(engine, rank, 2)
    assert digest(engine) != before
    engine.destroy()


@conduct(
    "`optimizer.state_dict()` saved by rank 0, loaded by all ranks",
    "refused",
    "by ranks with other shards (`zero1` to `zero3`): use `engine.save` and `engine.load`, or a file for each rank",
)
@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_states_of_another_ranks_shard_are_refused(rank, world_size, preset):
    engine = begin(preset, optimizer=make_optimizer)
    train(engine, rank)
    own = copy.deepcopy(engine.optimizer.state_dict())
    engine.optimizer.load_state_dict(own)
    states = engine.comm.share_object(own)
    if preset == "zero0" or rank == 0:
        engine.optimizer.load_state_dict(states[0])
    else:
        with pytest.raises(CheckpointError, match=r"the states of shard 0 of 2, and this rank has shard 1 of 2"):
            engine.optimizer.load_state_dict(states[0])
    plain = make_optimizer(begin("zero0").module)
    with pytest.raises(CheckpointError, match="of an optimizer outside of an engine"):
        engine.optimizer.load_state_dict(plain.state_dict())
    train(engine, rank)
    engine.destroy()
    assert "shardwise_shard" not in engine.optimizer.state_dict()


@conduct(
    "clipping or editing gradients in `optimizer.register_step_pre_hook`",
    "refused",
    "by an error with the method to call: `p.grad` has no values there",
)
@ranks(2)
@pytest.mark.parametrize("preset", STAGES)
def test_hooks_before_a_step_cannot_edit_gradients(rank, world_size, preset):
    for params in ("model", "groups"):
        engine = begin(preset)
        calls = []
        engine.optimizer.register_step_pre_hook(lambda *args, calls=calls: calls.append(args))
        train(engine, rank)
        assert len(calls) == 1

        def clip(optimizer, args, kwargs, engine=engine, params=params):
            groups = [param for group in optimizer.param_groups for param in group["params"]]
            torch.nn.utils.clip_grad_norm_(engine.module.parameters() if params == "model" else groups, 0.1)

        engine.optimizer.register_step_pre_hook(clip)
        with pytest.raises(GradientError, match=r"engine\.clip_grad_norm_"):
            train(engine, rank)
        engine.destroy()


class GivesAWeightToAScript(nn.Module):
    """Its last operation is a function of `torch.jit.script`, which is given a weight of the first unit."""

    def __init__(self, prepare):
        super().__init__()
        self.layers = nn.Sequential(*[linear() for _ in range(5)])
        self.prepare = prepare
        self.scripted = torch.jit.CompilationUnit("def f(x, weight):\n    return x * weight.sum()\n").f

    def forward(self, x):
        return self.scripted(self.layers(x), self.prepare(self.layers[0].weight))


@conduct(
    "a weight given to a compiled function that is not torch's own (`torch.jit.script`, an extension in C++), outside "
    "of the unit that has it",
    "limit",
    "under `zero3` it reads NaN, because torch does not tell what such a call reads: give it `weight.clone()`",
)
@ranks(2)
def test_a_weight_given_to_a_scripted_function(rank, world_size):
    def last_output(prepare, preset):
        torch.manual_seed(0)
        model = GivesAWeightToAScript(prepare)
        engine = shardwise.initialize(model, make_sgd(model), {"preset": preset, "runtime": {"units": ["Linear"]}})
        for step in range(2):
            output = engine(data(rank, step))
            engine.backward(output.square().mean())
            engine.step()
        engine.destroy()
        return output.detach()

    expected = last_output(lambda weight: weight, "zero1")
    assert torch.equal(last_output(torch.clone, "zero3"), expected)
    assert last_output(lambda weight: weight, "zero3").isnan().all()


class Pair(nn.Module):
    """An encoder whose last norm is in the unit of the rest of the model, and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@ranks(2)
def test_a_module_around_units_may_be_called_by_itself(rank, world_size):
    """As `generate` calls the encoder of T5, and a loop a part of its model, with gradients and without."""
    seen = []
    for preset in ("zero0", "zero3"):
        torch.manual_seed(0)
        engine = shardwise.initialize(Pair(), lambda params: torch.optim.SGD(params, lr=0.1), preset)
        losses = []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            with torch.no_grad():
                known = engine.module.encoder(x)
            loss = (engine(x) - known).square().mean()
            if step == 1:  # a backward of the part alone
                loss = engine.module.encoder(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if preset == "zero3":
            with pytest.raises(NotGatheredError):  # released again
                engine.module.encoder.norm.weight.sum()
        seen.append((losses, engine.state_dict()))
        engine.destroy()
    assert seen[0][0] == seen[1][0]
    assert_same(seen[0][1], seen[1][1])
