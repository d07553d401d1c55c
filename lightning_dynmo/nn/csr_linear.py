"""A linear layer whose weight is sparse: values of the kept entries, and a pattern that says where they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_dynmo.nn._products import Products, products_for
from lightning_dynmo.nn.csr import CSRPattern

_ON_CPU = (torch.float32, torch.float64)
_CLOSE = 0.9


def csr_linear(x: Tensor, values: Tensor, pattern: CSRPattern, bias: Tensor | None = None) -> Tensor:
    """Returns ``x @ W^T + bias`` for a sparse ``W``, as ``torch.nn.functional.linear`` does for a dense one.

    Gradients reach `x`, `values` and `bias`; those of entries that are not kept are never computed. On the CPU,
    float16 and bfloat16 are computed in float32 and rounded at the end. Where autograd asks for some of the gradients
    only, as where a schedule runs the backward in two parts, only those are computed.

    Args:
        x: Any number of leading dims, ``[..., K]``.
        values: Values of the kept entries, ``[nnz]``.
        pattern: Where they are in the weight ``[M, K]``.
        bias: ``[M]``.

    Returns:
        ``[..., M]``.

    Raises:
        ValueError: If shapes, dtypes or devices do not go together.
        RuntimeError: In the backward, if it is to be differentiated in turn.
    """
    x, values, bias = _in_autocast(x, values, bias)
    _check(x, values, pattern, bias)
    dtype = x.dtype
    if x.device.type != "cuda" and dtype not in _ON_CPU:
        x, values, bias = x.float(), values.float(), None if bias is None else bias.float()
    num_rows, num_columns = pattern.shape
    tokens = x.reshape(x.shape[:-1].numel(), num_columns)
    return _uncompiled(tokens, values, pattern, bias).to(dtype).reshape(*x.shape[:-1], num_rows)


def time_executions(pattern: CSRPattern, values: Tensor, num_tokens: int, *, repetitions: int = 3) -> dict[str, float]:
    """Measures what a layer takes with the zeros in place, and without them.

    Nothing that trains is touched: weights, gradients and random numbers stay as they are.

    Args:
        pattern: The kept entries.
        values: Their values; their device and dtype count.
        num_tokens: Tokens of a microbatch.
        repetitions: How often each is run, after a first time that does not count; the shortest time counts.

    Returns:
        Seconds for one microbatch, forward and both gradients, of ``"dense"`` and of ``"csr"``.
    """
    generator = torch.Generator(values.device).manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(values.device.type, enabled=False):
        x = values.new_empty(num_tokens, pattern.shape[1]).normal_(generator=generator).requires_grad_()
        weights = {
            "dense": pattern.scatter(values.detach()).requires_grad_(),
            "csr": values.detach().clone().requires_grad_(),
        }
        gradient = values.new_ones(num_tokens, pattern.shape[0])
        runs: dict[str, Callable[[], Tensor]] = {
            "dense": lambda: F.linear(x, weights["dense"]),
            "csr": lambda: csr_linear(x, weights["csr"], pattern),
        }
        seconds = dict.fromkeys(runs, float("inf"))
        for repetition in range(repetitions + 1):
            for name, run in runs.items():
                begin = _now(values.device)
                torch.autograd.grad(run(), [x, weights[name]], gradient)
                taken = _now(values.device) - begin
                if repetition:
                    seconds[name] = min(seconds[name], taken)
    return seconds


def faster_execution(seconds: Mapping[str, float]) -> str:
    """Returns which of the executions that `time_executions` measured is the faster, ``"dense"`` or ``"csr"``.

    The dense one where they are close: such times are off by a few per cent, and no layer is to be slower than before.
    """
    return "csr" if seconds["csr"] < _CLOSE * seconds["dense"] else "dense"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _in_autocast(x: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts as autocast does for ``linear``: all but float64."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return x, values, bias
    to = torch.get_autocast_dtype(kind)
    x, values = (tensor if tensor.dtype is torch.float64 else tensor.to(to) for tensor in (x, values))
    return x, values, bias if bias is None or bias.dtype is torch.float64 else bias.to(to)


def _check(x: Tensor, values: Tensor, pattern: CSRPattern, bias: Tensor | None) -> None:
    num_rows, num_columns = pattern.shape
    expected = {"x": (x, [*x.shape[:-1], num_columns]), "values": (values, [pattern.nnz])}
    if bias is not None:
        expected["bias"] = (bias, [num_rows])
    for name, (tensor, shape) in expected.items():
        if not x.dim() or list(tensor.shape) != shape:
            raise ValueError(
                f"Expected {name} of shape {shape if x.dim() else f'[..., {num_columns}]'} for a weight "
                f"[{num_rows}, {num_columns}] with {pattern.nnz} kept entries, got {list(tensor.shape)}. Pass x "
                "[..., K], values [nnz] and bias [M]."
            )
        if tensor.dtype != x.dtype or tensor.device != x.device or not tensor.is_floating_point():
            raise ValueError(
                f"Expected {name} of a floating type, and of the type and on the device of x, {x.dtype} on {x.device}, "
                f"got {tensor.dtype} on {tensor.device}. Convert it, as by {name}.to(x), or use autocast."
            )


def _linear(tokens: Tensor, values: Tensor, pattern: CSRPattern, bias: Tensor | None) -> Tensor:
    """Puts the product together from nodes of the graph, each of which has one gradient to compute.

    A node cannot know for which of its inputs a gradient is wanted, only which may want one. So the input's gradient
    is one node's, the values' another's, and what both need, the packed gradient, is that of the node where they meet.
    """
    products, gradients = products_for(tokens), torch.is_grad_enabled()
    panels = products.pack(tokens.detach())
    shape = (len(panels), pattern.shape[0], panels.shape[2])
    of_input = of_values = of_bias = None
    if gradients and tokens.requires_grad:
        of_input = _Input.apply(tokens, values.detach(), pattern, products, shape)  # type: ignore[no-untyped-call]
    if gradients and values.requires_grad:
        of_values = _Values.apply(values, panels, pattern, products, shape)  # type: ignore[no-untyped-call]
    if gradients and bias is not None and bias.requires_grad:
        # Expanded outside, so that the sum over tokens is a node of its own too.
        of_bias = bias.expand(len(tokens), -1)

    def product() -> Tensor:
        shift = None if bias is None else bias.detach()
        return products.multiply(values.detach(), pattern, panels, len(tokens), shift, transposed=False)

    result: Tensor = _Meet.apply(of_input, of_values, of_bias, product, products)  # type: ignore[no-untyped-call]
    return result


# torch.compile cannot look into what numba compiles: it takes what is around it.
_uncompiled: Callable[..., Tensor] = torch.compiler.disable(_linear)


class _Input(torch.autograd.Function):
    """Zeros of the packed product's shape, which take no memory; their gradient leads to the input's, ``[T, K]``."""

    @staticmethod
    @override
    def forward(
        ctx: Any, tokens: Tensor, values: Tensor, pattern: CSRPattern, products: Products, shape: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(values)
        ctx.num_tokens, ctx.pattern, ctx.products = len(tokens), pattern, products
        return tokens.new_zeros(()).expand(shape)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (values,) = ctx.saved_tensors
        found = ctx.products.multiply(values, ctx.pattern, gradients[0], ctx.num_tokens, None, transposed=True)
        return found, None, None, None, None


class _Values(torch.autograd.Function):
    """The same zeros, whose gradient leads to the values', ``[nnz]``."""

    @staticmethod
    @override
    def forward(
        ctx: Any, values: Tensor, panels: Tensor, pattern: CSRPattern, products: Products, shape: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(panels)
        ctx.pattern, ctx.products = pattern, products
        return values.new_zeros(()).expand(shape)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (panels,) = ctx.saved_tensors
        return ctx.products.sample(ctx.pattern, gradients[0], panels), None, None, None, None


class _Meet(torch.autograd.Function):
    """The product, whose gradient is packed once for both."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        of_input: Tensor | None,
        of_values: Tensor | None,
        of_bias: Tensor | None,
        product: Callable[[], Tensor],
        products: Products,
    ) -> Tensor:
        ctx.products = products
        return product()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Expected to compute gradients only, but create_graph=True asks for a graph of the backward, which "
                "sparse layers do not have. Use a dense layer for second derivatives, or leave create_graph out."
            )
        of_input, of_values, of_bias = ctx.needs_input_grad[:3]
        packed = ctx.products.pack(gradients[0]) if of_input or of_values else None
        return (
            packed if of_input else None,
            packed if of_values else None,
            gradients[0] if of_bias else None,
            None,
            None,
        )
