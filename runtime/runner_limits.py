"""Limits of an engine, from its options and its runner."""

from dsa_compile.errors import OptionValueError
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.runner import Runner
from dsa_compile.runtime.scheduling.limits import SchedulerConfig


def scheduler_config(runner: Runner, options: EngineOptions) -> SchedulerConfig:
    """The scheduler's limits over a runner.

    Raises:
        UserError: ``max_model_len`` exceeds the runner's, or a limit is none.
    """
    max_model_len = options.max_model_len
    if max_model_len is None:
        max_model_len = runner.max_model_len
    elif max_model_len > runner.max_model_len:
        raise OptionValueError(
            "{max_model_len}={} exceeds the model's limit of {} tokens",
            max_model_len, runner.max_model_len,
        )  # fmt: skip
    return SchedulerConfig(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.rows,
        max_model_len=max_model_len,
        enable_prefix_caching=options.enable_prefix_caching,
        deterministic=options.deterministic,
        num_drafts=runner.num_drafts,
        looks_up_drafts=options.looks_up_drafts,
        draft_max_rows=options.draft_max_rows,
    )


def overlaps(runner: Runner, options: EngineOptions) -> bool:
    """Whether steps are launched ahead.

    Raises:
        UserError: ``async_scheduling`` for a runner that cannot, or the runner keeps tokens of
            fewer requests.
    """
    wanted = options.wants_overlap
    if runner.rows_ahead == 0:
        if wanted:
            raise OptionValueError(
                "{async_scheduling}: this runner keeps no tokens on its device; leave it out"
            )
        return False
    if wanted is False or (wanted is None and not runner.overlaps):
        return False
    if runner.rows_ahead < options.rows:
        raise OptionValueError(
            "{max_num_seqs}={}: the runner keeps tokens of {} requests; load it with as many",
            options.rows, runner.rows_ahead,
        )  # fmt: skip
    return True
