"""Index scores that a sparse-attention top-k meets, as named families of random rows.

Each family is called as ``family(rows, columns, generator, device)`` and returns float32 scores
``[rows, columns]`` without NaN. One generator seed gives one tensor. Samples are drawn on the
generator's device, and all other work runs on ``device``; nothing loops over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

TOP_K = 2048
INFINITY = float("inf")
FLOAT_MAX_BITS = 0x7F7FFFFF  # Bit patterns of finite, non-negative floats end here.

Family = Callable[[int, int, torch.Generator, "torch.device | str"], Tensor]


@dataclass(frozen=True)
class Draw:
    """Samples for one call of a family come from here, already on the wanted device."""

    rows: int
    columns: int
    generator: torch.Generator
    device: torch.device | str

    def _sample(self, sampler: Callable[..., Tensor], size: tuple[int, ...], *ends: int) -> Tensor:
        """Samples fill the size, or that of the scores when none is given."""
        place = {"generator": self.generator, "device": self.generator.device}
        samples: Tensor = sampler(*ends, size or (self.rows, self.columns), **place)
        return samples.to(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Normal samples have mean 0 and spread 1."""
        return self._sample(torch.randn, shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform samples lie in [0, 1)."""
        return self._sample(torch.rand, shape)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers (int64) lie in [low, high)."""
        return self._sample(torch.randint, shape, low, high)

    def positions(self) -> Tensor:
        """Positions number the columns from 0."""
        return torch.arange(self.columns, device=self.device)

    def ranks(self) -> Tensor:
        """Ranks give each row the numbers 0 to columns - 1, in one shuffled order rolled by row."""
        order = self.uniform(self.columns).argsort(stable=True)
        roll = self.integers(0, self.columns, self.rows, 1)
        return order[(self.positions() + roll) % self.columns]


Body = Callable[[Draw], Tensor]


def _scores(
    body: Body, rows: int, columns: int, generator: torch.Generator, device: torch.device | str
) -> Tensor:
    """Scores of a body become contiguous float32 of the full shape."""
    scores: Tensor = body(Draw(rows, columns, generator, device)).to(torch.float32)
    return scores.expand(rows, columns).contiguous()


def families(bodies: Mapping[str, Body]) -> dict[str, Family]:
    """Families wrap bodies, so that each takes (rows, columns, generator, device)."""
    return {name: partial(_scores, body) for name, body in bodies.items()}


def from_bits(bits: Tensor) -> Tensor:
    """Bit patterns in [0, 2^31) become the non-negative floats that they encode."""
    return bits.to(torch.int32).view(torch.float32)


def random_signs(draw: Draw, magnitudes: Tensor) -> Tensor:
    """Signs are drawn for the magnitudes, half of them negative."""
    return torch.where(draw.integers(0, 2) == 0, -magnitudes, magnitudes)


def _fp8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Quantisation rounds each vector to e4m3 values under one power-of-two scale."""
    largest = vectors.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
    return (vectors / scale).to(torch.float8_e4m3fn).float(), scale.squeeze(-1)


def _indexer(draw: Draw, *, mixed_signs: bool, drift: float = 0.0) -> Tensor:
    """Indexer scores sum weight * relu(q . k) over 64 heads of e4m3 vectors of size 128.

    Weights come from a linear layer. With drift, later keys move along one direction that every
    head's query holds with the sign of its weight, so recent tokens score higher.
    """
    heads, size, model = 64, 128, 7168
    weights = draw.normal(draw.rows, model) @ (0.02 * draw.normal(model, heads))
    weights = (weights if mixed_signs else weights.abs()) * (heads * size) ** -0.5
    direction = drift * draw.normal(size)
    age = torch.linspace(0.0, 1.0, draw.columns, device=draw.device)
    toward = weights.sign()[..., None] * direction
    queries, query_scale = _fp8(draw.normal(draw.rows, heads, size) + toward)
    keys, key_scale = _fp8(draw.normal(draw.columns, size) + age[:, None] * direction)
    weights = (weights * query_scale)[:, None]
    scores = []
    for chunk in torch.split(keys, 2560):
        products = torch.relu(queries.flatten(0, 1) @ chunk.T)
        scores.append((weights @ products.view(draw.rows, heads, -1)).squeeze(1))
    return torch.cat(scores, dim=1) * key_scale


def _two_clusters(draw: Draw, upper: int) -> Tensor:
    """Clusters at +100 and -100 are narrow, and the upper one has the given number of members."""
    return torch.where(draw.ranks() < upper, 100.0, -100.0) + 1e-3 * draw.normal()


def _ties_at_boundary(draw: Draw) -> Tensor:
    """Ties fill ranks k - 300 to k + 4000 with one value; the others lie above and below it."""
    ranks, noise = draw.ranks(), draw.uniform()
    below = torch.where(ranks < TOP_K + 4000, 1.0, 0.9 * noise)
    return torch.where(ranks < TOP_K - 300, 2.0 + noise, below)


def _constant_runs(draw: Draw, levels: int) -> Tensor:
    """Runs of 333 equal scores take one of few distinct levels each."""
    level = draw.integers(0, levels, draw.rows, draw.columns // 333 + 1)
    return draw.normal(levels)[level].repeat_interleave(333, dim=1)[:, : draw.columns]


def _blocks(draw: Draw) -> Tensor:
    """Blocks of 128 columns have a mean and a spread of their own."""
    block, blocks = draw.positions() // 128, draw.columns // 128 + 1
    mean, spread = 3.0 * draw.normal(draw.rows, blocks), draw.uniform(draw.rows, blocks)
    return mean[:, block] + spread[:, block] * draw.normal()


def _padded(draw: Draw) -> Tensor:
    """Padding of -inf follows each row's own length, which is never under k."""
    lengths = draw.integers(min(TOP_K, draw.columns), draw.columns + 1, draw.rows, 1)
    return torch.where(draw.positions() < lengths, draw.normal(), -INFINITY)


def _log_spaced(draw: Draw) -> Tensor:
    """Powers of two have exponents evenly spaced from -120 to 120."""
    return torch.exp2(120.0 - 240.0 * draw.ranks().double() / draw.columns)


def _normal(mean: float, spread: float) -> Body:
    """Normal scores have the given mean and spread."""
    return lambda draw: mean + spread * draw.normal()


_NORMALS = [(0, 1), (1, 1), (3, 0.5), (10, 1), (25, 4.7), (100, 0.1), (1000, 0.1), (0, 1e-6)]
_NORMALS += [(0, 1000000), (-3, 0.5), (-25, 4.7), (-1000, 0.1)]

SCORE_FAMILIES: dict[str, Family] = families(
    {f"normal_mean{mean}_spread{spread}": _normal(mean, spread) for mean, spread in _NORMALS}
    | {
        "uniform_0_to_1": lambda draw: draw.uniform(),
        "uniform_1_to_1.001": lambda draw: 1.0 + 1e-3 * draw.uniform(),
        "lognormal": lambda draw: torch.exp(draw.normal()),
        "cauchy": lambda draw: torch.tan(torch.pi * (draw.uniform() - 0.5)),
        "exponential": lambda draw: -torch.log1p(-draw.uniform()),
        "heavy_left_tail": lambda draw: -1.0 / (1.0 - draw.uniform()),
        "bimodal_boundary_in_upper": lambda draw: _two_clusters(draw, 3 * TOP_K // 2),
        "bimodal_boundary_in_lower": lambda draw: _two_clusters(draw, TOP_K // 2),
        "indexer_positive_weights": lambda draw: _indexer(draw, mixed_signs=False),
        "indexer_mixed_weights": lambda draw: _indexer(draw, mixed_signs=True),
        "indexer_positive_drift": lambda draw: _indexer(draw, mixed_signs=False, drift=0.3),
        "indexer_mixed_drift": lambda draw: _indexer(draw, mixed_signs=True, drift=0.3),
        "bfloat16_rounded": lambda draw: draw.normal().bfloat16(),
        "sorted_ascending": lambda draw: draw.normal().sort(dim=1).values,
        "sorted_descending": lambda draw: draw.normal().sort(dim=1, descending=True).values,
        "constant_rows": lambda draw: draw.normal(draw.rows, 1),
        "constant_runs_8_values": lambda draw: _constant_runs(draw, 8),
        "constant_runs_256_values": lambda draw: _constant_runs(draw, 256),
        "zeros_positives_under_k": lambda d: torch.where(d.ranks() < TOP_K // 2, d.uniform(), 0.0),
        "zeros_positives_over_k": lambda d: torch.where(d.ranks() < 2 * TOP_K, d.uniform(), 0.0),
        "ties_at_boundary": _ties_at_boundary,
        "denormal": lambda draw: random_signs(draw, from_bits(draw.integers(0, 1 << 23))),
        "huge_mixed_signs": lambda draw: random_signs(
            draw, from_bits(draw.integers(0x7D000000, FLOAT_MAX_BITS + 1))
        ),
        "spikes_over_dense": lambda draw: torch.where(
            draw.ranks() < TOP_K - 1, 1e4 + 100.0 * draw.normal(), 5.0 + 1e-4 * draw.uniform()
        ),
        "blocks_of_different_means": _blocks,
        "low_8_bits_differ": lambda draw: from_bits(0x41200000 + draw.integers(0, 1 << 8)),
        "low_12_bits_differ": lambda draw: -from_bits(0x41200000 + draw.integers(0, 1 << 12)),
        "padding_tail": _padded,
        "log_spaced": _log_spaced,
        "log_spaced_mixed_signs": lambda draw: random_signs(draw, _log_spaced(draw)),
    }
)
