"""Sampling state, completion and transcript of a request, beside its place in the schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.outputs import Completion, RequestOutput, Transcript
from dsa_compile.runtime.sampling.sampler import SamplingState
from dsa_compile.runtime.scheduling.request import Request


@dataclass(slots=True, eq=False)
class Generation:
    """Generation of one request: its sampling options, its end, and its tokens so far."""

    sampling: SamplingState
    completion: Completion
    transcript: Transcript

    def keep(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> None:
        """Note the tokens of a step, as far as the scheduler gave them to ``request``."""
        known = self.transcript.token_ids
        kept = request.num_tokens - request.prompt_len - len(known)
        if kept < len(tokens):
            tokens, logprobs = tokens[:kept], logprobs[:kept]
        known += tokens
        for token in tokens:
            self.sampling.append(token)
        if logprobs and self.transcript.logprobs is not None:
            self.transcript.logprobs += logprobs

    def keep_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Note log-probabilities of the next tokens of the prompt."""
        assert self.transcript.prompt_logprobs is not None
        self.transcript.prompt_logprobs += logprobs

    def output(self, request: Request) -> RequestOutput:
        """Output of ``request`` so far."""
        reason = request.finish_reason
        if reason is not None and self.completion.finish_reason is None:
            self.completion.finish(reason)  # not ended by its tokens
        return self.transcript.output(
            request.request_id, reason, request.error, request.cached_tokens, request.scheduled_at
        )
