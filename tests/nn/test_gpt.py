"""The GPT's layers: what they compute, how they start, and that a pipeline can run them."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_dynmo.nn import Block, GPTConfig, Head, Positions, TokenEmbedding, gpt_layers
from lightning_dynmo.nn.gpt import INIT_STD, apply_rotary, rotary_tables

EVERY_KIND_OF_POSITIONS = pytest.mark.parametrize("positions", ["learned", "rotary"])


def tiny_config(positions: Positions = "learned", *, dropout: float = 0.0, num_blocks: int = 2) -> GPTConfig:
    return GPTConfig(
        vocab_size=17,
        context_length=12,
        num_blocks=num_blocks,
        hidden_size=16,
        num_heads=2,
        dropout=dropout,
        positions=positions,
    )


def run(layers: Sequence[nn.Module] | nn.ModuleList, tokens: Tensor) -> Tensor:
    value = tokens
    for layer in layers:
        value = layer(value)
    return value


def first_tokens_seen(tokens: Tensor, layers: nn.ModuleList, changed: int) -> Tensor:
    """Which positions' logits, bool [T], change when the token at one position does."""
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 17
    difference = run(layers, tokens) - run(layers, other)
    return difference.abs().amax(dim=(0, 2)) > 1e-6


class TestForward:
    @EVERY_KIND_OF_POSITIONS
    def test_is_a_chain_of_single_tensors(self, positions: Positions) -> None:
        layers = gpt_layers(tiny_config(positions))

        assert [type(layer) for layer in layers] == [TokenEmbedding, Block, Block, Head]
        assert run(layers, torch.zeros(3, 12, dtype=torch.int64)).shape == (3, 12, 17)

    @EVERY_KIND_OF_POSITIONS
    def test_a_token_changes_itself_and_later_ones_only(self, positions: Positions) -> None:
        torch.manual_seed(0)
        layers = gpt_layers(tiny_config(positions))

        changed = first_tokens_seen(torch.randint(17, (2, 12)), layers, changed=5)

        assert not changed[:5].any()
        assert changed[5:].all()

    def test_the_causality_check_notices_attention_to_the_future(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = F.scaled_dot_product_attention

        def bidirectional(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, is_causal: bool) -> Tensor:
            return attention(query, key, value)

        monkeypatch.setattr(F, "scaled_dot_product_attention", bidirectional)
        torch.manual_seed(0)
        layers = gpt_layers(tiny_config())

        assert first_tokens_seen(torch.randint(17, (2, 12)), layers, changed=5)[:5].any()

    @EVERY_KIND_OF_POSITIONS
    def test_shorter_sequences_give_the_same_logits(self, positions: Positions) -> None:
        torch.manual_seed(0)
        layers = gpt_layers(tiny_config(positions))
        tokens = torch.randint(17, (2, 12))

        torch.testing.assert_close(run(layers, tokens[:, :7]), run(layers, tokens)[:, :7])

    @EVERY_KIND_OF_POSITIONS
    def test_the_order_of_tokens_matters(self, positions: Positions) -> None:
        torch.manual_seed(0)
        layers = gpt_layers(tiny_config(positions))
        tokens = torch.randint(17, (1, 12))
        swapped = tokens[:, [1, 0, *range(2, 12)]]

        assert not torch.allclose(run(layers, tokens)[:, -1], run(layers, swapped)[:, -1], atol=1e-7)

    @EVERY_KIND_OF_POSITIONS
    def test_too_long_a_sequence_is_refused(self, positions: Positions) -> None:
        with pytest.raises(ValueError, match=r"sequence of 13 tokens .* context_length=12"):
            run(gpt_layers(tiny_config(positions)), torch.zeros(1, 13, dtype=torch.int64))

    def test_dropout_acts_in_training_only(self) -> None:
        layers = gpt_layers(tiny_config(dropout=0.5))
        tokens = torch.randint(17, (2, 12))

        assert not torch.equal(run(layers, tokens), run(layers, tokens))
        layers.eval()
        assert torch.equal(run(layers, tokens), run(layers, tokens))


class TestRotary:
    def test_scores_depend_on_distances_only(self) -> None:
        torch.manual_seed(0)
        cos, sin = rotary_tables(num_positions=10, head_size=8)
        query, key = torch.randn(2, 8)
        queries = apply_rotary(query.expand(1, 1, 10, 8), cos, sin)[0, 0]
        keys = apply_rotary(key.expand(1, 1, 10, 8), cos, sin)[0, 0]

        scores = queries @ keys.T  # the same two vectors at all pairs of positions

        for distance in range(-9, 10):
            diagonal = scores.diagonal(distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
        assert not torch.allclose(scores.diagonal(1)[0], scores.diagonal(2)[0], atol=1e-3)

    def test_keeps_lengths_and_the_first_position(self) -> None:
        heads = torch.randn(2, 3, 6, 8)

        rotated = apply_rotary(heads, *rotary_tables(num_positions=6, head_size=8))

        torch.testing.assert_close(rotated.norm(dim=-1), heads.norm(dim=-1))
        assert torch.equal(rotated[:, :, 0], heads[:, :, 0])

    def test_first_pair_turns_by_one_radian_per_position(self) -> None:
        heads = torch.zeros(1, 1, 4, 8)
        heads[..., 0] = 1.0

        rotated = apply_rotary(heads, *rotary_tables(num_positions=4, head_size=8))

        torch.testing.assert_close(rotated[0, 0, :, 0], torch.arange(4.0).cos())
        torch.testing.assert_close(rotated[0, 0, :, 4], torch.arange(4.0).sin())

    def test_keeps_the_dtype(self) -> None:
        tables = rotary_tables(num_positions=4, head_size=8)

        assert apply_rotary(torch.ones(1, 1, 4, 8, dtype=torch.bfloat16), *tables).dtype == torch.bfloat16

    def test_tables_stay_out_of_checkpoints(self) -> None:
        layers = gpt_layers(tiny_config("rotary"))

        assert not [name for name in layers.state_dict() if name.endswith(("cos", "sin"))]
        assert len(list(layers.buffers())) == 4


class TestParameters:
    @EVERY_KIND_OF_POSITIONS
    def test_count(self, positions: Positions) -> None:
        vocab_size, num_tokens, hidden_size = 17, 12, 16
        embedding = vocab_size * hidden_size + (num_tokens * hidden_size if positions == "learned" else 0)
        # Matrices: 3 + 1 for attention, 4 + 4 for the MLP. Vectors: 3 + 1 and 4 + 1 biases, 2 + 2 for the norms.
        block = 12 * hidden_size**2 + 13 * hidden_size
        head = 2 * hidden_size + hidden_size * vocab_size

        layers = gpt_layers(tiny_config(positions))

        assert [sum(p.numel() for p in layer.parameters()) for layer in layers] == [embedding, block, block, head]

    def test_layers_share_no_storage(self) -> None:
        tensors = [t for layer in gpt_layers(tiny_config("rotary")) for t in [*layer.parameters(), *layer.buffers()]]

        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)

    def test_a_seed_decides_the_start(self) -> None:
        def parameters(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return nn.utils.parameters_to_vector(gpt_layers(tiny_config()).parameters())

        assert torch.equal(parameters(1), parameters(1))
        assert not torch.equal(parameters(1), parameters(2))

    def test_starts_as_gpt2(self) -> None:
        torch.manual_seed(0)
        layers = gpt_layers(GPTConfig(num_blocks=8))
        expected_residual_std = INIT_STD / math.sqrt(16)

        for name, parameter in layers.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                assert parameter.std().item() == pytest.approx(expected_residual_std, rel=0.05), name
            elif parameter.dim() >= 2:
                assert parameter.std().item() == pytest.approx(INIT_STD, rel=0.05), name
            else:
                assert torch.equal(parameter, torch.full_like(parameter, 1.0 if "norm.weight" in name else 0.0)), name

    def test_first_loss_is_that_of_a_guess(self) -> None:
        torch.manual_seed(0)
        layers = gpt_layers(GPTConfig(num_blocks=2))
        tokens = torch.randint(256, (4, 33))

        loss = F.cross_entropy(run(layers, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        assert loss.item() == pytest.approx(math.log(256), abs=0.1)


class TestTraining:
    @EVERY_KIND_OF_POSITIONS
    def test_learns_a_repeating_sequence(self, positions: Positions) -> None:
        torch.manual_seed(0)
        layers = gpt_layers(tiny_config(positions))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        tokens = torch.arange(4).repeat(4)[:13].expand(4, 13)
        losses = []
        for _ in range(30):
            loss = F.cross_entropy(run(layers, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        assert losses[0] > 2.5
        assert losses[-1] < 0.3

    @EVERY_KIND_OF_POSITIONS
    def test_every_parameter_gets_a_gradient(self, positions: Positions) -> None:
        layers = gpt_layers(tiny_config(positions))

        run(layers, torch.randint(17, (2, 12))).square().sum().backward()

        assert [name for name, p in layers.named_parameters() if p.grad is None or not p.grad.any()] == []

    def test_forward_changes_no_state(self) -> None:
        layers = gpt_layers(tiny_config("rotary"))
        before = [tensor.clone() for tensor in [*layers.parameters(), *layers.buffers()]]
        random_state = torch.get_rng_state()

        run(layers, torch.randint(17, (2, 12), generator=torch.Generator()))

        assert all(map(torch.equal, before, [*layers.parameters(), *layers.buffers()]))
        assert torch.equal(random_state, torch.get_rng_state())

    @EVERY_KIND_OF_POSITIONS
    def test_runs_under_autocast(self, positions: Positions) -> None:
        layers = gpt_layers(tiny_config(positions))

        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run(layers, torch.randint(17, (2, 12)))
        logits.float().sum().backward()

        assert logits.dtype == torch.bfloat16


class TestWithoutData:
    """A pipeline asks for the shapes at its borders before it runs anything."""

    @EVERY_KIND_OF_POSITIONS
    def test_meta_device(self, positions: Positions) -> None:
        with torch.device("meta"):
            layers = gpt_layers(tiny_config(positions, dropout=0.1))

        logits = run(layers, torch.zeros(3, 12, dtype=torch.int64, device="meta"))

        assert (logits.shape, logits.dtype, logits.requires_grad) == ((3, 12, 17), torch.float32, True)

    @EVERY_KIND_OF_POSITIONS
    @pytest.mark.parametrize("training", [True, False])
    def test_fake_tensors(self, positions: Positions, training: bool) -> None:
        with FakeTensorMode(), torch.set_grad_enabled(training):
            layers = gpt_layers(tiny_config(positions, dropout=0.1)).train(training)
            logits = run(layers, torch.zeros(3, 12, dtype=torch.int64))

        assert (logits.shape, logits.requires_grad) == ((3, 12, 17), training)


class TestConfig:
    def test_default_is_valid(self) -> None:
        assert GPTConfig().head_size == 32

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_blocks": 0}, r"`num_blocks` must be at least 1, got 0"),
            ({"vocab_size": -1}, r"`vocab_size` must be at least 1, got -1"),
            ({"hidden_size": 130, "num_heads": 4}, r"4 heads for a hidden size of 130; .* use hidden_size=128\."),
            ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\), got 1.0"),
            ({"positions": "relative"}, r"`positions` must be one of \['learned', 'rotary'\], got 'relative'"),
            (
                {"positions": "rotary", "hidden_size": 12, "num_heads": 4},
                r"must be even, got 12 / 4 = 3; .* use hidden_size=16\.",
            ),
        ],
    )
    def test_errors_say_what_to_change(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            GPTConfig(**arguments)  # type: ignore[arg-type]
