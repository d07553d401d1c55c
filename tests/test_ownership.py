"""Shells keep every tensor object, hold no memory, and cannot be mistaken for layers."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo.ownership import LayerChain, accepted_keywords, restore_forward, shared_parameters


class Layer(nn.Module):
    """Holds one of everything."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))
        self.register_buffer("codes", torch.arange(width), persistent=False)
        self.register_buffer("waves", torch.ones(width, dtype=torch.complex64))
        self.register_buffer("cache", None)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Tensor:
        self.count = self.count + 1
        return self.linear(x) * scale


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def make_chain(*layers: nn.Module) -> LayerChain:
    model = Model(*(layers or (Layer(), Layer(), Layer())))
    return LayerChain(model, list(model.layers))


def taken_copies(chain: LayerChain, index: int) -> list[Tensor]:
    return [tensor.detach().clone() for _, tensor in chain.tensors(index)]


def test_shell_keeps_objects_shapes_and_dtypes_but_no_memory() -> None:
    chain = make_chain()
    before = dict(chain.tensors(1))
    forms = {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in before.items()}
    resident = chain.resident_bytes()
    chain.let_go(1, owner=2)
    after = dict(chain.tensors(1))
    assert all(after[name] is before[name] for name in before)
    assert {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in after.items()} == forms
    assert sum(tensor.untyped_storage().nbytes() for tensor in after.values()) == 4 + 4 + 8 + 1 + 8 + 8
    assert resident - chain.resident_bytes() == chain.sizes[1].state_bytes - 33
    assert chain.owned == (0, 2)


def test_sizes_count_parameters_and_bytes_of_shells_too() -> None:
    chain = make_chain()
    state_bytes = (64 + 8) * 4 + 8 + 8 + 8 * 8 + 8 * 8
    for _ in range(2):
        assert [(size.num_parameters, size.state_bytes) for size in chain.sizes] == [(72, state_bytes)] * 3
        assert [load.num_parameters for load in chain.static_loads()] == [72] * 3
        chain.let_go(1, owner=2)
    assert chain.resident_bytes() == 2 * state_bytes + 33


def test_resident_bytes_count_gradients() -> None:
    chain = make_chain()
    without = chain.resident_bytes()
    chain.layers[0](torch.ones(8)).sum().backward()
    assert chain.resident_bytes() - without == 72 * 4
    chain.let_go(0, owner=1)
    assert chain.layers[0].linear.weight.grad is None


def test_shell_values_show_when_they_are_read() -> None:
    chain = make_chain()
    layer = chain.layers[0]
    chain.let_go(0, owner=1)
    assert layer.linear.weight.isnan().all()
    assert layer.waves.isnan().all()
    assert layer.codes.eq(torch.iinfo(torch.int64).min).all()
    assert not layer.mask.any()


def test_shell_forward_says_where_the_layer_lives_and_what_to_do() -> None:
    chain = make_chain()
    chain.let_go(1, owner=2)
    with pytest.raises(RuntimeError, match=r"layer 1 \(Layer\) lives on pipeline rank 2. Call self\(...\)"):
        chain.layers[1](torch.ones(8))
    chain.let_go(1, owner=3)
    with pytest.raises(RuntimeError, match="lives on pipeline rank 3"):
        chain.layers[1](torch.ones(8))
    assert chain.layers[0](torch.ones(8)).shape == (8,)


def test_writing_into_a_shell_raises() -> None:
    chain = make_chain()
    state = copy.deepcopy(chain.layers[1].state_dict())
    chain.let_go(1, owner=2)
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        chain.layers[1].linear.weight.copy_(torch.ones(8, 8))
    with pytest.raises(RuntimeError, match="single memory location"):
        chain.layers[1].load_state_dict(state)


def test_round_trip_gives_back_values_hooks_attributes_and_optimizer_links() -> None:
    chain = make_chain()
    layer, parameter = chain.layers[1], chain.layers[1].linear.weight
    calls: list[str] = []
    parameter.register_hook(lambda _: calls.append("tensor"))
    parameter.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    parameter.note, layer.note = "kept", "kept"
    optimizer = torch.optim.SGD(chain.root.parameters(), lr=0.1)
    x, copies = torch.randn(2, 8, requires_grad=True), taken_copies(chain, 1)
    expected = layer(x).detach()
    calls.clear()

    chain.let_go(1, owner=2)
    chain.take(1, copies)
    output = layer(x)
    output.sum().backward()
    assert torch.equal(output, expected)
    assert calls == ["forward", "tensor", "accumulated", "backward"]
    assert (parameter.note, layer.note) == ("kept", "kept")
    assert layer.linear.weight is parameter
    before = parameter.detach().clone()
    optimizer.step()
    assert not torch.equal(parameter, before)
    assert chain.owned == (0, 1, 2)


def test_buffer_that_the_forward_replaces_is_followed() -> None:
    chain = make_chain()
    chain.layers[1](torch.ones(8))
    assert chain.layers[1].count == 4
    copies = taken_copies(chain, 1)
    chain.let_go(1, owner=2)
    assert chain.layers[1].count.untyped_storage().nbytes() == 8
    chain.take(1, copies)
    assert chain.layers[1].count == 4


def test_shell_is_given_the_buffers_that_its_owner_has_by_now() -> None:
    owner, other = make_chain(), make_chain()
    owner.layers[1].cache = torch.ones(5)  # made in forward
    owner.layers[1].linear.register_buffer("scratch", torch.ones(2), persistent=False)
    owner.layers[1].mask = None
    other.let_go(1, owner=0)
    other.match_buffers(1, owner.buffers(1))
    assert other.buffers(1) == owner.buffers(1)
    assert other.buffers(1)["cache"] is True
    assert other.buffers(1)["linear.scratch"] is False
    tensors = dict(owner.tensors(1))
    other.take(1, [tensors[name] for name, _ in other.tensors(1)])
    assert torch.equal(other.layers[1].cache, torch.ones(5))
    assert other.layers[1].mask is None
    assert list(other.layers[1].state_dict()) == list(owner.layers[1].state_dict())


def test_gradients_work_after_moves_inside_inference_mode() -> None:
    """Callbacks move layers at the end of a validation, which Lightning runs in inference mode."""
    chain = make_chain()
    copies = taken_copies(chain, 1)
    with torch.inference_mode():
        chain.layers[1](torch.ones(8))  # leaves an inference tensor in a buffer
        chain.let_go(1, owner=2)
    chain.take(1, copies)
    chain.layers[1](torch.ones(8)).sum().backward()
    assert chain.layers[1].linear.weight.grad.isfinite().all()


# Modules and buffers that several layers use


def test_shared_buffer_stays_on_every_rank() -> None:
    table = torch.arange(4.0)
    layers = [Layer(), Layer(), Layer()]
    for layer in layers[:2]:
        layer.register_buffer("table", table)
    chain = make_chain(*layers)
    chain.let_go(0, owner=1)
    chain.let_go(1, owner=1)
    assert torch.equal(layers[0].table, torch.arange(4.0))
    assert "table" not in dict(chain.tensors(0))
    assert [name for name, _ in chain.stationary()] == ["layers.0.table"]


def test_module_that_is_several_layers_runs_while_one_of_them_is_owned() -> None:
    relu = nn.ReLU()
    chain = make_chain(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Sequential(nn.Linear(4, 4), relu))
    for index in (0, 1, 2):
        chain.let_go(index, owner=0)
    assert relu(-torch.ones(1)) == 0
    chain.let_go(3, owner=0)
    assert chain.layers[4](torch.ones(4)).shape == (4,)
    chain.let_go(4, owner=0)
    with pytest.raises(RuntimeError, match="layer 3"):
        relu(torch.ones(1))
    chain.take(1, [])
    assert relu(-torch.ones(1)) == 0


# The forward of instances, copies and pickles


def doubled(x: Tensor, extra: Tensor | None = None) -> Tensor:
    return x * 2


def test_forward_of_the_instance_is_preserved() -> None:
    layer = Layer()
    layer.forward = doubled
    chain = make_chain(layer, Layer())
    chain.let_go(0, owner=1)
    chain.let_go(0, owner=2)
    assert accepted_keywords(layer) == ("x", "extra")
    chain.take(0, taken_copies(chain, 0))
    assert layer.forward is doubled
    chain.let_go(1, owner=0)
    chain.take(1, taken_copies(chain, 1))
    assert "forward" not in vars(chain.layers[1])


def test_shells_can_be_pickled_and_copied() -> None:
    chain = make_chain()
    chain.let_go(1, owner=2)
    buffer = io.BytesIO()
    torch.save(chain.root, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(chain.root), pickle.loads(pickle.dumps(chain.root)), loaded):
        assert torch.equal(other.layers[0].linear.weight, chain.layers[0].linear.weight)
        assert other.layers[1].linear.weight.isnan().all()
        with pytest.raises(RuntimeError, match="lives on pipeline rank 2"):
            other.layers[1](torch.ones(8))
        restore_forward(other.layers[1])
        assert other.layers[1](torch.ones(8)).isnan().all()


class Curious(nn.Module):
    def forward(self, a: Tensor, /, b: Tensor, *rest: Tensor, c: int = 0, **more: Any) -> Tensor:
        return a


@pytest.mark.parametrize("shell", [False, True])
def test_accepted_keywords_are_those_that_positions_leave(shell: bool) -> None:
    chain = make_chain(Layer(), Curious())
    if shell:
        chain.let_go(0, owner=1)
        chain.let_go(1, owner=1)
    assert accepted_keywords(chain.layers[0]) == ("x", "scale", "mask")
    assert accepted_keywords(chain.layers[0], 1) == ("scale", "mask")
    assert accepted_keywords(chain.layers[0], 2) == ("mask",)
    assert accepted_keywords(chain.layers[1]) == ("b", "c")
    assert accepted_keywords(chain.layers[1], 1) == ("b", "c")
    assert accepted_keywords(chain.layers[1], 5) == ("c",)
    assert list(inspect.signature(Layer.forward).parameters) == ["self", "x", "scale", "mask"]


# What cannot be a chain


def test_empty_chain_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Model.configure_pipeline\(\) returned no layers. Return the chain"):
        LayerChain(Model(), [])


def test_entry_that_is_no_module_is_an_error() -> None:
    model = Model(Layer())
    with pytest.raises(TypeError, match=r"Entry 1 of Model.configure_pipeline\(\) is a function, not an nn.Module"):
        LayerChain(model, [model.layers[0], doubled])  # type: ignore[list-item]


def test_foreign_parameters_are_named() -> None:
    model = Model(Layer())
    with pytest.raises(
        ValueError, match=r"Layer 1 \(Linear\) .* not part of the model: weight, bias. Create the layer"
    ):
        LayerChain(model, [model.layers[0], nn.Linear(2, 2)])


def tied_chain() -> LayerChain:
    model = Model(Layer(), Layer(), Layer())
    model.layers[2].linear.weight = model.layers[0].linear.weight
    return LayerChain(model, list(model.layers))


def test_shared_parameters_are_named_with_their_layers() -> None:
    chain = tied_chain()
    assert shared_parameters(chain.root, chain.layers) == {"layers.0.linear.weight": (0, 2)}
    assert [(id(parameter), users) for parameter, users in chain.tied()] == [
        (id(chain.layers[0].linear.weight), (0, 2))
    ]


def test_shared_parameter_stays_while_a_layer_that_uses_it_is_here() -> None:
    chain = tied_chain()
    weight, expected = chain.layers[0].linear.weight, chain.layers[0].linear.weight.detach().clone()
    package = [tensor.detach().clone() for _, tensor in chain.tensors(2)]
    chain.let_go(0, owner=1)
    assert chain.holds(weight)
    assert not chain.holds(chain.layers[0].linear.bias)
    assert torch.equal(weight, expected)
    assert chain.layers[0].linear.bias.isnan().all()
    chain.let_go(2, owner=1)
    assert not chain.holds(weight)
    assert weight.isnan().all()
    chain.take(2, package)
    assert torch.equal(weight, expected)
    assert sum(parameter is weight for parameter in chain.owned_parameters()) == 1


def test_trainable_parameters_outside_the_chain_are_named() -> None:
    model = Model(*(nn.Linear(1, 1) for _ in range(4)))
    text = (
        r"6 trainable parameters are in no layer .*: layers.1.weight, layers.1.bias, layers.2.weight, layers.2.bias, "
        r"layers.3.weight and 1 more. Move them into one of the layers, or freeze them with requires_grad_\(False\)"
    )
    with pytest.raises(ValueError, match=text):
        LayerChain(model, [model.layers[0]])
    model.layers[1:].requires_grad_(False)
    chain = LayerChain(model, [model.layers[0]])
    assert len(chain.stationary()) == 6
