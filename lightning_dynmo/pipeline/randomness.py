"""Random numbers that belong to a step, a layer and a microbatch, not to a rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
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
    seed = _seed_from(key)
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


@contextmanager
def keyed_python_randomness(*key: int) -> Iterator[None]:
    """Does for the generators of Python and numpy what `keyed_randomness` does for torch's, once for a whole step.

    What layers and step methods draw from them, on some ranks only, does not put the ranks' data out of step. The
    numbers themselves depend on where the layers run; torch's do not.
    """
    states = random.getstate(), np.random.get_state()
    seed = _seed_from(key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _seed_from(key: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
