"""One token for each row of logits, from one request to a full decode step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dsa_compile.kernels.cuda.sample_tokens import OPTIONS, sample_tokens
from dsa_compile.measure.case import Call, Case, Plan

ROWS = (1, 16, 64, 256)
VOCABULARIES = (129_280, 154_880)
"""Vocabulary sizes of DeepSeek-V3.2 and GLM-5."""
SPREAD = 3.0
"""Standard deviation of the logits."""
FEWEST_JUDGED = 16
"""Rows from which on their mean log-probability is held to what a fair draw gives."""
MOST_DEVIATIONS = 6.0
EDGE = 1e-4
"""Mass by which fp32 sums over a vocabulary may move the edge of top-p."""
_COPIES_BYTES = 100 << 20  # logits come warm from the product that made them, but not all of them


@dataclass(frozen=True)
class Draw:
    """Sampling parameters of each row; the defaults keep every token.

    Args:
        temperature: 0 takes the likeliest token.
        top_k: how many of the likeliest tokens are kept; 0 keeps all.
        top_p: mass that the likeliest tokens that are kept reach.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


DRAWS: Mapping[str, Draw] = {
    "greedy": Draw(temperature=0.0),
    "temperature": Draw(temperature=0.7),
    "top-k": Draw(temperature=0.7, top_k=50),
    "top-p": Draw(temperature=0.7, top_p=0.95),
}


def plans() -> Iterator[Plan]:
    """Plans by option, vocabulary and number of rows."""
    for name, draw in DRAWS.items():
        for vocab in VOCABULARIES:
            for rows in ROWS:
                make = partial(_random_case, rows, vocab, draw)
                yield Plan(f"sampling, {name}", f"{rows:,}×{vocab:,}", make)


def _random_case(rows: int, vocab: int, draw: Draw) -> Case:
    copies = max(1, min(4, _COPIES_BYTES // (rows * vocab * 4)))
    return case(
        [torch.empty(rows, vocab, device="cuda").normal_(std=SPREAD) for _ in range(copies)], draw
    )


def case(copies: Sequence[Tensor], draw: Draw) -> Case:
    """Sampling from copies of fp32 logits ``[N, V]``, by the kernel and by torch's operations.

    ``torch`` ends in its multinomial, which checks the probabilities before it draws;
    ``torch/race`` divides them by exponential numbers and takes the largest quotient, unchecked.
    """
    rows, vocab = copies[0].shape
    on_gpu = copies[0].is_cuda
    # As a step has them: options and tokens in pinned memory, the last tokens on the device.
    options = torch.from_numpy(_records(rows, vocab, draw).view(np.uint8))
    tokens = torch.empty(rows, dtype=torch.int64, pin_memory=on_gpu)
    options = options.pin_memory() if on_gpu else options
    last = torch.zeros(rows, dtype=torch.int64, device=copies[0].device)

    def ours(logits: Tensor) -> Tensor:
        sample_tokens(logits, options, last, tokens)
        return tokens

    def calls(sample: Callable[[Tensor], Tensor]) -> Sequence[Call]:
        return [partial(sample, logits) for logits in copies]

    candidates = {"cuda": calls(ours)}
    if draw.temperature == 0:
        candidates["torch"] = calls(lambda logits: logits.argmax(1))
    else:
        candidates["torch"] = calls(lambda logits: _by_torch(logits, draw, _multinomial))
        candidates["torch/race"] = calls(lambda logits: _by_torch(logits, draw, _race))
    return Case(candidates, _check(copies[0], draw), bytes=4.0 * rows * vocab)


def _records(rows: int, vocab: int, draw: Draw) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    records = np.zeros(rows, OPTIONS)
    records["row"] = records["seed"] = np.arange(rows)
    records["top_k"] = draw.top_k or vocab
    records["temperature"] = draw.temperature
    records["floor"] = -math.inf
    records["top_p"] = 0 if draw.top_p == 1 else int(draw.top_p * 2.0**64)
    return records


def _multinomial(probabilities: Tensor) -> Tensor:
    return probabilities.multinomial(1)


def _race(probabilities: Tensor) -> Tensor:
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1, keepdim=True)


def _by_torch(logits: Tensor, draw: Draw, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Tokens ``[N]``, drawn as a few lines of torch do it."""
    scaled = logits / draw.temperature
    if draw.top_k:
        scaled, ids = scaled.topk(draw.top_k)
        return ids.gather(1, choose(scaled.softmax(1)))[:, 0]
    probabilities = scaled.softmax(1)
    if draw.top_p == 1:
        return choose(probabilities)[:, 0]
    ordered, ids = probabilities.sort(1, descending=True)
    before = ordered.cumsum(1) - ordered
    return ids.gather(1, choose(ordered.masked_fill_(before >= draw.top_p, 0.0)))[:, 0]


def _check(logits: Tensor, draw: Draw) -> Callable[[Tensor], str | None]:
    """Check of tokens ``[N]`` that refuses ones not kept, and too likely or unlikely ones."""
    vocab = logits.shape[1]

    def check(tokens: Tensor) -> str | None:
        tokens = tokens.to(logits.device)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            return "tokens outside the vocabulary"
        if draw.temperature == 0:
            return None if torch.equal(tokens, logits.argmax(1)) else "not the likeliest tokens"
        # A row at a time: in fp64, all of them would take gigabytes.
        judged = [_judge(row, int(at), draw) for row, at in zip(logits, tokens, strict=True)]
        if any(each is None for each in judged):
            return "a token that is not kept"
        surprise, variance = (sum(values) for values in zip(*filter(None, judged), strict=True))
        deviations = surprise / math.sqrt(variance)
        if len(judged) >= FEWEST_JUDGED and abs(deviations) > MOST_DEVIATIONS:
            return f"log-probabilities are {deviations:.1f} standard deviations from a fair draw's"
        return None

    return check


def _judge(logits: Tensor, token: int, draw: Draw) -> tuple[float, float] | None:
    """A token's log-probability less the mean of a fair draw, and that draw's variance.

    None if the token is not kept.
    """
    logs = (logits.double() / draw.temperature).log_softmax(0)
    own = logs[token]
    ordered = logs.sort(descending=True).values
    before = ordered.exp().cumsum(0) - ordered.exp()
    kept = before < draw.top_p
    if draw.top_k:
        kept[draw.top_k :] = False
    place = int((ordered > own).sum())
    if (draw.top_k and place >= draw.top_k) or float(before[place]) >= draw.top_p + EDGE:
        return None
    ordered = ordered[kept]
    shares = ordered.softmax(0)
    mean = (shares * ordered).sum()
    return float(own - mean), float((shares * (ordered - mean).square()).sum())
