"""From which sparsity on is a linear layer faster without its zeros?

One layer's whole step: forward, the gradients of input and weight, and all packing. Weights are random and pruned by
magnitude to 50..99 %.

* `dense`: ``nn.Linear`` with the zeros in place.
* `sparse`: ``csr_linear`` on the kept entries: on a CPU by numba where it is installed; on a GPU by the Triton kernels,
  which are compared with ``torch.sparse`` too (`product_<dtype>_<percent>_library`).
* `auto`: what `faster_execution` picks by times that `time_executions` has measured at the start.

On a CPU, two processes measure at once, each with one thread on a core of its own, as the ranks of a pipeline are. The
variants take turns in each round; the shortest time of each counts, of the slower process.
`step_<percent>_dense_over_sparse` is the dense layer's time over the sparse one's for 4096x1024, where in float32 at
least 1.1 is expected at 75 %, 2.0 at 90 % and 2.8 at 95 %. `auto_worst` is the dense layer's time over that of the
variant picked, in the worst case of all; at least 0.95 is expected. On a GPU the products alone are shown as well,
forward, without packing, and `product_<dtype>_<percent>` is cuBLAS over the kernel: expected are 1.3 at 90 % and 2.5 at
95 % in float32, 1.0 at 98 % in bfloat16.

`--null` runs the dense layer in the sparse one's place: all ratios must be 1.00 +- 0.05. `--quick` runs fewer shapes,
sparsities and rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from harness import FEWEST_ROUNDS, arguments_of, ratio, run, table
from torch import Tensor
from torch.nn import functional as F

from lightning_dynmo.nn.csr import CSRPattern
from lightning_dynmo.nn.csr_linear import csr_linear, faster_execution, time_executions

STATED = (4096, 1024)
SHAPES = (STATED, (1024, 4096))
SPARSITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99)
QUICK_SPARSITIES = (0.5, 0.75, 0.9, 0.95)
CPU_TOKENS, GPU_TOKENS = 512, 4096
NUM_RANKS = 2
ROUNDS = 15
BUDGET_S, QUICK_BUDGET_S = 8.0, 4.0  # of each row
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    shape: tuple[int, int]
    sparsity: float
    pattern: CSRPattern
    values: Tensor
    x: Tensor
    gradient: Tensor


def make_case(shape: tuple[int, int], sparsity: float, num_tokens: int, like: Tensor) -> Case:
    """Prunes a random weight by magnitude."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    count = round(weight.numel() * (1 - sparsity))
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[weight.flatten().abs().topk(count).indices] = True
    pattern = CSRPattern.from_mask(mask.reshape(shape).to(like.device))
    values = pattern.gather(weight.to(like)).requires_grad_()
    x = torch.randn(num_tokens, shape[1]).to(like).requires_grad_()
    return Case(shape, sparsity, pattern, values, x, torch.randn(num_tokens, shape[0]).to(like))


def steps_of(case: Case, null: bool) -> dict[str, Run]:
    """Returns the whole step, dense and sparse."""
    dense = case.pattern.scatter(case.values.detach()).requires_grad_()

    def dense_step() -> object:
        return torch.autograd.grad(F.linear(case.x, dense), [case.x, dense], case.gradient)

    def sparse_step() -> object:
        output = csr_linear(case.x, case.values, case.pattern)
        return torch.autograd.grad(output, [case.x, case.values], case.gradient)

    return {"dense": dense_step, "sparse": dense_step if null else sparse_step}


def products_of(case: Case, null: bool) -> dict[str, Run]:
    """Returns the product alone, by cuBLAS, torch.sparse and the kernel."""
    from lightning_dynmo import _kernels

    pattern, values = case.pattern, case.values.detach()
    dense, columns = pattern.scatter(values), case.x.detach().t().contiguous()
    matrix = torch.sparse_csr_tensor(pattern.row_offsets, pattern.columns.int(), values, pattern.shape)

    def kernel() -> object:
        indices = pattern.row_offsets, pattern.columns
        return _kernels.spmm(values, *indices, columns, pattern.shape[0], tasks=pattern.tasks)

    runs: dict[str, Run] = {"dense": lambda: dense @ columns, "library": lambda: matrix @ columns}
    return {**runs, "sparse": runs["dense"] if null else kernel}


def shortest(runs: dict[str, Run], device: torch.device, budget_s: float) -> dict[str, float]:
    """Returns the shortest time of each, in seconds, over rounds in which they take turns."""
    seconds = dict.fromkeys(runs, float("inf"))
    begin = time.perf_counter()
    for index in range(ROUNDS + 1):
        if index > FEWEST_ROUNDS and slowest({"": time.perf_counter() - begin})[""] > budget_s:
            break
        for name, step in runs.items():
            taken = seconds_of(step, device)
            if index:  # the first round compiles and allocates
                seconds[name] = min(seconds[name], taken)
    return slowest(seconds)


def slowest(seconds: dict[str, float]) -> dict[str, float]:
    """Returns the longest of the ranks' times of each."""
    if not dist.is_initialized():
        return seconds
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(seconds, times.tolist(), strict=True))


def seconds_of(step: Run, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop) / 1e3


def measure_steps(cases: list[Case], null: bool, budget_s: float) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for case in cases:
        num_tokens, device = len(case.x), case.x.device
        picked = faster_execution(slowest(time_executions(case.pattern, case.values, num_tokens)))
        seconds = shortest(steps_of(case, null), device, budget_s)
        auto = "sparse" if picked == "csr" else "dense"
        shape = "x".join(map(str, case.shape))
        dtype = str(case.x.dtype).removeprefix("torch.")
        rows.append((shape, dtype, num_tokens, percent(case), seconds["dense"], seconds["sparse"], auto, seconds[auto]))
    return rows


def report_products(cases: list[Case], null: bool, budget_s: float) -> None:
    rows = []
    for case in cases:
        seconds = shortest(products_of(case, null), case.x.device, budget_s)
        rows.append((str(case.x.dtype).removeprefix("torch."), percent(case), *seconds.values()))
    columns = ("dtype", "percent", "dense_ms", "library_ms", "sparse_ms")
    print(table("Products, forward, 4096x1024, without packing", columns, rows))
    for dtype, percents, dense_s, library_s, sparse_s in rows:
        print(ratio(f"product_{dtype}_{percents}", dense_s / sparse_s))
        print(ratio(f"product_{dtype}_{percents}_library", library_s / sparse_s))


def percent(case: Case) -> str:
    return f"{case.sparsity * 100:g}"


def main(arguments: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    device, num_tokens = torch.device("cuda" if on_gpu else "cpu"), GPU_TOKENS if on_gpu else CPU_TOKENS
    torch.set_float32_matmul_precision("highest")
    budget_s = QUICK_BUDGET_S if arguments.quick else BUDGET_S
    shapes, sparsities = (SHAPES[:1], QUICK_SPARSITIES) if arguments.quick else (SHAPES, SPARSITIES)

    def cases(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> list[Case]:
        like = torch.empty(0, dtype=dtype, device=device)
        return [make_case(shape, sparsity, num_tokens, like) for shape in shapes for sparsity in sparsities]

    rows = measure_steps(cases(shapes, torch.float32), arguments.null, budget_s)
    if not on_gpu:
        first = dist.get_rank() == 0
        dist.destroy_process_group()
        if not first:
            return
    where = torch.cuda.get_device_name() if on_gpu else f"{NUM_RANKS} processes, a core each"
    print(f"{where}; at most {ROUNDS} rounds, the shortest time of each")
    columns = ("shape", "dtype", "tokens", "percent", "dense_ms", "sparse_ms", "auto", "auto_ms")
    print("\n" + table("Steps, forward and both gradients", columns, rows))
    if on_gpu:
        for dtype in (torch.float32, torch.bfloat16):
            report_products(cases((STATED,), dtype), arguments.null, budget_s)
    stated = "x".join(map(str, STATED))
    for shape, _, _, percents, dense_s, sparse_s, *_ in rows:
        if shape == stated:
            print(ratio(f"step_{percents}_dense_over_sparse", dense_s / sparse_s))
    print(ratio("auto_worst", min(row[4] / row[7] for row in rows)))


if __name__ == "__main__":
    if torch.cuda.is_available():
        main(arguments_of(__doc__))
    else:
        run(main, __doc__, NUM_RANKS)
