"""Binding of a kernel to each op of a program, and why another was not taken."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsa_compile.artifact.records import KernelRecord
from dsa_compile.common.names import hint
from dsa_compile.errors import CompileError, UserError
from dsa_compile.ir.match import arguments
from dsa_compile.ir.program import Program
from dsa_compile.kernels.facts import CallFacts, facts_of
from dsa_compile.kernels.implementation import Implementation
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.kernels.registry import implementations
from dsa_compile.ops import STREAM_OPS


@dataclass(frozen=True)
class Candidate:
    """One implementation that was considered.

    Attributes:
        implementation: as the registry lists it.
        bound: whether it was taken.
        reason: why it was taken or left, to read.
    """

    implementation: Implementation
    bound: bool
    reason: str


@dataclass(frozen=True)
class Binding:
    """The choice for one op.

    Attributes:
        op: full name, such as ``"dsa.rms_norm.default"``.
        calls: how many nodes call it.
        candidates: everything considered, in order of preference.
    """

    op: str
    calls: int
    candidates: tuple[Candidate, ...]

    def records(self) -> tuple[KernelRecord, ...]:
        """Records of providers in ascending order of tokens, the last for any number of them.

        One that the user requested is the last whatever number it is preferred up to.
        """
        bound = [c.implementation for c in self.candidates if c.bound]
        return tuple(
            KernelRecord(kernel.provider, None if kernel is bound[-1] else kernel.max_tokens)
            for kernel in bound
        )


def bind_kernels(program: Program) -> tuple[Binding, ...]:
    """Choose an implementation for every ``dsa`` op of a program, in alphabetical order.

    A program that stopped early is for reading: nothing is bound.

    Raises:
        CompileError: an op that nothing available implements for the target, with every reason.
        UserError: the user requested a provider that cannot be had.
    """
    config = program.config
    if config.stop_after:
        return ()
    sites: dict[str, list[CallFacts]] = defaultdict(list)
    for region in program.regions.values():
        for node in region.graph.nodes:
            if node.target in STREAM_OPS:
                continue  # the runtime's own
            if node.op == "call_function" and str(node.target).startswith("dsa."):
                args = arguments(node)[1]
                facts = facts_of(f"{region.name}: {node.name}", node.target, args)
                sites[str(node.target)].append(facts)
    asked = _asked(config.kernels, sites)
    return tuple(
        _bind(name, calls, config.target, asked.get(_short(name)))
        for name, calls in sorted(sites.items())
    )


def _bind(name: str, calls: Sequence[CallFacts], target: str, asked: str | None) -> Binding:
    candidates: list[Candidate] = []
    covered = 0.0  # tokens up to which an implementation has been found
    taken = ""  # the last of them
    for kernel in implementations(_short(name), target):
        problem = _problem(kernel, calls, asked)
        if problem is None and covered == float("inf"):
            problem = f"{taken} is preferred" if asked is None else "listed twice"
        limit = float("inf") if kernel.max_tokens is None or asked else kernel.max_tokens
        if problem is None and limit <= covered:
            problem = f"{taken} is preferred up to {covered:.0f} tokens"
        if problem is not None:
            candidates.append(Candidate(kernel, False, problem))
            continue
        covered, taken = limit, kernel.provider
        candidates.append(Candidate(kernel, True, kernel.note))
    if covered != float("inf"):
        reasons = "; ".join(f"{c.implementation.provider}: {c.reason}" for c in candidates)
        some = f" beyond {covered:.0f} tokens" if covered else ""
        raise CompileError(
            f"{_short(name)}: nothing implements it{some} for target {target}"
            + (f" ({reasons})" if reasons else "")
            + "; compile with another --recipe or --target"
        )
    return Binding(name, len(calls), tuple(candidates))


def _problem(kernel: Implementation, calls: Sequence[CallFacts], asked: str | None) -> str | None:
    if asked is not None and kernel.provider != asked:
        return f"--kernel {kernel.op}={asked} was given"
    for call in calls:
        if refusal := kernel.refusal(call):
            return f"{refusal} ({call.site})"
    provider = PROVIDERS[kernel.provider]
    # Our own run wherever the artifact does; the compiling machine need not have a GPU's packages.
    if provider.peer and asked is None and (missing := provider.missing()):
        return missing
    return None


def _asked(kernels: Sequence[str], present: Iterable[str]) -> dict[str, str]:
    asked = {}
    ops = sorted(_short(name) for name in present)
    for text in kernels:
        op, _, provider = text.partition("=")
        if op not in ops:
            raise UserError(
                f"--kernel {text}: the program has no op {op!r}{hint(op, ops, 'it has')}"
            )
        asked[op] = provider
    return asked


def _short(name: str) -> str:
    return name.split(".")[1]
