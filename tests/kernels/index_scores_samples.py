"""Paged index caches of several requests, for the kernels that score them."""

import torch


def batch(counts, contexts, block_size):
    """Block tables in shuffled order, bounds with two rows of padding behind, and all pages."""
    blocks = [-(-n // block_size) for n in contexts]
    pages = torch.randperm(sum(blocks) + 1)[: sum(blocks)].int()
    tables = torch.full((len(counts), max([1, *blocks])), -1, dtype=torch.int32)
    for r, part in enumerate(pages.split(blocks) if blocks else ()):
        tables[r, : len(part)] = part
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    return tables, bounds, torch.tensor(contexts, dtype=torch.int32), sum(blocks) + 1
