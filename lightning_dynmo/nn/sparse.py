"""Linear layers whose weight is pruned: masked while that is faster, then in compressed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dynmo._torch import FakeTensor, in_transform, replace_data
from lightning_dynmo.nn.csr import CSRPattern
from lightning_dynmo.nn.csr_linear import csr_linear

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDICES = ("row_offsets", "columns", "t_row_offsets", "t_columns", "t_order", "tasks", "t_tasks")


class SparseLinear(nn.Linear):
    """An ``nn.Linear`` whose weight can lose entries for good.

    [Note: one parameter, three forms]
    ``weight`` is one ``Parameter`` object for ever, which optimizers and hooks hold on to; only its data changes. At
    first it is the dense matrix ``[out_features, in_features]``. After `prune` it is that matrix with zeros, and a
    ``mask`` keeps gradients from them. After `compact` it is the vector of the kept values ``[nnz]``, in compressed
    rows. Mask and indices are buffers, so they travel when the layer moves, and are in no ``state_dict``: that has the
    dense matrix in all three forms, so a checkpoint does not show which one the run was in. (With ``keep_vars=True``
    it has the parameter itself.) Loading such a state keeps the form where all that was pruned is zero in it.

    In a ``state_dict`` pruned entries are 0.0, and kept ones that happen to be zero are -0.0; this is how `restore`
    finds out again what was pruned.

    Args:
        in_features: As for ``nn.Linear``.
        out_features: As for ``nn.Linear``.
        bias: As for ``nn.Linear``.
        device: As for ``nn.Linear``.
        dtype: As for ``nn.Linear``.
    """

    mask: Tensor | None
    row_offsets: Tensor
    columns: Tensor | None
    t_row_offsets: Tensor
    t_columns: Tensor
    t_order: Tensor
    tasks: Tensor | None
    t_tasks: Tensor | None
    num_tokens: int = 0
    """Rows of the last input: tokens of a microbatch."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._forget()

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> SparseLinear:
        """Makes an ``nn.Linear`` one that can be pruned: the same object, so that whatever refers to it still does.

        Raises:
            TypeError: If it is a subclass, whose ``forward`` may read the weight in another way, or its weight is no
                parameter.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(f"Expected an nn.Linear, got a {type(linear).__name__}, whose forward may be another one.")
        if not isinstance(linear._parameters.get("weight"), nn.Parameter):
            raise TypeError(
                "Expected an nn.Linear with a weight of its own, got one whose weight is computed from others, as by "
                "weight_norm. Remove that first, such as by torch.nn.utils.remove_weight_norm."
            )
        linear.__class__ = cls
        assert isinstance(linear, SparseLinear)
        linear._forget()
        return linear

    @property
    def is_compact(self) -> bool:
        """Whether the weight is the vector of the kept values."""
        return self.columns is not None

    @property
    def density(self) -> float:
        """Share of the weight that is kept, in ``[0, 1]``."""
        total = max(self.in_features * self.out_features, 1)
        if self.columns is not None:
            return self.columns.numel() / total
        return 1.0 if self.mask is None else int(self.mask.sum()) / total

    @property
    def pattern(self) -> CSRPattern:
        """Which entries are kept, while the layer is compact."""
        assert self.columns is not None
        indices = (getattr(self, name) for name in _INDICES)
        return CSRPattern((self.out_features, self.in_features), *indices)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Computes ``input W^T + bias``: `[..., in_features] -> [..., out_features]`."""
        if isinstance(input, FakeTensor):  # only the shape is asked for, of shells too, whose weight has any
            shape = (self.out_features, self.in_features)
            weight = self.weight.new_empty(shape).requires_grad_(self.weight.requires_grad)
            return F.linear(input, weight, self.bias)
        self.num_tokens = input.numel() // max(self.in_features, 1)
        if self.columns is not None and in_transform():
            return F.linear(input, self.pattern.scatter(self.weight), self.bias)
        if self.columns is not None:
            # Where nothing is left there is no gradient either: many a norm or optimizer wants at least one element.
            values = self.weight if self.columns.numel() else self.weight.detach()
            return csr_linear(input, values, self.pattern, self.bias)
        if self.mask is not None:
            return F.linear(input, _KeptGradient.apply(self.weight, self.mask), self.bias)  # type: ignore[no-untyped-call]
        return F.linear(input, self.weight, self.bias)

    @torch.no_grad()
    def prune(self, kept: Tensor, optimizers: Iterable[Optimizer] = ()) -> None:
        """Removes entries for good, and what optimizers remember of them.

        Args:
            kept: What stays, bool ``[out_features, in_features]``; while the layer is compact, ``[nnz]``.
            optimizers: Those that may hold state of the weight.

        Raises:
            ValueError: If `kept` is something else.
        """
        if kept.dtype != torch.bool or kept.shape != self.weight.shape:
            raise ValueError(
                f"Expected what is kept of the weight, torch.bool of shape {list(self.weight.shape)}, got {kept.dtype} "
                f"of shape {list(kept.shape)}. Pass for example layer.weight.abs() > 0.01."
            )
        if self.columns is not None:
            old = self.pattern
            new = CSRPattern.from_mask(old.scatter(kept))
            self._change(lambda values: values[kept], optimizers)
            self._keep_indices(new)
            return
        self.mask = kept.clone() if self.mask is None else self.mask & kept
        mask = self.mask
        self._change(lambda dense: torch.where(mask, dense, torch.zeros((), dtype=dense.dtype)), optimizers)

    @torch.no_grad()
    def compact(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Turns the weight, and what optimizers remember of it, into the kept values alone.

        Raises:
            RuntimeError: If nothing was pruned.
        """
        if self.columns is not None:
            return
        if self.mask is None:
            raise RuntimeError("Only a pruned layer can be made compact. Call prune() before compact().")
        pattern = CSRPattern.from_mask(self.mask)
        self._change(pattern.gather, optimizers)
        self.mask = None
        self._keep_indices(pattern)

    @torch.no_grad()
    def expand(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Makes a compact layer a masked one again, the inverse of `compact`."""
        if self.columns is not None:
            pattern = self.pattern
            self._change(pattern.scatter, optimizers)
            self._keep_indices(None)
            self.mask = pattern.mask()

    @torch.no_grad()
    def hold(self) -> None:
        """Sets pruned entries to zero again, should an optimizer or a hook have changed them."""
        if self.mask is not None:
            _bits(self.weight.data).bitwise_and_(_all_or_no_bits(self.mask))

    @torch.no_grad()
    def dense_weight(self) -> Tensor:
        """Returns the weight as a matrix with zeros, ``[out_features, in_features]``; kept zeros are -0.0."""
        weight = self.weight.detach()
        if self.columns is not None:
            return self.pattern.scatter(torch.where(weight == 0, -0.0, weight))
        if self.mask is not None and bool((self.mask & (weight == 0)).any()):
            return torch.where(self.mask, torch.where(weight == 0, -0.0, weight), 0.0)
        return weight

    def dense_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what an optimizer keeps of the weight, with matrices in place of vectors of kept values."""
        return self._with_changed(state, self.weight.shape, lambda values: self.pattern.scatter(values))

    def compact_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what an optimizer keeps of the weight, with vectors of kept values in place of matrices."""
        shape = torch.Size((self.out_features, self.in_features))
        return self._with_changed(state, shape, lambda dense: self.pattern.gather(dense))

    def _with_changed(
        self, state: Mapping[str, Any], shape: torch.Size, change: Callable[[Tensor], Tensor]
    ) -> dict[str, Any]:
        if not self.is_compact:
            return dict(state)
        return {
            name: change(value) if isinstance(value, Tensor) and value.shape == shape else value
            for name, value in state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Takes entries of the dense weight that are 0.0, and not -0.0, for pruned; the layer is not compact then."""
        self._become_dense(self.dense_weight())
        self.mask = _is_kept(self.weight)

    def to_linear(self) -> nn.Linear:
        """Makes the layer an ``nn.Linear`` again, with the dense weight: the same object. Not for training."""
        self._become_dense(self.dense_weight())
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def _change(self, change: Callable[[Tensor], Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Applies a change to the weight and to optimizer state of its shape; where state has other shapes, it goes."""
        weight, shape = self.weight, self.weight.shape
        for optimizer in optimizers:
            state = optimizer.state.get(weight, {})
            tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            if any(value.shape != shape and value.numel() > 1 for value in tensors.values()):
                del optimizer.state[weight]  # such as Adafactor's sums over rows: begun anew at the next step
                continue
            state.update({name: change(value) for name, value in tensors.items() if value.shape == shape})
        weight.grad = None
        replace_data(weight, change(weight.detach()))

    def _keep_indices(self, pattern: CSRPattern | None) -> None:
        for name in _INDICES:
            setattr(self, name, getattr(pattern, name, None))

    def _forget(self) -> None:
        for name in ("mask", *_INDICES):
            self.register_buffer(name, None, persistent=False)

    def _become_dense(self, weight: Tensor) -> None:
        for name in ("mask", *_INDICES):
            setattr(self, name, None)
        self.weight.grad = None
        replace_data(self.weight, weight)

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and f"{prefix}weight" in destination:
            destination[f"{prefix}weight"] = self.dense_weight()

    @override
    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        key, is_pruned = f"{prefix}weight", self.mask is not None or self.columns is not None
        given = state_dict.get(key)
        if is_pruned and given is not None and given.shape == (self.out_features, self.in_features):
            mask = self.pattern.mask() if self.mask is None else self.mask
            if bool((_is_kept(given).to(mask.device) & ~mask).any()):
                self._become_dense(self.dense_weight())  # less was pruned there
            elif self.columns is not None:
                state_dict = {**state_dict, key: self.pattern.gather(given.to(mask.device))}
        super()._load_from_state_dict(state_dict, prefix, *args)


class _KeptGradient(torch.autograd.Function):
    """Hands on a weight, and its gradient where the mask keeps it."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        gradient = gradients[0]
        if torch.is_grad_enabled() or in_transform():
            return torch.where(mask, gradient, 0.0), None
        return (_bits(gradient) & _all_or_no_bits(mask)).view(gradient.dtype), None


def _bits(values: Tensor) -> Tensor:
    """Returns numbers as integers: to mask these takes a third of the time, and makes no NaN of what is infinite."""
    return values.view(_BITS[values.element_size()])


def _all_or_no_bits(mask: Tensor) -> Tensor:
    return -mask.view(torch.int8)


def _is_kept(dense: Tensor) -> Tensor:
    return (dense != 0) | dense.signbit()


def sparse_weights(module: nn.Module) -> dict[int, SparseLinear]:
    """Returns the layers in a module that can be pruned, by the id of their weight."""
    return {id(part.weight): part for part in module.modules() if isinstance(part, SparseLinear)}


def use_dense_states(optimizer: Optimizer, module: nn.Module) -> None:
    """Makes an optimizer save and load matrices for the compact weights in a module, as the module itself does."""

    def saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        sparse = sparse_weights(module)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for position, parameter in enumerate(parameters):
            if id(parameter) in sparse and position in state_dict["state"]:
                state_dict["state"][position] = sparse[id(parameter)].dense_state(state_dict["state"][position])

    def loaded(optimizer: Optimizer) -> None:
        for layer in sparse_weights(module).values():
            if layer.is_compact and layer.weight in optimizer.state:
                optimizer.state[layer.weight] = layer.compact_state(optimizer.state[layer.weight])

    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_post_hook(loaded)


def densify(module: nn.Module) -> None:
    """Makes every `SparseLinear` in a module an ``nn.Linear`` again, with the same weights."""
    for part in list(sparse_weights(module).values()):
        part.to_linear()
