"""Random numbers that belong to a step, a layer and a microbatch, not to a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def keyed_randomness(device: torch.device, *key: int) -> Iterator[None]:
    """Seeds torch's generators from `key` for the body and puts their states back afterwards.

    Dropout then draws the same numbers wherever the layer runs, whatever ran before it on that rank; and the ambient
    generators, from which samplers draw, advance alike on all ranks.

    Args:
        device: Device of the computation; its generator is seeded along with the CPU's.
        *key: Whole numbers, such as seed, step, layer and microbatch.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
