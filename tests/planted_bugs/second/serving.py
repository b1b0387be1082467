"""Results of an artifact for requests that look like serving's, by which a fault shows.

Steps are laid out here and not by the runtime, so that they are right whatever the runtime does:
several requests over scattered blocks, prompts in chunks beside decoding, several rows a request,
contexts below, at and above ``index_topk``, padded rows. Then the engine generates, with and
without each of its options.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLOCKS = 80
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "max_batched_tokens=20": {"max_num_batched_tokens": 20},
    "enable_prefix_cache=False": {"enable_prefix_caching": False},
    "deterministic=True": {"deterministic": True},
    "num_blocks=9": {"num_gpu_blocks_override": 9},
}
_TOKENS = 14


def logits_of_steps(artifact: Path) -> dict[str, Any]:
    """Logits of every row of steps over an artifact, fp32 [rows, V], by the step's name."""
    from dsa_compile.runtime.engine import Engine

    return logits_of_runner(
        Engine.load(artifact, num_gpu_blocks_override=BLOCKS, max_num_seqs=8)._runner
    )


def logits_of_runner(runner: Any) -> dict[str, Any]:
    """As :func:`logits_of_steps`, of what executes batches over caches of its own."""
    import numpy as np

    from dsa_compile.runtime.execution.batch import Batch
    from dsa_compile.runtime.execution.cuda_graphs import padded_batch

    topk, block = runner._topk, runner.block_size
    lengths = (topk // 2, topk + 5, 2 * topk + 10)
    chance = random.Random(7)
    tokens = [[chance.randrange(3, runner.vocab_size) for _ in range(n + 20)] for n in lengths]
    blocks = list(range(1, BLOCKS))
    chance.shuffle(blocks)
    blocks.insert(0, 0)  # the first request has block 0
    each = -(-(max(lengths) + 20) // block)
    tables = [blocks[i * each : (i + 1) * each] for i in range(3)]

    def batch(*parts: tuple[int, int, int], silent: bool = False) -> Any:
        """A step of (request, first position, tokens), ``silent`` without logits."""
        positions = [p for _, start, n in parts for p in range(start, start + n)]
        owners = [r for r, _, n in parts for _ in range(n)]
        slots = [
            tables[r][p // block] * block + p % block
            for r, p in zip(owners, positions, strict=True)
        ]
        ends = np.cumsum([0, *(n for _, _, n in parts)])
        columns = -(-max(start + n for _, start, n in parts) // block)
        rows = np.full((len(parts), columns), -1)
        for row, (r, start, n) in zip(rows, parts, strict=True):
            used = -(-(start + n) // block)
            row[:used] = tables[r][:used]
        return Batch(
            input_ids=np.array([tokens[r][p] for r, p in zip(owners, positions, strict=True)]),
            positions=np.array(positions),
            slot_mapping=np.array(slots),
            block_tables=rows.astype(np.int32),
            cu_seqlens=ends.astype(np.int32),
            context_lens=np.array([start + n for _, start, n in parts], np.int32),
            logit_rows=np.arange(0 if silent else len(positions)),
            request_rows=np.array([r for r, _, _ in parts], np.int32),
            tokens_each=1 if all(n == 1 for _, _, n in parts) else None,
        )

    a, b, c = lengths
    steps = {
        "short": batch((0, 0, a)),
        "silent": batch((2, 0, topk + 1), silent=True),
        "prompt": batch((0, a, 1), (1, 0, b)),
        "mixed": batch((2, topk + 1, c - topk - 1), (0, a + 1, 1), (1, b, 1)),
        "decode": batch((0, a + 2, 1), (1, b + 1, 1), (2, c, 1)),
        "rows": batch((1, b + 2, 3), (2, c + 1, 3), (0, a + 3, 3)),
        "alone": batch((2, c + 4, 1)),
        "short-decode": batch((0, a + 6, 1)),
    }
    found = {name: runner.execute(step) for name, step in steps.items()}
    padded = padded_batch(batch((0, a + 7, 1), (2, c + 5, 1)), 8, each)
    found["padded"] = runner.execute(padded)[:2]
    return found


def generated(
    artifact: Path, enough: Callable[[dict[str, Any]], bool] = lambda found: False
) -> dict[str, Any]:
    """Tokens and log-probabilities of requests, for each of :data:`OPTIONS`, and sampled ones.

    Args:
        artifact: to load.
        enough: whether what was generated so far is all that is wanted.
    """
    from dsa_compile.runtime.engine import Engine
    from dsa_compile.runtime.requests.sampling_params import SamplingParams

    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        engine = Engine.load(
            artifact, **{"num_gpu_blocks_override": 3 * BLOCKS, "max_num_seqs": 8, **options}
        )
        topk = engine._runner._topk
        if name.startswith("num_blocks"):  # room for all prompts, not for what is generated
            topk //= max(1, topk // 16)
        prompts = list(_prompts(topk, engine._runner.vocab_size))
        rounds = [prompts, prompts]  # the second time over rows of the first
        if name == "num_blocks=9":
            rounds = [prompts[:4], prompts[4:7], prompts[:4]]
        elif name != "default":
            rounds = [prompts]
        params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True)
        for number, asked in enumerate(rounds, start=1):
            found[f"{name} {number}"] = _outputs(engine.generate(asked, params))
        if enough(found):
            return found
    engine = Engine.load(artifact, num_gpu_blocks_override=3 * BLOCKS)
    prompts = list(_prompts(16, engine._runner.vocab_size))
    found["sampled"] = _outputs(engine.generate(prompts, list(_sampling(len(prompts)))))
    return found


def drafted(artifact: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """States behind drafts, by their number, and tokens that are generated with drafts."""
    from dsa_compile.runtime.engine import Engine
    from dsa_compile.runtime.requests.sampling_params import SamplingParams

    engine = Engine.load(
        artifact, num_gpu_blocks_override=BLOCKS, max_num_seqs=8, num_speculative_tokens=3
    )
    runner: Any = engine._runner
    states: dict[str, Any] = {}

    def observe(depth: int, carried: Any) -> None:
        for key, value in carried.items():
            if len(states) < 200:
                states[f"{len(states)} {depth} {key}"] = value.float().clone()

    runner.drafter.observer = observe
    prompts = list(_prompts(16, runner.vocab_size))[:5]
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True)
    found = {"drafted": _outputs(engine.generate(prompts, params))}
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    return states, found | {"drafted ahead": _outputs(engine.generate(prompts, params))}


def _prompts(topk: int, vocabulary: int) -> Iterator[list[int]]:
    chance = random.Random(11)
    shared = [chance.randrange(3, vocabulary) for _ in range(2 * topk + 2)]
    for length in (topk // 2, topk, 2 * topk + 2, topk + 3, 5):
        yield [chance.randrange(3, vocabulary) for _ in range(length)]
    yield [*shared, 7, 8, 9]
    yield [*shared, 9, 8, 7]
    yield [*shared[16:], 5]  # a block that others have in the second place
    yield [shared[0], *(chance.randrange(3, vocabulary) for _ in range(2 * topk))]


def _sampling(count: int) -> Iterator[Any]:
    from dsa_compile.runtime.requests.sampling_params import SamplingParams

    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3, "top_p": 0.8, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 0.4, "presence_penalty": 2.0, "logprobs": 0},
        {"temperature": 1.3, "seed": 5, "top_k": 9, "min_p": 0.02},
        {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 0.0, "logit_bias": {11: 30.0}, "min_tokens": 4},
        {"temperature": 1.0, "seed": 9},
        {"temperature": 1.2, "seed": 21, "repetition_penalty": 1.9},
    ]
    for index in range(count):
        yield SamplingParams(
            max_tokens=_TOKENS, ignore_eos=index % 2 == 0, **options[index % len(options)]
        )


def _outputs(outputs: Any) -> list[tuple[list[int], list[float]]]:
    return [(list(o.token_ids), [entry.logprob for entry in o.logprobs or ()]) for o in outputs]
