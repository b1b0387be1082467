"""Log-probabilities reported with a token, of the model's own distribution."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, before any sampling option.

    Args:
        token_id: the chosen token.
        logprob: its log-probability.
        rank: its place in the distribution; 1 is the likeliest (equals share the best place).
        top: the likeliest (token id, log-probability) pairs, likeliest first; tokens the model
            makes impossible are left out.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
