"""The chain of a Hugging Face model computes what the model does, and what cannot be a chain is refused by name."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dynmo import hf_layers
from lightning_dynmo.ownership import LayerChain
from lightning_dynmo.pipeline.borders import call_layer, infer_borders
from lightning_dynmo.pipeline.microbatches import Inputs
from tests.helpers.fitting import differences
from tests.helpers.language_models import CONFIGS, model_of, padded_batches


def batch(padding: bool = True) -> dict[str, Tensor]:
    return dict(next(iter(padded_batches(4, 4, padding=padding))))


def run_chain(layers: list[nn.Module], inputs: dict[str, Any]) -> Any:
    values: tuple[Any, ...] = ()
    for layer in layers:
        output = call_layer(layer, values, inputs)
        values = (output,)
    return output


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def outputs_differ(model: nn.Module, layers: list[nn.Module], inputs: dict[str, Any]) -> list[str]:
    ours, theirs = run_chain(layers, inputs), model(**inputs, use_cache=False)
    assert type(ours) is type(theirs)
    assert list(ours) == list(theirs)
    found = differences(dict(ours), dict(theirs))
    return found + differences(gradients(model, ours.loss), gradients(model, theirs.loss), "gradients")


OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}


@pytest.mark.parametrize("kind", [*CONFIGS, *OTHERS])
@pytest.mark.parametrize("padding", [True, False])
def test_chain_is_the_model(kind: str, padding: bool) -> None:
    model = any_model(kind)
    layers = hf_layers(model)
    inputs = batch(padding)
    assert outputs_differ(model, layers, inputs) == []
    without_mask = {key: value for key, value in inputs.items() if key != "attention_mask"}
    assert outputs_differ(model, layers, without_mask) == []
    positions = torch.arange(10).flip(0).expand(4, -1).contiguous()
    assert outputs_differ(model, layers, {**inputs, "position_ids": positions}) == []

    chain = LayerChain(model, layers)
    borders = infer_borders(chain, Inputs((), inputs), nullcontext)
    assert [[tuple(tensor.shape) for tensor in border.tensors] for border in borders] == [[(4, 10, 16)]] * (
        len(layers) - 1
    )
    assert all(tensor.requires_grad for border in borders for tensor in border.tensors)
    owned = [id(parameter) for layer in layers for parameter in layer.parameters()]
    assert sorted(owned) == sorted(map(id, model.parameters()))


def any_model(kind: str) -> nn.Module:
    if kind in CONFIGS:
        return model_of(kind)
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {**CONFIGS["llama"], "tie_word_embeddings": False, **OTHERS[kind]}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))


def test_masks_are_made_anew_when_the_batch_changes_in_place() -> None:
    model = model_of("llama")
    layers, inputs = hf_layers(model), batch()
    assert outputs_differ(model, layers, inputs) == []
    inputs["attention_mask"][1, :6] = 0
    assert outputs_differ(model, layers, inputs) == []


def test_the_comparison_sees_a_layer_of_another_kind() -> None:
    model = model_of("qwen2")
    layers = hf_layers(model)
    layers[1]._index, layers[2]._index = 1, 0  # full and sliding attention exchanged
    assert outputs_differ(model, layers, batch()) != []


def test_gradient_checkpointing_changes_nothing_but_memory() -> None:
    model = model_of("llama").train()
    expected = gradients(model, run_chain(hf_layers(model), batch()).loss)
    expected = [None if gradient is None else gradient.clone() for gradient in expected]
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():  # it is being renamed
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    actual = gradients(model, run_chain(hf_layers(model), batch()).loss)
    assert differences(actual, expected) == []
    assert len(calls) == 2


def test_frozen_layers_send_no_gradient_and_copies_of_layers_leave_the_model_alone() -> None:
    model = model_of("llama")
    layers = hf_layers(model)
    for layer in layers[:2]:
        layer.requires_grad_(False)
    borders = infer_borders(LayerChain(model, layers), Inputs((), batch()), nullcontext)
    assert [border.tensors[0].requires_grad for border in borders] == [False, False, True, True]
    assert not any(hasattr(buffer, "fake_mode") for buffer in model.buffers())
    twin = copy.deepcopy(layers[1])
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in layers[1].parameters())


# What cannot be a chain.


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)


def llama_with(part: str) -> nn.Module:
    model = model_of("llama")
    if part == "extra":
        model.model.extra = nn.Linear(2, 2)
    elif part == "no layers":
        model.model.config.base_model_pp_plan = {"embed_tokens": (["input_ids"], ["inputs_embeds"])}
    elif part == "other names":
        model.model.config.base_model_pp_plan = None
        model.model.stem = model.model.embed_tokens
        del model.model.embed_tokens
    return model


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (Two, TypeError, "causal language model of Hugging Face, with a config and a base model, got Two"),
        (lambda: model_of("llama").model, TypeError, "got LlamaModel"),
        (lambda: model_of("mixtral", output_router_logits=True), ValueError, "output_router_logits=False"),
        (lambda: model_of("llama", output_hidden_states=True), ValueError, "output_hidden_states=False"),
        (lambda: llama_with("extra"), ValueError, "has parameters in extra"),
        (lambda: llama_with("no layers"), TypeError, "of which 0 are lists of decoder layers"),
        (lambda: llama_with("other names"), TypeError, "but of layers, norm, rotary_emb, stem"),
    ],
)
def test_what_is_missing_is_named(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hf_layers(make())


def test_a_decoder_layer_that_returns_more_is_refused() -> None:
    model = model_of("llama")
    layers = hf_layers(model)
    model.model.layers[1].forward = lambda hidden, *args, **kwargs: (hidden, None)
    with pytest.raises(TypeError, match=r"Decoder layer 1 \(LlamaDecoderLayer\) returns a tuple"):
        run_chain(layers, batch())
