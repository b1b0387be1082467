"""Sizes that steps are rounded up to: one CUDA graph for each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dsa_compile.ir.plan import LONG, SHORT, variants_taking
from dsa_compile.runtime.engine_options import DETERMINISTIC_ROWS
from dsa_compile.runtime.execution.batch import Batch

# Rows of decode steps. In recipes whose experts cannot skip a padded row it costs what its experts
# weigh, so small steps have more sizes.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Tokens of context below the longest. Kernels choose how to work by the width of the block table,
# to little effect (docs/performance.md); a narrow one spares the host most of what it writes.
CONTEXTS = (16_384,)
# Longest context of steps with prompt tokens. Those of longer ones take the GPU longer than the
# host.
LONGEST_CONTEXT = 16_384
# Requests of the smaller graphs with prompt tokens; the larger ones have as many as a step may.
FEW_REQUESTS = 64
_MOST_PADDING = 2  # tokens of a graph with prompt tokens over a step's


@dataclass(frozen=True)
class GraphKey:
    """Key of a captured graph: the steps that it is captured for.

    Attributes:
        variant: of the regions, ``long`` or ``short``.
        rows: requests.
        columns: width of the block table.
        tokens_each: tokens of each request in a decode step; 1 without drafts.
        mixed_tokens: tokens of a step in which some are a prompt's; 0 for a decode step.
    """

    variant: str
    rows: int
    columns: int
    tokens_each: int = 1
    mixed_tokens: int = 0

    @property
    def size(self) -> str:
        """The size of these steps in statistics."""
        return f"{self.mixed_tokens} tokens" if self.mixed_tokens else str(self.rows)

    @property
    def title(self) -> str:
        """A step of these in an error's words."""
        if self.mixed_tokens:
            return f"a step of {self.size}"
        with_drafts = " with drafts" if self.tokens_each > 1 else ""
        return f"a decode step of {self.rows} rows{with_drafts}"


@dataclass(frozen=True)
class GraphPlan:
    """Graphs of steps of one kind that there may be.

    Args:
        rows: ascending, of requests.
        columns: widths of the block table by variant, each ascending; of ``long`` at least one.
        tokens_each: of a request, its drafts included.
        draft_max_rows: graphs of more requests have one token of each; None if none has.
        mixed_tokens: ascending, of steps with prompt tokens; none for graphs of decode steps.
    """

    rows: tuple[int, ...]
    columns: Mapping[str, tuple[int, ...]]
    tokens_each: int = 1
    draft_max_rows: int | None = None
    mixed_tokens: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        topk: int | None,
        deterministic: bool = False,
        num_drafts: int = 0,
        draft_max_rows: int | None = None,
        mixed_tokens: Sequence[int] = (),
    ) -> "GraphPlan":
        """The graphs for an engine's limits.

        Args:
            max_num_seqs: most rows of a step.
            max_model_len: longest context.
            block_size: rows of a cache page.
            topk: longest context of a short step, or None if there are no short regions.
            deterministic: a row's results must not depend on the others: no graph has less than
                :data:`~dsa_compile.runtime.engine_options.DETERMINISTIC_ROWS` rows; all are long.
                Steps with drafts are cut into parts of so many rows instead.
            num_drafts: tokens drafted for a request in a step.
            draft_max_rows: requests of a step that may have drafts; None for all.
            mixed_tokens: of steps with prompt tokens, if these are the graphs' steps.
        """
        rows = {size for size in ROWS if size < max_num_seqs} | {max_num_seqs}
        if num_drafts and draft_max_rows is not None:
            rows |= {min(draft_max_rows, max_num_seqs)}
        contexts = [size for size in CONTEXTS if size < max_model_len] + [max_model_len]
        if deterministic:
            if not num_drafts:
                rows = {size for size in rows if size > DETERMINISTIC_ROWS} | {DETERMINISTIC_ROWS}
            contexts, topk = contexts[-1:], None
        if mixed_tokens:
            rows = {min(FEW_REQUESTS, max_num_seqs), max_num_seqs}
            contexts = [min(LONGEST_CONTEXT, max_model_len)]
        columns = {LONG: tuple(-(-size // block_size) for size in contexts)}
        if topk is not None:
            columns[SHORT] = (-(-min(topk, max_model_len) // block_size),)
        mixed = tuple(sorted(set(mixed_tokens)))
        return cls(tuple(sorted(rows)), columns, 1 + num_drafts, draft_max_rows, mixed)

    def graphs(self) -> Iterator[GraphKey]:
        """Graphs of the plan, the ones that need the most memory first."""
        for tokens, rows in product(reversed(self.mixed_tokens or (0,)), reversed(self.rows)):
            for variant, widths in self.columns.items():
                for columns in reversed(widths):
                    yield GraphKey(variant, rows, columns, self.tokens_of(rows), tokens)

    def tokens_of(self, rows: int) -> int:
        """Tokens of each request in graphs of so many."""
        limit = self.draft_max_rows
        return self.tokens_each if limit is None or rows <= limit else 1

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest graph."""
        return max(rows * self.tokens_of(rows) for rows in self.rows)

    def describe(self, block_size: int) -> str:
        """One line for those who start a server."""
        contexts = []
        for variant, widths in reversed(tuple(self.columns.items())):
            sizes = ", ".join(f"{columns * block_size:,}" for columns in widths)
            contexts.append(f"{variant} {sizes}")
        tokens = ", ".join(map(str, self.mixed_tokens))
        prompts = f" of steps with prompts: tokens {tokens};" if tokens else ":"
        return (
            f"{len(list(self.graphs()))} CUDA graphs{prompts} rows "
            f"{', '.join(map(str, self.rows))}; contexts {'; '.join(contexts)}"
        )

    def choose(self, batch: Batch, variant: str) -> GraphKey | None:
        """The smallest graph for a step, or None if it must run without one, as a step with prompt
        tokens that would be padded to more than twice its tokens.

        Args:
            batch: the step.
            variant: that takes its contexts; the long graphs take those of any.
        """
        each, columns = batch.tokens_each, batch.block_tables.shape[1]
        if not self.mixed_tokens:
            return self.choose_size(batch.num_requests, 1, columns, variant) if each == 1 else None
        tokens = next((size for size in self.mixed_tokens if size >= batch.num_tokens), None)
        if each is not None or tokens is None or tokens > _MOST_PADDING * batch.num_tokens:
            return None
        wanted = max(batch.num_requests, len(batch.logit_rows))
        key = self.choose_size(wanted, 1, columns, variant)
        return None if key is None else replace(key, mixed_tokens=tokens)

    def choose_size(
        self, requests: int, tokens_each: int, columns: int, variant: str
    ) -> GraphKey | None:
        """The smallest graph that takes a step of these sizes, or None."""
        fitting = (r for r in self.rows if r >= requests and self.tokens_of(r) >= tokens_each)
        rows = next(fitting, None)
        if rows is None:
            return None
        for name in variants_taking(variant):
            for width in self.columns.get(name, ()):
                if width >= columns:
                    return GraphKey(name, rows, width, self.tokens_of(rows))
        return None
