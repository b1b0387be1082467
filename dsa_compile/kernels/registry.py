"""Registry of the implementations of an op for a target, and how to load one.

``dsa-compile --explain-kernels`` prints what :mod:`dsa_compile.kernels.table` gave for a model and
why the others were left.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from torch._ops import OpOverload

from dsa_compile.kernels.facts import CallFacts
from dsa_compile.kernels.implementation import GPUS, Implementation
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.kernels.table import KERNELS
from dsa_compile.ops import FACTS, REFERENCE
from dsa_compile.ops.library import SIGNATURES

__all__ = ["KERNELS", "covered_tokens", "implementations", "is_fallback", "load"]


def implementations(op: str, target: str) -> tuple[Implementation, ...]:
    """Implementations of an op for a target, the preferred first.

    Args:
        op: name without namespace and overload.
        target: ``"cpu"`` or an architecture.
    """
    if target == "cpu":
        return (Implementation(op, "reference", "", ("cpu",)),) if op in _BY_NAME else ()
    found = [k for k in KERNELS if k.op == op and target in k.targets]
    if op in _BY_NAME and FACTS[_BY_NAME[op]].torch_kernels:
        found.append(Implementation(op, "torch", "", GPUS, note="torch's own kernels"))
    return tuple(found)


def is_fallback(kernel: Implementation) -> bool:
    """Whether a kernel is the one that takes what those written for an op do not.

    Such is Triton's of an op that has others, on whatever target.
    """
    others = (other.provider for other in KERNELS if other.op == kernel.op)
    return kernel.provider == "triton" and any(provider != "triton" for provider in others)


def covered_tokens(op: str, target: str, call: CallFacts, asked: str | None = None) -> float:
    """Calls of up to how many tokens get a kernel better than the fallback; 0 for none.

    Args:
        op: name without namespace and overload.
        target: ``"cpu"`` or an architecture.
        call: what is known of it.
        asked: the provider that the user wants, which is then as good as any.
    """
    taking = (
        kernel
        for kernel in implementations(op, target)
        if kernel.refusal(call) is None
        and (kernel.provider == asked or not (is_fallback(kernel) or _absent(kernel)))
    )
    limits = (inf if kernel.max_tokens is None else kernel.max_tokens for kernel in taking)
    return max(limits, default=0)


def _absent(kernel: Implementation) -> bool:
    """Whether it is a peer's that is not installed; our own are where the artifact runs."""
    provider = PROVIDERS[kernel.provider]
    return provider.peer and provider.missing() is not None


def load(op: str, provider: str, target: str) -> Callable[..., Any] | None:
    """The function of an op, or None if this installation does not list that provider for it.

    Raises:
        UserError: the provider is not installed here.
    """
    for kernel in implementations(op, target):
        if kernel.provider == provider:
            return kernel.load() if kernel.function else _checked_reference(_BY_NAME[op])
    return None


def _checked_reference(op: OpOverload) -> Callable[..., Any]:
    function = REFERENCE[op]
    return SIGNATURES[op].checked(function) if op in SIGNATURES else function


_BY_NAME = {str(op).split(".")[1]: op for op in REFERENCE}
