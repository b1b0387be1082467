"""Random problems for the kernels that change logits and describe rows, on the CPU."""

import numpy as np
import torch

from dsa_compile.kernels.sampling_layout import IN_PROMPT, ROW_OPTIONS


def problem(rows, vocab, dtype=torch.float32, seed=0):
    """Arguments of ``change_rows`` but for ``out``: every option, alone and together."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows + 2, vocab, generator=generator) * 3).to(dtype)
    logits[0, ::7] = -torch.inf
    options = np.zeros(rows, ROW_OPTIONS)
    options["place"] = rng.permutation(rows + 2)[:rows]
    options["row"] = rng.permutation(rows)
    options["pending"] = rng.integers(0, 2, rows)
    options["bitmask"] = np.where(rng.random(rows) < 0.5, rng.integers(0, 3, rows), -1)
    options["repetition"] = np.where(rng.random(rows) < 0.5, 1.0, rng.uniform(0.5, 2.0, rows))
    options["presence"] = rng.uniform(-2, 2, rows)
    options["frequency"] = rng.uniform(-2, 2, rows)
    counts = rng.integers(0, 4, (rows, vocab)) * (rng.random((rows, vocab)) < 0.3)
    counts[0, 0] = 0x7FFF
    prompt = IN_PROMPT * (rng.random((rows, vocab)) < 0.3)
    seen = torch.from_numpy((counts | prompt).astype(np.uint16).view(np.int16))
    last = torch.from_numpy(rng.integers(0, vocab, rows))
    last[0] = 0
    bitmasks = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, -(-vocab // 32)), np.int32))
    entries = np.sort(rng.permutation(rows * vocab)[: rows * vocab // 9])
    amounts = rng.uniform(-100, 100, len(entries)).astype(np.float32)
    amounts[::5] = -np.inf
    bias = (
        torch.from_numpy((entries // vocab).astype(np.int32)),
        torch.from_numpy((entries % vocab).astype(np.int32)),
        torch.from_numpy(amounts.view(np.int32)),
    )
    packed = torch.from_numpy(options.view(np.int32).reshape(rows, -1))
    return logits, packed, seen, last, bitmasks, bias


def entries(rows, vocab, seed=0):
    """Arguments of ``store_seen`` but for ``seen``."""
    rng = np.random.default_rng(seed)
    at = rng.permutation(rows * vocab)[: rows * vocab // 2]
    states = rng.integers(0, 1 << 16, len(at))
    return [torch.from_numpy(a.astype(np.int32)) for a in (at // vocab, at % vocab, states)]


def described(rows, vocab, dtype=torch.float32, seed=0):
    """Arguments of ``row_logprobs`` but for ``top``; bf16 has many equal logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows + 2, vocab, generator=generator) * 3).to(dtype)
    logits[1, 5:] = -torch.inf
    logits[2, ::3] = -0.0
    logits[2, 1::3] = 0.0
    places = torch.randperm(rows + 2, generator=generator)[:rows].int()
    owners = torch.randperm(rows, generator=generator).int()
    return logits, places, owners, torch.randint(0, vocab, (rows,), generator=generator)
