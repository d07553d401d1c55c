"""Causal language models of Hugging Face as chains of layers. Needs nothing of `transformers` but the model itself.

[Note: the model's own forward]
What a decoder layer gets besides hidden states (masks, position ids, rotary angles, by kind of layer) is decided in the
model's forward, and differs between models and versions. So the chain does not repeat that code: it runs the model's
own forward, with stand-ins for what lives on other ranks. The first layer of the chain leaves it where the first
decoder layer would be called, a decoder layer looks up with which arguments it would be called, and the last one enters
it behind the last decoder layer, and returns what the model returns.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dynmo._torch import FakeTensor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_UNSUPPORTED = ("output_router_logits", "output_hidden_states", "output_attentions")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names of a base model's children, in the order in which its forward calls them."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]


# Of models that have no pipeline plan.
_KNOWN_LAYOUTS = (
    _Layout(("embed_tokens",), "layers", ("norm",)),
    _Layout(("embed_tokens",), "layers", ("final_layernorm",)),
    _Layout(("wte", "wpe", "drop"), "h", ("ln_f",)),
)


def hf_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the chain of layers of a causal language model of Hugging Face, for ``configure_pipeline``.

    For Llama, Mistral, Mixtral, Qwen, Gemma, GPT-NeoX and all others that have a pipeline plan, which says what comes
    before and after the decoder layers, for GPT-2, and for models that are built like one of these. The chain is the
    embeddings, one entry for each decoder layer, and the head. It holds the model's own modules, so the keys of
    checkpoints stay those of the model, and gradient checkpointing of decoder layers works.

    ``self(...)`` takes ``input_ids``, ``attention_mask``, ``position_ids`` and ``labels``, and returns the model's own
    output, with ``logits`` and, where labels were given, its ``loss``::

        class LM(LightningModule):
            def __init__(self):
                super().__init__()
                self.model = AutoModelForCausalLM.from_config(config)

            def configure_pipeline(self):
                return hf_layers(self.model)

            def forward(self, input_ids, attention_mask=None, labels=None):
                return self.model(input_ids, attention_mask, labels=labels, use_cache=False)

            def training_step(self, batch, batch_idx):
                return self(**batch).loss

    Not included are what the model adds to the loss from inside its layers (the auxiliary loss of a router), and what
    it collects from them (``output_hidden_states``, ``output_attentions``).

    Args:
        model: A model with a language modelling head, such as ``AutoModelForCausalLM.from_pretrained`` returns.

    Raises:
        TypeError: If it is no such model, or of unknown build; says what was looked for.
        ValueError: If its configuration asks for what a pipeline cannot give, or it has parameters in unknown places.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    if config is None or not isinstance(base, nn.Module):
        raise TypeError(
            f"hf_layers() needs a causal language model of Hugging Face, with a config and a base model, got {name}. "
            "Pass what AutoModelForCausalLM.from_pretrained or .from_config returns."
        )
    _check_config(name, config)
    layout = _layout_of(name, config, base)
    heads = [child for child, module in model.named_children() if child != prefix and _has_parameters(module)]
    _check_no_others(name, base, layout)
    layers = list(getattr(base, layout.layers))[: getattr(config, "num_hidden_layers", None)]
    outline = _Outline(model, prefix, layout, layers)
    return [
        HFEmbedding(outline, {child: getattr(base, child) for child in layout.before}),
        *(HFLayer(outline, index, layer) for index, layer in enumerate(layers)),
        HFHead(
            outline,
            {child: getattr(base, child) for child in layout.after},
            {child: getattr(model, child) for child in heads},
        ),
    ]


class HFEmbedding(nn.Module):
    """All that a model runs before its first decoder layer: token ids ``[B, T]`` to hidden states ``[B, T, D]``."""

    def __init__(self, outline: _Outline, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._outline = outline
        self.parts = nn.ModuleDict(parts)

    @override
    def forward(
        self, input_ids: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Returns what the model would give its first decoder layer."""
        reached: list[Tensor] = []

        def leave(index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            reached.append(hidden_states)
            raise _LeftError

        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        try:
            self._outline.run(leave, inputs, dict(self.parts))
        except _LeftError:
            return reached[0]
        raise AssertionError("the forward of the model called no decoder layer")


class HFLayer(nn.Module):
    """One decoder layer, called with what the model would call it with: hidden states ``[B, T, D]`` to the same."""

    def __init__(self, outline: _Outline, index: int, layer: nn.Module) -> None:
        super().__init__()
        self._outline = outline
        self._index = index
        self.layer = layer

    @override
    def forward(
        self, hidden_states: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Returns what the decoder layer returns.

        Raises:
            TypeError: If that is more than hidden states.
        """
        if isinstance(hidden_states, FakeTensor):
            # Only the shape is asked for, and it stays. Routers pick experts by values, so the layer could not run.
            trainable = hidden_states.requires_grad or any(p.requires_grad for p in self.layer.parameters())
            return torch.empty_like(hidden_states).requires_grad_(trainable and torch.is_grad_enabled())
        args, kwargs = self._outline.arguments(self._index, hidden_states, attention_mask, position_ids)
        output = self.layer(hidden_states, *args, **kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Decoder layer {self._index} ({type(self.layer).__name__}) returns a {type(output).__name__}; "
                "hf_layers() knows models whose decoder layers return hidden states only. Write the chain for this "
                "model by hand."
            )
        return output


class HFHead(nn.Module):
    """All that a model runs after its last decoder layer: hidden states ``[B, T, D]`` to the model's own output."""

    def __init__(self, outline: _Outline, parts: Mapping[str, nn.Module], heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._outline = outline
        self.parts = nn.ModuleDict(parts)
        self.heads = nn.ModuleDict(heads)

    @override
    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Returns the model's output, such as a ``CausalLMOutputWithPast``."""

        def enter(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return hidden_states if index == self._outline.num_layers - 1 else hidden

        inputs = {
            "inputs_embeds": hidden_states.detach(),
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
        }
        return self._outline.run(enter, inputs, dict(self.parts), dict(self.heads))


class _LeftError(Exception):
    """Ends the forward of a model where enough is known; not an error."""


class _Outline:
    """A model without its layers, whose forward can be run all the same: see [Note: the model's own forward].

    Not a module, so that the modules it refers to count for those entries of the chain only which hold them.

    Args:
        model: The whole model.
        prefix: Name of the base model in it.
        layout: Names in the base model.
        layers: Decoder layers that its forward runs.
        helpers: Copies of what the base model has besides, such as rotary tables; by default its own.
    """

    def __init__(
        self,
        model: nn.Module,
        prefix: str,
        layout: _Layout,
        layers: Sequence[nn.Module],
        helpers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._layout = layout
        self._layers = layers
        self._helpers = dict(helpers or {})
        self._key: tuple[Any, ...] = ()
        self._held: tuple[Any, ...] = ()
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Outline:
        """Copies what may change as it runs; the model itself is only referred to, and may be large."""
        layout, base = self._layout, getattr(self._model, self._prefix)
        named = {*layout.before, layout.layers, *layout.after}
        helpers = {name: copy.deepcopy(child, memo) for name, child in base.named_children() if name not in named}
        return _Outline(self._model, self._prefix, layout, self._layers, helpers)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def run(
        self,
        arrive: Callable[..., Tensor],
        inputs: Mapping[str, Tensor | None],
        parts: Mapping[str, Any] | None = None,
        heads: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs the model's forward.

        Args:
            arrive: Called instead of decoder layer `index` with ``(index, *args, **kwargs)``.
            inputs: Arguments of the forward; those that are None are left out.
            parts: Children of the base model that are at hand; for the others of the layout there are stand-ins.
            heads: Other children of the model that are at hand.
        """
        layout, base = self._layout, getattr(self._model, self._prefix)
        absent = {name: _Absent(getattr(base, name)) for name in (*layout.before, *layout.after)}
        layers = [_shadow(layer, {"forward": partial(arrive, i)}, empty=True) for i, layer in enumerate(self._layers)]
        base = _shadow(base, {**absent, **self._helpers, **(parts or {}), layout.layers: layers})
        model = _shadow(self._model, {self._prefix: base, **(heads or {})})
        given = {name: value for name, value in inputs.items() if value is not None}
        return type(self._model).forward(model, **given, use_cache=False)

    def arguments(
        self, index: int, hidden_states: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns with what decoder layer `index` would be called, besides hidden states.

        Looked up once for all layers that one rank runs on a microbatch, so that these share masks as in the model.
        """
        held = (attention_mask, position_ids)
        about = (hidden_states.shape, hidden_states.dtype, hidden_states.device, torch.is_inference_mode_enabled())
        key = (*map(_identity, held), *about)
        if key != self._key:
            calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

            def note(layer: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                calls.append((args, kwargs))
                if layer == self.num_layers - 1:
                    raise _LeftError
                return hidden_states

            inputs = {"attention_mask": attention_mask, "position_ids": position_ids}
            try:
                with torch.no_grad():
                    self.run(note, {"inputs_embeds": hidden_states.detach(), **inputs})
            except _LeftError:
                self._key, self._held, self._calls = key, held, calls
        return self._calls[index]


class _Absent:
    """Stands in for a module that belongs to another entry of the chain.

    What it returns never gets anywhere. NaN, so that a mistake shows.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def weight(self) -> Any:
        """The module's weight, which may be a shell: forwards ask it for dtype and device."""
        return self._module.weight

    def __call__(self, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self._module, nn.Embedding):
            return value
        nothing = torch.full((), float("nan"), dtype=self._module.weight.dtype, device=value.device)
        return nothing.expand(*value.shape, self._module.embedding_dim)


def _shadow(module: nn.Module, replaced: Mapping[str, Any], *, empty: bool = False) -> nn.Module:
    """Returns a module that has the class and all attributes of another, except for some of them, and no hooks."""
    shadow: nn.Module = object.__new__(type(module))
    attributes = vars(shadow)
    attributes.update(vars(module))
    attributes.update({hooks: OrderedDict() for hooks in _HOOKS})
    if empty:
        attributes.update(_modules={}, _parameters={}, _buffers={})
    children = {name: child for name, child in module._modules.items() if name not in replaced and not empty}
    attributes["_modules"] = children
    for name, value in replaced.items():
        (children if isinstance(value, nn.Module) else attributes)[name] = value
    return shadow


def _identity(tensor: Tensor | None) -> tuple[int, int | None]:
    """Returns what tells whether this is the same tensor with the same values, as long as it is kept."""
    return id(tensor), None if tensor is None or tensor.is_inference() else tensor._version


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _check_config(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder and a decoder, which is no chain of layers. Use a causal model.")
    for option in _UNSUPPORTED:
        if getattr(config, option, False):
            raise ValueError(
                f"The config of {name} sets {option}=True, which collects tensors from layers that live on several "
                f"ranks. Set config.{option}=False."
            )


def _layout_of(name: str, config: Any, base: nn.Module) -> _Layout:
    """Returns the layout from the model's pipeline plan, or a known one that fits."""
    plan = getattr(config, "base_model_pp_plan", None)
    if plan:
        lists = [key for key in plan if isinstance(getattr(base, key, None), nn.ModuleList)]
        if len(lists) == 1:
            keys = list(plan)
            place = keys.index(lists[0])
            return _Layout(tuple(keys[:place]), lists[0], tuple(keys[place + 1 :]))
        raise TypeError(
            f"The pipeline plan of {name} names {', '.join(plan)}, of which {len(lists)} are lists of decoder layers, "
            "expected one. Write the chain for this model by hand."
        )
    for layout in _KNOWN_LAYOUTS:
        if all(
            isinstance(getattr(base, key, None), nn.Module) for key in (*layout.before, layout.layers, *layout.after)
        ):
            return layout
    known = " or ".join("/".join((*layout.before, layout.layers, *layout.after)) for layout in _KNOWN_LAYOUTS)
    raise TypeError(
        f"{name} has no pipeline plan (config.base_model_pp_plan), and its {type(base).__name__} does not consist of "
        f"{known}, but of {', '.join(child for child, _ in base.named_children())}. Write the chain for this model by "
        "hand."
    )


def _check_no_others(name: str, base: nn.Module, layout: _Layout) -> None:
    known = {*layout.before, layout.layers, *layout.after}
    others = [child for child, module in base.named_children() if child not in known and _has_parameters(module)]
    if others:
        raise ValueError(
            f"{name} has parameters in {', '.join(others)}, of which it is not known whether they come before or after "
            "the decoder layers. Write the chain for this model by hand."
        )
