"""The gradient of a sparse weight's values: against float64, on every pattern and type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.triton_kernels.broken import with_mistake
from tests.triton_kernels.patterns import (
    NUM_TOKENS,
    SHAPE,
    TOLERANCES,
    masks,
    pattern_of,
    relative_error,
    require_kernels,
)

DEVICE = require_kernels()

from lightning_dynmo.triton_kernels import sddmm as module  # noqa: E402
from lightning_dynmo.triton_kernels.sddmm import dense_is_faster, sddmm, sddmm_reference  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = list(TOLERANCES)


def operands(dtype: torch.dtype, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    """Returns a gradient and activations."""
    return tuple(torch.randn(rows, num_tokens).to(DEVICE, dtype) for rows in SHAPE)


def error_of(mask: Tensor, dtype: torch.dtype, num_tokens: int = NUM_TOKENS, *, wide=False, dense=False) -> float:
    """Returns the relative error of the kept entries of a product."""
    pattern = pattern_of(mask, DEVICE, wide=wide)
    g, x = operands(dtype, num_tokens)
    actual = sddmm(pattern.row_offsets, pattern.columns, g, x, dense=dense)
    assert actual.dtype == dtype
    return relative_error(actual, (g.double() @ x.double().T)[mask.to(DEVICE)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", masks())
def test_equals_the_dense_product(name: str, dtype: torch.dtype) -> None:
    assert error_of(masks()[name], dtype) <= TOLERANCES[dtype]


@pytest.mark.parametrize("name", masks())
def test_by_a_dense_product_too(name: str) -> None:
    assert error_of(masks()[name], torch.float32, dense=True) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("name", masks())
def test_the_reference_is_exact_in_float64(name: str) -> None:
    mask = masks()[name]
    pattern = pattern_of(mask, DEVICE)
    g, x = operands(torch.float64)
    expected = (g @ x.T)[mask.to(DEVICE)]
    assert relative_error(sddmm_reference(pattern.row_offsets, pattern.columns, g, x), expected) <= 1e-15


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 128])
def test_numbers_of_tokens(num_tokens: int) -> None:
    mask = masks()["empty rows and columns"]
    assert error_of(mask, torch.bfloat16, num_tokens) <= TOLERANCES[torch.bfloat16]


def test_columns_in_32_bits() -> None:
    assert error_of(masks()["rows of all lengths"], torch.float32, wide=True) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8, 9])
def test_each_entry_finds_its_row(num_rows: int) -> None:
    mask = torch.rand(num_rows, 5) < 0.4
    mask[-1, 0] = True
    pattern = pattern_of(mask, DEVICE)
    g = torch.arange(1.0, num_rows + 1, device=DEVICE)[:, None]
    rows = sddmm(pattern.row_offsets, pattern.columns, g, torch.ones(5, 1, device=DEVICE), dense=False)
    assert rows.tolist() == [row + 1 for row, _ in mask.nonzero().tolist()]


def test_two_runs_give_the_same_bits() -> None:
    pattern = pattern_of(masks()["rows of all lengths"], DEVICE)
    g, x = operands(torch.float32)
    runs = [sddmm(pattern.row_offsets, pattern.columns, g, x, dense=False) for _ in range(2)]
    assert torch.equal(*runs)


def test_operands_need_not_be_contiguous() -> None:
    pattern = pattern_of(masks()["rows of all lengths"], DEVICE)
    arguments = [pattern.row_offsets, pattern.columns, *operands(torch.float32)]
    strided = [torch.stack([tensor, -tensor], dim=-1)[..., 0] for tensor in arguments]
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert torch.equal(sddmm(*strided, dense=False), sddmm(*arguments, dense=False))


def test_what_no_entry_names_is_not_read() -> None:
    mask = masks()["empty rows and columns"]
    pattern = pattern_of(mask, DEVICE)
    g, x = operands(torch.float32)
    g[(~mask.any(1)).to(DEVICE)] = torch.nan
    x[(~mask.any(0)).to(DEVICE)] = torch.nan
    assert sddmm(pattern.row_offsets, pattern.columns, g, x, dense=False).isfinite().all()


def test_places_beyond_32_bits() -> None:
    torch.use_deterministic_algorithms(False)  # 4 GiB of memory of which only a few pages are touched
    num_columns = 2**25 + 10
    x = torch.empty(num_columns, 64, dtype=torch.float16, device=DEVICE)
    columns = torch.tensor([3, 2**25 + 5], dtype=torch.int32, device=DEVICE)
    x[columns.long()] = torch.tensor([[1.0], [2.0]], dtype=torch.float16, device=DEVICE)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    g = torch.ones(1, 64, dtype=torch.float16, device=DEVICE)
    assert sddmm(offsets, columns, g, x, dense=False).tolist() == [64, 128]


def test_the_density_decides() -> None:
    assert [dense_is_faster(density, torch.bfloat16) for density in (0.03, 0.031)] == [False, True]
    assert [dense_is_faster(density, torch.float32) for density in (0.15, 0.151)] == [False, True]


@pytest.mark.parametrize(("kept", "calls"), [(2, 1), (3, 0)])
def test_the_kernel_runs_where_it_is_faster(kept: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.zeros(10, 10, dtype=torch.bool)
    mask[0, :kept] = True
    launched = []
    monkeypatch.setattr(module, "config_for", lambda *key: launched.append(key) or {"BLOCK_K": 16, "BLOCK_N": 32})
    monkeypatch.setitem(module._DENSE_ABOVE, torch.float32, 0.025)
    pattern = pattern_of(mask, DEVICE)
    g, x = (torch.randn(10, 8, device=DEVICE) for _ in range(2))
    actual = sddmm(pattern.row_offsets, pattern.columns, g, x)
    assert len(launched) == calls
    assert relative_error(actual, (g @ x.T)[mask.to(DEVICE)]) <= 1e-6


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("range(0, num_tokens, BLOCK_N)", "range(0, num_tokens - BLOCK_N, BLOCK_N)"),
        ("other=0) <= entries", "other=0) < entries"),
        ("in range(num_steps)", "in range(num_steps - 1)"),
        ("tl.where(begun, beyond, middle)", "tl.where(begun, middle, beyond)"),
        ("(tokens < num_tokens)[None, :]", "(tokens < num_tokens - 1)[None, :]"),
        ("tl.program_id(0).to(tl.int64) * BLOCK_K", "0"),
    ],
)
def test_a_wrong_kernel_fails(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks()["rows of all lengths"]
    with with_mistake(module, right, wrong) as broken:
        monkeypatch.setattr(module, "sddmm_kernel", broken.sddmm_kernel)
        assert not error_of(mask, torch.bfloat16) <= TOLERANCES[torch.bfloat16]


def test_errors_say_what_to_change() -> None:
    pattern = pattern_of(masks()["rows of all lengths"], DEVICE)
    indices = (pattern.row_offsets, pattern.columns)
    g, x = operands(torch.float32)
    with pytest.raises(TypeError, match=r"torch.float32, got torch.float16; convert it with x.to\(torch.float32\)"):
        sddmm(*indices, g, x.half())
    with pytest.raises(TypeError, match=r"float32, float16, bfloat16, got float64"):
        sddmm(*indices, g.double(), x.double(), dense=False)
    with pytest.raises(ValueError, match=r"got g .9, 70., x .37, 69.*pass both feature-major"):
        sddmm(*indices, g, x[:, 1:])
    with pytest.raises(RuntimeError, match="call csr_sddmm"):
        sddmm(*indices, g.requires_grad_(), x)
