"""Counts of tokens, as the API reports them."""

from collections.abc import Iterable, Sequence
from typing import Any

from dsa_compile.server.choice import Choice
from dsa_compile.server.openai_types import StreamOptions


def usage(
    prompts: Iterable[Sequence[int]], choices: Sequence[Choice], reasoning: int | None = None
) -> dict[str, Any]:
    """The ``usage`` of an answer.

    Args:
        prompts: token ids, each counted once however many answers it has.
        choices: of all prompts.
        reasoning: how many of the generated tokens are reasoning, where that is known.
    """
    prompt = sum(len(ids) for ids in prompts)
    generated = sum(choice.num_tokens for choice in choices)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": max(c.cached_tokens for c in choices)},
    }
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def chunk_usage(
    options: StreamOptions | None, choice: Choice, reasoning: int | None = None
) -> dict[str, Any]:
    """The ``usage`` of a chunk with text: None or that of its choice so far, if there is one."""
    if options is not None and options.continuous_usage_stats:
        return {"usage": usage([choice.prompt], [choice], reasoning)}
    return {"usage": None} if options is not None and options.include_usage else {}
