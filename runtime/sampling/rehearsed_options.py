"""The kernels of options that change or describe logits, launched on tensors without memory.

Loading notes the launches down and makes the kernels ready, for the first request with such options
not to stall a step.
"""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.sample_tokens import MOST_TOKENS
from dsa_compile.kernels.sampling_layout import ROW_OPTIONS, words
from dsa_compile.runtime.sampling.changed_rows import change_rows, store_seen
from dsa_compile.runtime.sampling.logprobs import row_logprobs


def launch_option_kernels(vocab_size: int) -> None:
    """Launch each in every way in which steps launch it.

    Args:
        vocab_size: V; beyond what the device samples from, nothing is launched.
    """
    if vocab_size > MOST_TOKENS:
        return

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    entries = empty(2), empty(2), empty(2)
    seen, last = empty(2, vocab_size, dtype=torch.int16), empty(2, dtype=torch.int64)
    records, bitmasks = empty(2, words(ROW_OPTIONS)), empty(1, -(-vocab_size // 32))
    out = empty(2, vocab_size, dtype=torch.float32)
    store_seen(seen, *entries)
    for dtype in (torch.float32, torch.bfloat16):
        logits = empty(2, vocab_size, dtype=dtype)
        change_rows(logits, records, seen, last, bitmasks, entries, out)
        row_logprobs(logits, entries[0], entries[1], last, 1)
