"""A linear layer that can be pruned: the same numbers and the same ``state_dict`` in all its forms."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo.nn import SparseLinear, densify, sparse_weights, use_dense_states

OUT, IN, TOKENS = 12, 20, 7


def pair(share: float = 0.3, compact: bool = True) -> tuple[SparseLinear, nn.Linear, Tensor]:
    """Returns a pruned layer, the dense one with zeros that it stands for, and the mask."""
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT)
    kept = torch.rand(OUT, IN) < share
    dense = copy.deepcopy(linear)
    dense.weight.data *= kept
    sparse = SparseLinear.from_linear(linear)
    sparse.prune(kept)
    if compact:
        sparse.compact()
    return sparse, dense, kept


def test_the_object_and_its_parameters_stay() -> None:
    linear = nn.Linear(IN, OUT)
    before = [id(linear), *map(id, linear.parameters())]
    sparse = SparseLinear.from_linear(linear)
    sparse.prune(torch.rand(OUT, IN) < 0.5)
    sparse.compact()
    assert [id(sparse), *map(id, sparse.parameters())] == before
    assert isinstance(sparse, nn.Linear)
    assert type(sparse.to_linear()) is nn.Linear
    assert [id(sparse), *map(id, sparse.parameters())] == before


def test_a_subclass_of_linear_is_refused() -> None:
    class Other(nn.Linear):
        pass

    with pytest.raises(TypeError, match=r"Expected an nn\.Linear, got a Other"):
        SparseLinear.from_linear(Other(2, 2))


def test_a_layer_that_was_not_pruned_cannot_be_compact() -> None:
    with pytest.raises(RuntimeError, match=r"Call prune\(\) before compact\(\)"):
        SparseLinear(2, 2).compact()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_output_and_gradients_are_those_of_the_dense_layer_with_zeros(share: float, compact: bool) -> None:
    sparse, dense, kept = pair(share, compact)
    x = torch.randn(2, TOKENS, IN)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(value) for layer, value in zip((sparse, dense), inputs, strict=True)]
    gradient = torch.randn_like(outputs[0])
    for output in outputs:
        output.backward(gradient)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(sparse.bias.grad, dense.bias.grad, rtol=0, atol=1e-5)
    if compact and not share:
        assert sparse.weight.grad is None  # where nothing is left there is none
        return
    expected = dense.weight.grad * kept
    found = sparse.pattern.scatter(sparse.weight.grad) if compact else sparse.weight.grad
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compact", [False, True])
def test_the_state_dict_is_that_of_the_dense_layer(compact: bool) -> None:
    sparse, dense, _ = pair(compact=compact)
    found, expected = sparse.state_dict(), dense.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    nn.Linear(IN, OUT).load_state_dict(found)


@pytest.mark.parametrize("compact", [False, True])
def test_kept_zeros_are_told_from_pruned_ones(compact: bool) -> None:
    sparse, _, kept = pair(compact=False)
    row, column = kept.nonzero()[3].tolist()
    sparse.weight.data[row, column] = 0.0
    if compact:
        sparse.compact()
    other = SparseLinear.from_linear(nn.Linear(IN, OUT))
    other.load_state_dict(sparse.state_dict())
    other.restore()
    assert torch.equal(other.mask, kept)
    assert other.density == sparse.density == kept.float().mean()


@pytest.mark.parametrize("compact", [False, True])
def test_loading_makes_a_pruned_layer_exactly_what_was_saved(compact: bool) -> None:
    sparse, _, _ = pair(compact=compact)
    torch.manual_seed(5)
    other = nn.Linear(IN, OUT)
    sparse.load_state_dict(other.state_dict())
    assert not sparse.is_compact
    assert sparse.density == 1.0
    x = torch.randn(TOKENS, IN)
    assert torch.equal(sparse(x), other(x))


@pytest.mark.parametrize("compact", [False, True])
def test_masks_nest(compact: bool) -> None:
    sparse, dense, kept = pair(0.6, compact)
    fewer = torch.rand(OUT, IN) < 0.5
    sparse.prune(fewer[kept] if compact else fewer)
    expected = dense.weight.detach() * fewer
    assert torch.equal(sparse.dense_weight(), expected)
    assert sparse.density == (kept & fewer).float().mean()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def train(layer: nn.Linear, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(TOKENS, IN, generator=generator), torch.randn(TOKENS, OUT, generator=generator)
        (layer(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_entries_stay_zero_and_the_others_train_on(name: str, compact: bool) -> None:
    torch.manual_seed(0)
    layer = SparseLinear(IN, OUT)
    optimizer = OPTIMIZERS[name](list(layer.parameters()))
    train(layer, optimizer, 3, seed=1)
    kept = torch.rand(OUT, IN) < 0.4
    before = layer.weight.detach().clone()
    layer.prune(kept, [optimizer])
    if compact:
        layer.compact([optimizer])
    train(layer, optimizer, 5, seed=2)
    after = layer.dense_weight()
    assert torch.equal(after == 0, ~kept)
    assert (after != before)[kept].all()


@pytest.mark.parametrize("name", ["adamw", "fused", "momentum", "rmsprop", "adagrad"])
def test_compact_training_is_masked_training(name: str) -> None:
    found = []
    for compact in (False, True):
        torch.manual_seed(0)
        layer = SparseLinear(IN, OUT)
        optimizer = OPTIMIZERS[name](list(layer.parameters()))
        use_dense_states(optimizer, layer)
        train(layer, optimizer, 3, seed=1)
        layer.prune(torch.rand(OUT, IN) < 0.4, [optimizer])
        if compact:
            layer.compact([optimizer])
        train(layer, optimizer, 10, seed=2)
        found.append((layer.dense_weight(), optimizer.state_dict()["state"][0]))
    (masked, masked_state), (compacted, compacted_state) = found
    torch.testing.assert_close(compacted, masked, rtol=0, atol=1e-5)
    assert masked_state.keys() == compacted_state.keys()
    for key, value in masked_state.items():
        torch.testing.assert_close(compacted_state[key], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kept", [0, 1])
def test_state_of_a_few_entries_is_told_from_a_number(kept: int) -> None:
    layer = SparseLinear(2, 1)
    optimizer = OPTIMIZERS["adamw"](list(layer.parameters()))
    (layer(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    layer.prune(torch.tensor([[True, False]]), [optimizer])
    layer.compact([optimizer])
    layer.prune(torch.tensor([bool(kept)]), [optimizer])
    assert optimizer.state[layer.weight]["exp_avg"].shape == layer.weight.shape == (kept,)
    assert optimizer.state[layer.weight]["step"] == 1
    (layer(torch.ones(1, 2)).sum()).backward()
    optimizer.step()


def test_the_optimizer_has_to_forget_what_was_pruned() -> None:
    torch.manual_seed(0)
    layer = SparseLinear(IN, OUT)
    optimizer = OPTIMIZERS["adamw"](list(layer.parameters()))
    train(layer, optimizer, 3, seed=1)
    kept = torch.rand(OUT, IN) < 0.4
    layer.prune(kept)  # without the optimizer
    train(layer, optimizer, 5, seed=2)
    assert not torch.equal(layer.weight == 0, ~kept)


def test_memory_is_that_of_the_kept_entries() -> None:
    sparse, _, kept = pair(0.1)
    nnz = int(kept.sum())
    assert sparse.weight.untyped_storage().nbytes() == 4 * nnz
    indices = sum(buffer.untyped_storage().nbytes() for buffer in sparse.buffers())
    assert indices == 4 * (OUT + 1 + IN + 1) + nnz * (2 + 2 + 4)


@pytest.mark.parametrize("compact", [False, True])
def test_copies_and_pickles_are_whole(compact: bool) -> None:
    sparse, dense, _ = pair(compact=compact)
    x = torch.randn(TOKENS, IN)
    for other in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        torch.testing.assert_close(other(x), dense(x), rtol=0, atol=1e-5)
        assert other.is_compact == compact


def test_densify_makes_plain_modules() -> None:
    sparse, dense, _ = pair()
    model = nn.Sequential(sparse, nn.ReLU())
    assert list(sparse_weights(model)) == [id(sparse.weight)]
    densify(model)
    assert type(model[0]) is nn.Linear
    assert not sparse_weights(model)
    assert torch.equal(model[0].weight, dense.weight)
    assert {name for name, _ in model.named_buffers()} == set()


def test_a_graph_that_is_kept_alive_does_not_hold_the_old_shape() -> None:
    layer = SparseLinear(IN, OUT)
    seen: list[int] = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.numel()))
    optimizer = OPTIMIZERS["adamw"](list(layer.parameters()))
    for step in range(4):
        loss = layer(torch.randn(TOKENS, IN)).square().mean()  # the last one is alive while the layer is pruned
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            layer.prune(torch.rand(OUT, IN) < 0.5, [optimizer])
            layer.compact([optimizer])
    assert seen == [IN * OUT] * 2 + [layer.weight.numel()] * 2


@pytest.mark.parametrize("compact", [False, True])
def test_infinite_gradients_of_pruned_entries_do_not_reach_the_others(compact: bool) -> None:
    layer = SparseLinear(IN, OUT)
    kept = torch.rand(OUT, IN) < 0.5
    kept[:, 3] = False
    layer.prune(kept)
    if compact:
        layer.compact()
    x = torch.randn(TOKENS, IN)
    x[:, 3] = 3e38
    (10 * layer(x)).sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_hold_sets_pruned_entries_back() -> None:
    layer, _, kept = pair(compact=False)
    layer.weight.data += 1.0
    layer.hold()
    assert torch.equal(layer.weight == 0, ~kept)


@pytest.mark.parametrize("compact", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(compact: bool) -> None:
    layer, dense, _ = pair(compact=compact)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict({"weight": torch.zeros(5, 5), "bias": dense.bias})
    assert torch.equal(layer.dense_weight(), dense.weight)
    assert layer.is_compact == compact


@pytest.mark.parametrize("compact", [False, True])
def test_going_back_to_saved_values_keeps_what_is_pruned(compact: bool) -> None:
    layer, _, kept = pair(compact=compact)
    optimizer = OPTIMIZERS["adamw"](list(layer.parameters()))
    use_dense_states(optimizer, layer)
    train(layer, optimizer, 2, seed=1)
    saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    train(layer, optimizer, 3, seed=2)
    expected = layer.dense_weight()
    layer.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert layer.is_compact == compact
    train(layer, optimizer, 3, seed=2)
    assert torch.equal(layer.dense_weight(), expected)
    assert torch.equal(expected == 0, ~kept)


@pytest.mark.parametrize("compact", [False, True])
def test_expand_is_the_inverse_of_compact(compact: bool) -> None:
    layer, _, kept = pair(compact=compact)
    optimizer = OPTIMIZERS["adamw"](list(layer.parameters()))
    train(layer, optimizer, 2, seed=1)
    state, weight = layer.dense_state(optimizer.state[layer.weight]), layer.dense_weight()
    layer.expand([optimizer])
    assert torch.equal(layer.mask, kept)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize("compact", [False, True])
def test_transforms_of_the_weight_and_over_rows(compact: bool) -> None:
    layer, dense, kept = pair(compact=compact)
    if compact:
        x = torch.randn(TOKENS, IN)
        torch.testing.assert_close(torch.func.vmap(layer)(x), dense(x))
        layer.expand()
    x = torch.randn(TOKENS, IN)

    def loss(weight: Tensor, row: Tensor, module: nn.Module) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, (row,)).square().sum()

    per_row = torch.func.vmap(torch.func.grad(loss), (None, 0, None))
    expected = per_row(dense.weight.detach(), x, dense) * kept
    torch.testing.assert_close(per_row(layer.weight.detach(), x, layer), expected)


@pytest.mark.parametrize("kept", [torch.ones(1, IN, dtype=torch.bool), torch.ones(OUT, IN)])
def test_what_is_no_mask_is_refused(kept: Tensor) -> None:
    with pytest.raises(ValueError, match=r"torch\.bool of shape \[12, 20\], got"):
        SparseLinear(IN, OUT).prune(kept)


def test_a_weight_that_is_computed_from_others_is_refused() -> None:
    linear = nn.Linear(IN, OUT)
    nn.utils.prune.random_unstructured(linear, "weight", 0.5)
    with pytest.raises(TypeError, match=r"whose weight is computed from others"):
        SparseLinear.from_linear(linear)


@pytest.mark.parametrize(("in_features", "out_features"), [(0, 3), (3, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_features(in_features: int, out_features: int) -> None:
    layer = SparseLinear(in_features, out_features)
    layer.prune(torch.ones(out_features, in_features, dtype=torch.bool))
    layer.compact()
    x = torch.randn(TOKENS, in_features, requires_grad=True)
    torch.full((64, 64), torch.nan)  # for memory that is not cleared to show
    output = layer(x)
    assert torch.equal(output, layer.bias.expand(TOKENS, -1))
    output.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
