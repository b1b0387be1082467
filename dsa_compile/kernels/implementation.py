"""One kernel as the registry lists it."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsa_compile.errors import UserError
from dsa_compile.kernels.facts import CallFacts, Condition
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.ops.library import NAMESPACE, SIGNATURES, bad_input

HOPPER = "sm_90a"
BLACKWELL = "sm_100a"
GPUS = (HOPPER, BLACKWELL)


@dataclass(frozen=True)
class Implementation:
    """A provider's function for an op.

    Args:
        op: name without namespace and overload, such as ``"rms_norm"``.
        provider: key of :data:`~dsa_compile.kernels.providers.PROVIDERS`.
        function: ``"module:name"``; imported only where it runs. Takes the op's arguments by
            position and returns what the op returns.
        targets: architectures it is built for.
        conditions: what a call must satisfy.
        max_tokens: preferred for calls of up to so many tokens; None for any number.
        note: what was measured, for those who ask why it was chosen.
        mixed: a host function of Triton's kernels that launches CUDA kernels of ours as well.
        traced: torch.compile makes its kernels when it first runs.
    """

    op: str
    provider: str
    function: str
    targets: tuple[str, ...] = GPUS
    conditions: tuple[Condition, ...] = ()
    max_tokens: int | None = None
    note: str = ""
    mixed: bool = False
    traced: bool = False

    @property
    def launches_cuda(self) -> bool:
        """Whether it launches CUDA kernels of ours."""
        return self.provider == "cuda" or self.mixed

    @property
    def launches_ours(self) -> bool:
        """Whether it launches kernels of ours, in CUDA or Triton, that its arguments' types and
        shapes decide on; a function of torch's products may quantise or rotate behind them."""
        return not PROVIDERS[self.provider].peer and bool(self.function) and not self.traced

    def refusal(self, call: CallFacts) -> str | None:
        """Reason why the implementation does not take a call, or None."""
        for condition in self.conditions:
            if problem := condition(call):
                return problem
        return None

    def load(self) -> Callable[..., Any]:
        """Load the function, behind the check of the op's operands and of its own conditions.

        Raises:
            UserError: its provider is not installed here.
        """
        if problem := PROVIDERS[self.provider].missing():
            raise UserError(f"dsa::{self.op}: {problem}")
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        signature = SIGNATURES.get(getattr(getattr(torch.ops, NAMESPACE), self.op).default)
        return function if signature is None else signature.checked(function, self._check)

    def _check(self, values: Mapping[str, Any]) -> None:
        if problem := self.refusal(CallFacts("", values)):
            raise bad_input(self.op, f"{problem.removeprefix('takes ')} ({self.provider})")
