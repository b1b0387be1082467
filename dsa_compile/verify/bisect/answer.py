"""An answer to a prompt, and how far two of them may differ."""

from dataclasses import dataclass

from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.verify.bisect.runtime_scenes import Tokens


@dataclass(frozen=True)
class Answer:
    """Tokens that followed a prompt, and what else was likely."""

    tokens: Tokens
    logprobs: tuple[TokenLogprobs, ...]

    @classmethod
    def of(cls, output: RequestOutput) -> "Answer":
        """Answer that an engine returned."""
        return cls(tuple(output.token_ids), tuple(output.logprobs or ()))

    def difference(self, other: "Answer", limit: float) -> str:
        """First difference of ``other``, perhaps without log-probabilities, beyond rounding.

        Two answers may part where the two likeliest tokens are closer than the limit. The text is
        empty if they differ nowhere.
        """
        if len(other.tokens) != len(self.tokens):
            return f"{len(other.tokens)} tokens for {len(self.tokens)}"
        for place, (token, mine) in enumerate(zip(other.tokens, self.logprobs, strict=True)):
            if mine.token_id != token:
                if _gap(mine) <= 2 * limit:
                    return ""
                return f"token {place + 1} is {token}, not {mine.token_id}"
            theirs = other.logprobs[place].logprob if other.logprobs else mine.logprob
            off = abs(mine.logprob - theirs)
            if not off <= limit:
                return f"log-probability of token {place + 1} is off by {off:.1e}"
        return ""


def _gap(likely: TokenLogprobs) -> float:
    best = [value for _, value in likely.top]
    return best[0] - best[1] if len(best) > 1 else float("inf")
