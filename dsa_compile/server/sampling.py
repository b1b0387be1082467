"""Sampling parameters of a request, from its fields and the model's defaults."""

from dataclasses import replace

from dsa_compile.errors import RequestError
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.server.errors import bad_request, from_request_error
from dsa_compile.server.openai_types import SamplingFields

_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)


def sampling_params(
    body: SamplingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The parameters of a request.

    Args:
        body: of the request.
        defaults: of what the request leaves open.
        max_tokens: most tokens to generate.
        logprobs: alternatives to report with each token; None reports none.
        prompt_logprobs: likewise with each token of the prompt.
        grammar: of the answer.

    Raises:
        ApiError: a value is outside its range (400).
    """
    given = {name: getattr(body, name) for name in _FIELDS if getattr(body, name) is not None}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    try:
        return replace(
            defaults,
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )
    except RequestError as error:
        raise from_request_error(error) from None


def _token_id(key: str) -> int:
    # At most what any vocabulary needs: int() of a very long text is slow, and refuses the longest.
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise bad_request(f"logit_bias: {key!r:.80} is not a token id", "logit_bias")
    return int(key)
