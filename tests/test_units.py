"""The division of models into units: whole blocks, sensible leftovers, ties, and hooks that fire before every use."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.partition.units import describe_units, divide

BIG = 10**9


class Block(nn.Module):
    def __init__(self, width, experts=0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(experts))

    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return x + self.mlp(self.norm(x))


class GPT(nn.Module):
    def __init__(self, layers=3, width=16, vocabulary=64, tied=True, experts=()):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(width))
        experts = experts or [0] * layers
        self.layers = nn.ModuleList(Block(width, experts[n]) for n in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """A stage as hierarchical vision transformers have them: a class of its own around a list of blocks."""

    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.downsample = nn.Linear(width, 2 * width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.downsample(x)


class Swin(nn.Module):
    def __init__(self, depths=(2, 2, 4)):
        super().__init__()
        self.stages = nn.ModuleList(Stage(8 * 2**n, depth) for n, depth in enumerate(depths))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


class Stack(nn.Module):
    def __init__(self, embed, layers):
        super().__init__()
        self.embed = embed
        self.block = nn.ModuleList(Block(16) for _ in range(layers))
        self.final_norm = nn.LayerNorm(16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.block:
            x = block(x)
        return self.final_norm(x)


class T5(nn.Module):
    """Encoder and decoder that share the embedding module, and a head tied to it."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(64, 16)
        self.encoder = Stack(self.shared, 2)
        self.decoder = Stack(self.shared, 3)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens):
        return self.head(self.encoder(tokens) + self.decoder(tokens))


def resnet_stage(inward, outward, depth):
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(inward if n == 0 else outward, outward, 1)) for n in range(depth)))


def names(model, **arguments):
    arguments.setdefault("min_bytes", 0)
    return [unit.name for unit in divide(model, **arguments)]


def unit(model, name, **arguments):
    arguments.setdefault("min_bytes", 0)
    (found,) = (unit for unit in divide(model, **arguments) if unit.name == name)
    return found


def assert_sound(model, units):
    """What holds for every division: a partition, uniform units, and runs that can be hooked and reach every use."""
    params = dict(model.named_parameters())
    assert sorted(name for unit in units for name in unit.params) == sorted(params)
    assert len({unit.name for unit in units}) == len(units)
    order = list(params)
    for unit in units:
        assert unit.params
        assert [order.index(name) for name in unit.params] == sorted(order.index(name) for name in unit.params)
        assert {(params[name].requires_grad, params[name].dtype) for name in unit.params} == {
            (unit.trainable, unit.dtype)
        }
        hooked = [model.get_submodule(path) for run in unit.runs for path in run]
        assert len({id(module) for module in hooked}) == len(hooked)
        assert all(map(has_forward, hooked))


def has_forward(module):
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def needed(module):
    """The parameters a module's own forward may read: those it holds, itself or through mere holders."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from needed(child)


def assert_in_use_when_called(model, units, *inputs):
    """Run a forward as the engine would see it: a unit is in use from a run's first entry to its last exit."""
    holders = {id(model.get_parameter(name)): unit for unit in units for name in unit.params}
    in_use: set[tuple[str, tuple[str, ...]]] = set()
    for unit in units:
        for run in unit.runs:
            for path in run:
                key = (unit.name, run)
                model.get_submodule(path).register_forward_pre_hook(lambda *_, key=key: in_use.add(key))
            model.get_submodule(run[-1]).register_forward_hook(lambda *_, key=key: in_use.discard(key))

    def check(module, _):
        for param in needed(module):
            assert holders[id(param)].name in {name for name, _ in in_use}
            checked.append(param)

    checked = []
    for module in model.modules():
        module.register_forward_pre_hook(check)
    model(*inputs)
    assert {id(param) for param in checked} == set(holders)
    assert not in_use


TOKENS = torch.arange(8)
FEATURES = torch.ones(2, 8)
MODELS = {
    "gpt": (GPT, TOKENS),
    "gpt untied": (lambda: GPT(tied=False), TOKENS),
    "moe": (lambda: GPT(experts=[3, 3, 3]), TOKENS),
    "swin": (Swin, FEATURES),
    "t5": (T5, TOKENS),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), FEATURES),
    "linear": (lambda: nn.Linear(8, 2), FEATURES),
    "resnet": (lambda: nn.Sequential(resnet_stage(8, 8, 2), resnet_stage(8, 16, 3)), torch.ones(1, 8, 2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("min_bytes", [0, None, 8_000, BIG])
@pytest.mark.parametrize("kind", MODELS)
def test_units_are_in_use_whenever_their_parameters_are_needed(kind, min_bytes):
    build, inputs = MODELS[kind]
    model = build()
    units = divide(model, min_bytes=min_bytes)
    assert_sound(model, units)
    assert_in_use_when_called(model, units, inputs)


def test_gpt_has_one_unit_a_layer_and_the_small_rest_in_the_root():
    model = GPT(tied=False)
    assert names(model) == ["(root)", "embed", "layers.0", "layers.1", "layers.2", "head"]
    assert unit(model, "(root)").params == ("position", "norm.weight", "norm.bias")
    assert unit(model, "(root)").runs == (("",),)
    assert unit(model, "layers.1").runs == (("layers.1",),)
    assert len(unit(model, "layers.1").params) == 6


def test_a_tied_head_is_a_further_run_of_the_embedding():
    model = GPT()
    assert "head" not in names(model)
    assert unit(model, "embed").params == ("embed.weight",)
    assert unit(model, "embed").runs == (("embed",), ("head",))


def test_leftovers_below_an_eighth_of_a_block_go_to_the_root():
    block_bytes = sum(param.numel() for param in Block(16).parameters()) * 4
    rows = -(-block_bytes // (8 * 16 * 4))
    assert "embed" in names(GPT(vocabulary=rows))
    assert "embed" not in names(GPT(vocabulary=rows - 1))
    assert unit(GPT(vocabulary=rows - 1), "(root)").runs == (("",),)


def test_experts_never_divide_a_block():
    assert names(GPT(experts=[3, 3, 3]))[2:] == ["layers.0", "layers.1", "layers.2"]
    # A dense first layer, then experts: no two layers alike, and yet no stages.
    assert names(GPT(experts=[0, 3, 40]))[1:] == ["layers.0", "layers.1", "layers.2"]
    # Experts are most of each layer, but some layers are alike.
    assert names(GPT(layers=4, experts=[8, 20, 40, 40]))[1:] == [f"layers.{n}" for n in range(4)]
    # A single layer repeats nothing, and its experts are not blocks either.
    assert names(GPT(layers=1, experts=[4])) == ["(root)"]


def test_layers_of_various_widths_are_no_stages():
    model = nn.Sequential(*(Block(width) for width in (8, 12, 16)))
    assert names(model) == ["0", "1", "2"]


def test_stages_are_divided_at_their_blocks():
    swin = names(Swin())
    assert [name for name in swin if "blocks" in name] == [
        f"stages.{stage}.blocks.{block}" for stage, depth in enumerate((2, 2, 4)) for block in range(depth)
    ]
    assert "stages.2.downsample" in swin


def test_resnet_stages_are_divided_as_attributes_and_in_a_sequential():
    model = nn.Module()
    model.forward = lambda x: x
    model.stem = nn.Conv2d(3, 8, 1)
    model.layer1, model.layer2 = resnet_stage(8, 8, 2), resnet_stage(8, 16, 3)
    blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"]
    assert [name for name in names(model) if name.startswith("layer")] == blocks
    chained = nn.Sequential(nn.Conv2d(3, 8, 1), resnet_stage(8, 8, 2), resnet_stage(8, 16, 3))
    assert names(chained) == ["(root)", "1.0", "1.1", "2.0", "2.1", "2.2"]


def test_sequentials_of_one_shape_are_blocks_themselves():
    mlps = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)]
    assert names(nn.Sequential(*mlps)) == ["0", "1", "2"]


def test_a_chain_of_different_parts_is_looked_into():
    assert names(nn.Sequential(GPT(tied=False), nn.Linear(64, 64)))[2:5] == ["0.layers.0", "0.layers.1", "0.layers.2"]


def test_lists_of_lists_are_divided_at_the_inner_modules():
    grid = nn.ModuleList(nn.ModuleList([Block(8), Block(8)]) for _ in range(2))
    assert names(grid) == ["0.0", "0.1", "1.0", "1.1"]


def test_repetition_in_a_module_dict_counts():
    towers = nn.ModuleDict({"image": Block(8), "text": Block(8), "depth": Block(8)})
    assert names(nn.Sequential(towers, nn.Linear(8, 8))) == ["0.image", "0.text", "0.depth", "1"]


def test_encoder_and_decoder_share_one_embedding_unit():
    model = T5()
    blocks = [*(f"encoder.block.{n}" for n in range(2)), *(f"decoder.block.{n}" for n in range(3))]
    assert names(model) == ["(root)", "shared", *blocks]
    # The encoder's and the decoder's embed are the very module that is hooked as "shared": hooked once.
    assert unit(model, "shared").runs == (("shared",), ("head",))
    assert unit(model, "(root)").params[0] == "encoder.final_norm.weight"


def test_models_without_repetition_are_one_unit():
    for model in (nn.Linear(4, 4), nn.MultiheadAttention(8, 2), GPT(layers=1)):
        (only,) = divide(model)
        assert (only.name, only.runs) == ("(root)", (("",),))


def test_models_without_parameters_have_no_units():
    assert divide(nn.Sequential(nn.ReLU(), nn.ReLU())) == ()
    assert describe_units(nn.ReLU()).splitlines()[-1].split() == ["total", "0", "0", "0B"]


def test_neighbouring_blocks_are_merged_up_to_the_minimum():
    block_bytes = sum(param.numel() for param in Block(16).parameters()) * 4
    model = GPT(layers=7)
    layers = [name for name in names(model, min_bytes=2 * block_bytes) if "layers" in name]
    assert layers == ["layers.0-1", "layers.2-3", "layers.4-6"]
    merged = unit(model, "layers.4-6", min_bytes=2 * block_bytes)
    assert merged.runs == (("layers.4", "layers.5", "layers.6"),)
    assert [name for name in names(model, min_bytes=2 * block_bytes + 1) if "layers" in name] == [
        "layers.0-2",
        "layers.3-6",
    ]


def test_merging_never_crosses_lists():
    assert names(T5(), min_bytes=BIG)[2:] == ["encoder.block.0-1", "decoder.block.0-2"]


def test_small_models_still_have_several_units():
    model = GPT(layers=12, width=8, vocabulary=16)
    assert sum(param.numel() for param in model.parameters()) * 4 < 2**20
    assert [name for name in names(model, min_bytes=None) if "layers" in name] == [f"layers.{n}" for n in range(12)]


def test_large_blocks_are_not_merged():
    with torch.device("meta"):
        model = GPT(layers=20, width=1500)  # 37 MB a layer, less than 1/16 of the model but more than 32 MiB
    assert [name for name in names(model, min_bytes=None) if "layers" in name] == [f"layers.{n}" for n in range(20)]


def test_frozen_parameters_get_units_of_their_own():
    model = GPT()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    both = [unit for unit in divide(model, min_bytes=0) if unit.name.startswith("layers.0")]
    assert [(unit.name, unit.trainable) for unit in both] == [("layers.0", True), ("layers.0 (frozen)", False)]
    assert both[0].params == ("layers.0.norm.weight", "layers.0.norm.bias")
    assert both[0].runs == both[1].runs == (("layers.0",),)
    assert_sound(model, divide(model))


def test_dtypes_are_never_mixed():
    model = GPT().bfloat16()
    for layer in model.layers:
        layer.norm.float()
    assert [name for name in names(model) if "layers.0" in name] == ["layers.0 (float32)", "layers.0 (bfloat16)"]
    assert_sound(model, divide(model))


def test_a_layer_that_is_registered_many_times_is_hooked_once():
    shared, other = Block(8), Block(8)
    model = nn.Sequential(shared, other, shared, other, shared)
    units = divide(model, min_bytes=BIG)
    assert [unit.runs for unit in units] == [(("0",),), (("1",),)]
    assert_in_use_when_called(model, units, FEATURES)


def test_a_module_shared_between_blocks_is_also_used_by_the_later_block():
    model = nn.Sequential(Block(8), Block(8))
    model[1].mlp = model[0].mlp
    assert unit(model, "0").runs == (("0",), ("1",))
    assert_in_use_when_called(model, divide(model, min_bytes=0), FEATURES)


def test_a_module_used_both_inside_a_leftover_and_outside_is_hooked_itself():
    model = nn.Sequential(Block(8), Block(8), Prompted(), nn.Identity())
    model[3] = model[2].block
    assert unit(model, "2").runs == (("2",), ("2.block",))
    assert_in_use_when_called(model, divide(model, min_bytes=0), FEATURES)


def test_ties_inside_a_unit_add_no_run():
    model = nn.Sequential(Block(8), Block(8))
    model[0].experts = nn.ModuleList([model[0].mlp[0]])
    assert unit(model, "0").runs == (("0",),)


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompts = nn.ParameterList([torch.zeros(8), torch.zeros(8)])
        self.block = Block(8)
        self.namespace = nn.Module()
        self.namespace.proj = nn.Linear(8, 8)
        self.namespace.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.namespace.proj(self.block(x + self.prompts[0])) * self.namespace.scale


def test_what_has_no_forward_is_never_hooked():
    model = nn.Sequential(Prompted(), Prompted())
    assert names(model) == ["0", "1"]
    assert "0.prompts.0" in unit(model, "0").params
    alone = divide(Prompted(), modules=["block"])
    assert [unit.name for unit in alone] == ["(root)", "block", "namespace.proj"]
    assert alone[0].params == ("prompts.0", "prompts.1", "namespace.scale")


def test_holders_without_forward_leave_units_to_their_modules():
    gan = nn.ModuleDict({"generator": GPT(tied=False), "critic": nn.Linear(4, 1)})
    found = names(gan)
    assert found[0] == "generator"
    assert unit(gan, "generator").params[0] == "generator.position"
    assert found[-1] == "critic"
    gan.temperature = nn.Parameter(torch.ones(()))
    assert unit(gan, "(root)").runs == ()


def test_blocks_by_class_name():
    model = Swin()
    assert names(model, classes=["Stage"]) == ["stages.0", "stages.1", "stages.2"]
    assert "stages.1.blocks.0" in names(model, classes=["Block"], min_bytes=None)
    with_head = names(GPT(), classes={"LayerNorm"}, min_bytes=None)
    assert {"layers.0.norm", "layers.1.norm", "layers.2.norm", "norm", "layers.0.mlp"} <= set(with_head)


def test_blocks_by_path():
    model = GPT()
    assert names(model, modules=["layers.1"])[1:] == ["embed", "layers.0", "layers.1", "layers.2"]
    assert names(model, modules=[""]) == ["(root)"]
    assert unit(model, "layers.1", modules=["layers.1"], classes=["Embedding"]).runs == (("layers.1",),)
    for arguments in ({"classes": ["Block"]}, {"modules": ["layers.0", "layers.2", "head"]}):
        assert_sound(model, divide(model, **arguments))
        assert_in_use_when_called(GPT(), divide(model, **arguments), TOKENS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": ["Blok", "Stag"]}, "no class 'Blok', 'Stag'; the nearest are 'Block'"),
        ({"modules": ["layers.O"]}, r"no module 'layers.O'; the nearest are 'layers"),
        ({"modules": ["layers"]}, r"'layers' \(ModuleList\) has no forward"),
        ({"modules": ["layers.0", "layers.0.mlp"]}, "'layers.0.mlp' lies inside 'layers.0'"),
        ({"modules": ["", "head"]}, r"lies inside '\(root\)'"),
        ({"classes": ["Block"], "modules": ["layers.2.norm"]}, "'layers.2.norm' lies inside 'layers.2'"),
        ({"classes": ["Block", "GELU"]}, "every module of class 'GELU' lies inside another block"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest_ones(arguments, message):
    with pytest.raises(ValueError, match=message):
        divide(GPT(), **arguments)


def test_parameters_without_shape_are_refused():
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet; run one forward"):
        divide(nn.Sequential(nn.LazyLinear(4)))


def test_the_description_shows_every_unit_and_the_totals():
    model = GPT()
    model.norm.requires_grad_(False)
    lines = describe_units(model).splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == [unit.name for unit in divide(model)]
    assert lines[-1].split()[:2] == ["total", str(len(list(model.parameters())))]
    assert next(line for line in lines if line.startswith("embed")).endswith("head")
    assert next(line for line in lines if line.startswith("(root) (frozen)")).split()[-2:] == ["float32", "no"]


class Holder(nn.Module):
    """A module of any children and parameters, without a forward."""

    def __init__(self, children, params):
        super().__init__()
        for n, child in enumerate(children):
            self.add_module(f"child{n}", child)
        for n, shape in enumerate(params):
            self.register_parameter(f"param{n}", nn.Parameter(torch.zeros(shape)))


class Caller(Holder):
    def forward(self):
        raise NotImplementedError


LEAVES = st.builds(lambda width: nn.Linear(width, width), st.integers(1, 6))
PARAMS = st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=2)


def bigger(modules):
    lists = st.lists(modules, max_size=4)
    return st.one_of(
        lists.map(nn.ModuleList),
        lists.map(lambda children: nn.Sequential(*children)),
        st.builds(Holder, lists, PARAMS),
        st.builds(Caller, lists, PARAMS),
    )


@st.composite
def awkward_models(draw):
    """A random tree with shared modules, tied, frozen and 16-bit parameters."""
    model = Caller([draw(st.recursive(LEAVES, bigger, max_leaves=12)) for _ in range(2)], draw(PARAMS))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        action = draw(st.sampled_from(["keep", "keep", "tie", "freeze", "half", "share"]))
        if action == "tie":
            module.weight = draw(st.sampled_from(linears)).weight
        elif action == "freeze":
            module.bias.requires_grad_(False)
        elif action == "half":
            module.bias = nn.Parameter(module.bias.detach().bfloat16())
        elif action == "share":
            model.add_module(f"again{len(model._modules)}", module)
    return model


@given(awkward_models(), st.sampled_from([None, 0, 200, BIG]))
def test_any_model_is_divided_soundly(model, min_bytes):
    units = divide(model, min_bytes=min_bytes)
    assert_sound(model, units)
    assert units == divide(model, min_bytes=min_bytes)
    owner = {id(model.get_parameter(name)): unit for unit in units for name in unit.params}
    for name, param in model.named_parameters(remove_duplicate=False):
        holder = name.rpartition(".")[0]
        parts = holder.split(".") if holder else []
        above = {id(model.get_submodule(".".join(parts[:n]))) for n in range(len(parts) + 1)}
        hooked = {id(model.get_submodule(path)) for run in owner[id(param)].runs for path in run}
        assert above & hooked, f"nothing tells when {name} is used"
