"""Caches of bytes as numbers: the rows and pages of FP8 caches taken apart into what they hold."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ops.quantize import BLOCK, E4M3, block_count
from dsa_compile.verify.execution.exact import WIDE, ExactTensor, numbers

_SCALE_BYTES = 4


@dataclass(frozen=True)
class CacheFormat:
    """The layout of a cache ``[P, bs, W]``.

    Attributes:
        fields: bytes and dtype of each part of a row, or of a page, in order; empty for a cache of
            numbers.
        paged: whether the parts are those of a page, first the values of all rows.
        rank: values of a row that its scales belong to; 0 for one without scales.
    """

    fields: tuple[tuple[int, torch.dtype], ...] = ()
    paged: bool = False
    rank: int = 0

    @classmethod
    def of(cls, key: str, cache: Tensor, spec: ModelSpec) -> "CacheFormat":
        """The format of a cache by its key, dtype and width."""
        if cache.dtype is not torch.uint8:
            return cls()
        _, rows, width = cache.shape
        if key == "index_cache":
            dim = width - _SCALE_BYTES
            return cls(((rows * dim, E4M3), (rows * _SCALE_BYTES, torch.float32)), True, dim)
        rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
        if width == rank + rope:
            return cls(((width, E4M3),))
        scales = _SCALE_BYTES * block_count(rank)
        return cls(((rank, E4M3), (scales, torch.float32), (2 * rope, torch.bfloat16)), False, rank)

    def exact(self, cache: Tensor) -> Tensor:
        """The cache in exact arithmetic: each number once for every byte that it takes."""
        if not self.fields:
            return ExactTensor(cache.to(WIDE), cache.dtype)
        flat = cache.contiguous().view(-1, sum(size for size, _ in self.fields))
        parts = flat.split([size for size, _ in self.fields], -1)
        wide = [
            part.contiguous().view(dtype).to(WIDE).repeat_interleave(dtype.itemsize, -1)
            for part, (_, dtype) in zip(parts, self.fields, strict=True)
        ]
        return ExactTensor(torch.cat(wide, -1).view(cache.shape), cache.dtype)

    def rows(self, cache: Tensor) -> Tensor:
        """fp64 ``[P * bs, N]``, the dequantised numbers of every row.

        Args:
            cache: its bytes, or what :meth:`exact` made of them.
        """
        wide = numbers(cache if isinstance(cache, ExactTensor) else self.exact(cache))
        blocks, count, width = wide.shape
        if not self.fields:
            return wide.reshape(-1, width)
        if self.paged:
            pages = wide.reshape(blocks, -1)
            values = pages[:, : count * self.rank].reshape(-1, self.rank)
            scales = pages[:, count * self.rank :: _SCALE_BYTES].reshape(-1, 1)
            return values * scales
        flat = wide.reshape(-1, width)
        if not self.rank:
            return flat
        starts = list(itertools.accumulate(size for size, _ in self.fields))
        scales = flat[:, starts[0] : starts[1] : _SCALE_BYTES].repeat_interleave(BLOCK, -1)
        return torch.cat(
            (flat[:, : self.rank] * scales[:, : self.rank], flat[:, starts[1] :: 2]), 1
        )

    def bytes_of(self, written: Tensor, cache: Tensor) -> Tensor:
        """bool, as the bytes of a cache: those of the rows ``written``, bool ``[P * bs]``."""
        blocks, count, width = cache.shape
        octets = width * cache.element_size()
        if not self.paged:
            return written[:, None].expand(-1, octets).reshape(-1)
        pages = written.view(blocks, count)
        parts = (self.rank, _SCALE_BYTES)
        return torch.cat([pages.repeat_interleave(n, -1) for n in parts], 1).reshape(-1)
