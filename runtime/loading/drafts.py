"""Drafting of an engine: the options' choice among what the artifact offers."""

from dataclasses import dataclass
from pathlib import Path

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.errors import OptionValueError, UserError
from dsa_compile.ir.plan import DRAFT
from dsa_compile.runtime.engine_options import EngineOptions

# Drafts of a step by prompt look-up, which costs nothing but the rows that check them.
_LOOKED_UP = 3


@dataclass(frozen=True)
class Drafts:
    """Drafts of an engine.

    Attributes:
        count: the most for a request in a step, k; 0 for an engine that drafts nothing.
        planned: whether the artifact's draft plans make them.
    """

    count: int
    planned: bool


def drafts_of(path: Path, manifest: Manifest, options: EngineOptions) -> Drafts:
    """Drafts of an engine.

    Args:
        path: of the artifact, for errors.
        manifest: of it.
        options: of the engine.

    Raises:
        UserError: the artifact cannot draft as wanted, or not with the other options.
    """
    drafts, forced = _wanted(path, manifest, options), options.force_accept
    if forced is not None and not (drafts.planned and forced <= 1 + drafts.count):
        most = f"a step with {drafts.count} drafts yields at most {1 + drafts.count} tokens"
        none = "only drafts of an artifact's draft plans can be kept by force; see --draft mtp"
        raise UserError(f"force_accept={forced!r}: {most if drafts.planned else none}")
    return drafts


def _wanted(path: Path, manifest: Manifest, options: EngineOptions) -> Drafts:
    has_plan, wanted = DRAFT in manifest.plans, options.num_speculative_tokens
    if options.draft == "mtp" and not has_plan:
        raise UserError(
            f"draft='mtp': {path} has no draft plan; compile with --draft mtp, or load with "
            "draft='ngram' (--draft ngram)"
        )
    method = options.draft or ("mtp" if has_plan else None)
    if method is None or method == "none" or wanted == 0:
        if method is None and wanted:
            raise OptionValueError(
                "{num_speculative_tokens}={}: {} has no draft plan; compile with --draft mtp, or "
                "load with {draft}='ngram'", wanted, path,
            )  # fmt: skip
        return Drafts(0, False)
    default = _LOOKED_UP if method == "ngram" else manifest.compile.num_speculative_tokens or 1
    count = default if wanted is None else wanted
    _check(count, method, options)
    return Drafts(count, method == "mtp")


def _check(count: int, method: str, options: EngineOptions) -> None:
    if options.async_scheduling and method == "ngram":
        raise OptionValueError(
            "{async_scheduling}: drafts that are looked up need the tokens of the step before; "
            "leave it out, or draft by {draft}='mtp' or not at all ({draft}='none')"
        )
    needed = options.rows * (1 + count)
    if needed > options.max_num_batched_tokens:
        raise OptionValueError(
            "{num_speculative_tokens}={}: steps of {max_num_batched_tokens}={} have no room for "
            "the drafts of {max_num_seqs}={} requests; use at least {}, or fewer requests",
            count, options.max_num_batched_tokens, options.rows, needed,
        )  # fmt: skip
