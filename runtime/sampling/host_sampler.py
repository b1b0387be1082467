"""Sampling on the host, for runners whose logits come there."""

from torch import Tensor

from dsa_compile.runtime.execution.runner import StepInputs, StepTokens
from dsa_compile.runtime.sampling.sampler import Sampler
from dsa_compile.runtime.scheduling.step import Failure


class KnownTokens:
    """Tokens of a step that is over, as :class:`~dsa_compile.runtime.execution.runner.Runner` gives
    them."""

    def __init__(self, tokens: StepTokens) -> None:
        self._tokens = tokens

    def sample(self) -> None:
        """Do nothing: the tokens were chosen."""

    def wait(self) -> StepTokens:
        """The tokens."""
        return self._tokens


class HostSampler:
    """Chooses one token for each request of a step, whatever its options are.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._sampler = Sampler(vocab_size)

    def launch(self, logits: Tensor, inputs: StepInputs) -> KnownTokens:
        """Choose the tokens of a step.

        Args:
            logits: fp32 ``[Y, V]`` on the CPU.
            inputs: the step, without drafts.
        """
        choices = self._sampler.sample(logits, inputs.states)
        results = [
            [choice.token_id] if choice.failed is None else Failure(choice.failed)
            for choice in choices
        ]
        logprobs = {
            place: [choice.logprob]
            for place, choice in enumerate(choices)
            if choice.logprob is not None
        }
        return KnownTokens(StepTokens(results, logprobs))
