"""What does it take to find the weights that the first global pruning keeps, over all ranks of a pipeline?

Two ranks, one core each, 100 million float32 weights: the attention and MLP matrices of 8 blocks of width 1024, the
layers of different scale. 47.97 % of all weights are to be kept, as at the first pruning of the default schedule, when
every weight is still there. Variants that take turns within one run, from one barrier to the next:

* `radix`: `select_largest`, which adds up counts of magnitudes over the ranks, and returns the masks.
* `gather`: `select_largest_by_gathering`, the paper's way, with the k of the whole model: each rank sends its largest
  magnitudes to the first, which finds the threshold. It is spared the indices that the paper sends back.
* `abs_max`: `weight.abs().max()` of each weight, one pass as one writes it.
* `read`: `torch.aminmax` of each weight, which allocates nothing: as fast as memory can be read.

The two searches must return equal masks. `gather_over_radix`, `radix_over_abs_max` and `radix_over_read` are medians
over rounds of the quotient of two times. `radix_bytes` and `gather_bytes` are what the operating system says that a
rank sent over all of its connections during one search and the barrier after it, for the rank that sent most;
`radix_bytes_over_50_kb` is the largest of them over 50,000. This needs Linux.

`--null` lets all four variants be `radix`: all three quotients of times must be 1.00 +- 0.05. `--quick` takes a quarter
of the weights.
"""

from __future__ import annotations

import argparse
import os
import socket
import stat
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
import torch.distributed as dist
from harness import Rounds, ratio, run, table
from torch import Tensor

from lightning_dynmo.pipeline import PipelineGroups, create_groups, select_largest, select_largest_by_gathering
from lightning_dynmo.planning import CubicSparsity, num_kept

NUM_RANKS = 2
NUM_BLOCKS, WIDTH, QUICK_WIDTH = 8, 1024, 512
SPREAD = 0.4  # of the blocks' scales around 1
ROUNDS, BUDGET_S, QUICK_BUDGET_S = 7, 150.0, 20.0
MOST_BYTES = 50_000
COLUMNS = ("round", "radix_ms", "gather_ms", "abs_max_ms", "read_ms", "radix_bytes", "gather_bytes")
_BYTES_SENT = 200  # where linux/tcp.h has tcpi_bytes_sent

Variant = Callable[[], Mapping[str, Tensor]]


class Searches:
    """This rank's weights, and what is done with them.

    Args:
        groups: Process groups of this rank.
        width: Width of the blocks.
    """

    def __init__(self, groups: PipelineGroups, width: int) -> None:
        shapes = {"attention.qkv": (3, 1), "attention.out": (1, 1), "mlp.up": (4, 1), "mlp.down": (1, 4)}
        self._groups = groups
        self._order = [f"blocks.{block}.{name}.weight" for block in range(NUM_BLOCKS) for name in shapes]
        self._weights = {}
        for block in range(NUM_BLOCKS):
            if block * NUM_RANKS // NUM_BLOCKS == groups.pp_rank:
                scale = 0.02 * (1 + SPREAD * (2 * block / (NUM_BLOCKS - 1) - 1))
                for name, (rows, columns) in shapes.items():
                    weight = torch.randn(rows * width, columns * width) * scale
                    self._weights[f"blocks.{block}.{name}.weight"] = weight
        self.size = 12 * width**2 * NUM_BLOCKS
        schedule = CubicSparsity()
        step = int(schedule.steps_until_pruning(0))
        self.num_kept = num_kept(self.size, schedule.sparsity(step))

    def radix(self) -> dict[str, Tensor]:
        return select_largest(self._weights, self._order, self.num_kept, self._groups)

    def gather(self) -> dict[str, Tensor]:
        return select_largest_by_gathering(self._weights, self._order, self.num_kept, self._groups)

    def abs_max(self) -> dict[str, Tensor]:
        return {name: weight.abs().max() for name, weight in self._weights.items()}

    def read(self) -> dict[str, Tensor]:
        return {name: torch.stack(torch.aminmax(weight)) for name, weight in self._weights.items()}


def measure(variant: Variant) -> tuple[float, int, Mapping[str, Tensor]]:
    """Returns the seconds of a call on all ranks, the bytes of the rank that sent most, and this rank's result."""
    dist.barrier()
    sent = bytes_sent()
    begin = time.perf_counter()
    found = variant()
    dist.barrier()
    seconds = time.perf_counter() - begin
    most = torch.tensor(bytes_sent() - sent)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return seconds, int(most), found


def bytes_sent() -> int:
    """Returns the bytes that this process has sent so far over the connections that it has."""
    total = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # such as the listing itself, closed by now
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as connection:
                    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
                    total += struct.unpack_from("Q", information, _BYTES_SENT)[0]
    return total


def main(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    groups = create_groups(NUM_RANKS, 1, torch.device("cpu"))
    searches = Searches(groups, QUICK_WIDTH if arguments.quick else WIDTH)
    variants = [searches.radix, searches.gather, searches.abs_max, searches.read]
    if arguments.null:
        variants = [searches.radix] * len(variants)
    for variant in variants:
        variant()
    rows = []
    for index in Rounds(ROUNDS, QUICK_BUDGET_S if arguments.quick else BUDGET_S):
        measured = [measure(variant) for variant in variants]
        (_, radix_bytes, masks), (_, gather_bytes, others) = measured[:2]
        assert all(torch.equal(mask, others[name]) for name, mask in masks.items()), "the two searches differ"
        rows.append((index, *(seconds for seconds, _, _ in measured), radix_bytes, gather_bytes))
    if dist.get_rank() == 0:
        report(searches, rows, arguments.null)
    dist.barrier()
    dist.destroy_process_group()


def report(searches: Searches, rows: list[tuple[int, float, float, float, float, int, int]], null: bool) -> None:
    print(f"{searches.size:,} weights on {NUM_RANKS} ranks, {searches.num_kept:,} are kept\n")
    print(table("Searches", COLUMNS, rows))
    print(ratio("gather_over_radix", statistics.median(row[2] / row[1] for row in rows)))
    print(ratio("radix_over_abs_max", statistics.median(row[1] / row[3] for row in rows)))
    print(ratio("radix_over_read", statistics.median(row[1] / row[4] for row in rows)))
    if not null:
        print(ratio("radix_bytes_over_50_kb", max(row[5] for row in rows) / MOST_BYTES))


if __name__ == "__main__":
    run(main, __doc__, NUM_RANKS)
