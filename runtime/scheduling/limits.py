"""Limits of the scheduler, and the check for requests that can never fit in them."""

from dataclasses import MISSING, dataclass, fields

from dsa_compile.errors import OptionValueError, RequestError, UserError


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Args:
        num_blocks: blocks of the caches.
        block_size: tokens of one block.
        max_num_batched_tokens: most tokens one step computes.
        max_num_seqs: most requests one step can hold.
        max_model_len: most tokens, prompt and generated, of one request.
        enable_prefix_caching: reuse the blocks of earlier requests with the same prefix.
        deterministic: what a step computes for a request has the same shapes whatever else runs.
        num_drafts: guesses of further tokens that a step checks for each decoding request; fewer
            where ``max_num_batched_tokens`` has no room for those of ``max_num_seqs`` requests.
        looks_up_drafts: take them from the request's own tokens, see
            :mod:`dsa_compile.runtime.scheduling.prompt_lookup`; steps must not overlap then.
        draft_max_rows: requests that may run for any of them to get drafts; None for all.

    Raises:
        UserError: a limit is not an integer >= 1, or a deterministic step takes less than a block.
    """

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_prefix_caching: bool = True
    deterministic: bool = False
    num_drafts: int = 0
    looks_up_drafts: bool = False
    draft_max_rows: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is MISSING and (type(value) is not int or value < 1):
                raise UserError(f"{field.name} must be an integer >= 1; got {value!r}")
        if self.deterministic and self.max_num_batched_tokens < self.block_size:
            raise OptionValueError(
                "{max_num_batched_tokens}={}: a deterministic engine computes prompts in whole "
                "blocks; use at least {}", self.max_num_batched_tokens, self.block_size,
            )  # fmt: skip

    @property
    def chunk(self) -> int:
        """Tokens between the fixed boundaries at which a deterministic step cuts a prompt."""
        return self.max_num_batched_tokens // self.block_size * self.block_size

    @property
    def decode_tokens(self) -> int:
        """Tokens that a step computes of a decoding request: the last one and drafts.

        The same whatever runs, for decode steps to keep their shape.
        """
        return max(1, min(1 + self.num_drafts, self.max_num_batched_tokens // self.max_num_seqs))

    @property
    def capacity(self) -> int:
        """Tokens the caches hold."""
        return self.num_blocks * self.block_size

    def check_fits(self, request_id: str, prompt_len: int, max_tokens: int) -> None:
        """Check that a request of this size can run when it is alone.

        Raises:
            RequestError: it can never fit; names the limit.
        """
        for limit, name in (
            (self.max_model_len, f"the limit of {self.max_model_len} tokens (max_model_len)"),
            (
                self.capacity,
                f"the cache's {self.capacity} tokens "
                f"({self.num_blocks} blocks of {self.block_size})",
            ),
        ):
            if prompt_len >= limit:
                raise RequestError(
                    f"request {request_id!r}: a prompt of {prompt_len} tokens and one generated "
                    f"token exceed {name}; shorten the prompt"
                )
            if prompt_len + max_tokens > limit:
                raise RequestError(
                    f"request {request_id!r}: {prompt_len} prompt tokens + max_tokens={max_tokens} "
                    f"exceed {name}; use max_tokens <= {limit - prompt_len}"
                )
