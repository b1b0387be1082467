"""Tokens per second on the CPU: the compiled artifact beside the reference, same requests, one run.

    python -m benchmarks.cpu_throughput [--threads 1] [--requests 32] [--max-tokens 32]

The reference is measured twice: as one left-padded batch, its best case, and one request at a time.
All three must give the same tokens, or the run fails.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from examples.small_models.models import save_hf, tiny_config, tiny_model


def reference(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of one left-padded batch."""
    longest = max(map(len, prompts))
    pad = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * n + prompt for n, prompt in zip(pad, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pad])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[list[int]] = out[:, longest:].tolist()
    return tokens


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds of ``repeats`` runs after one to warm up, and the last result."""
    result = run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = tiny_model(tiny_config(4))
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 200, (args.requests,), generator=generator).tolist()
    prompts = [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, Path(folder) / "model")
        compile_model(
            Path(folder) / "model", Path(folder) / "artifact", target="cpu", block_size=16
        )
        # a prefix cache would let later repeats skip their prompts
        engine = Engine.load(
            Path(folder) / "artifact", num_gpu_blocks_override=1024, enable_prefix_caching=False
        )
    runs: dict[str, tuple[float, list[list[int]]]] = {
        "dsa-compile": timed(
            lambda: [out.token_ids for out in engine.generate(prompts, params)], args.repeats
        ),
        "transformers, padded batch": timed(
            lambda: reference(model, prompts, args.max_tokens), args.repeats
        ),
        "transformers, one by one": timed(
            lambda: [reference(model, [p], args.max_tokens)[0] for p in prompts], 1
        ),
    }
    total = args.requests * args.max_tokens
    ours = runs["dsa-compile"]
    print(
        f"{args.requests} requests of {min(lengths)}-{max(lengths)} tokens, {args.max_tokens} new "
        f"tokens each, {args.threads} thread(s), torch {torch.__version__}"
    )
    for name, (seconds, tokens) in runs.items():
        same = sum(a == b for a, b in zip(tokens, ours[1], strict=True))
        print(
            f"{name:<28} {seconds:7.3f} s  {total / seconds:8.0f} tokens/s  "
            f"ours is {seconds / ours[0]:5.1f}x  same tokens {same}/{args.requests}"
        )
    if args.json:
        figures = {name: total / seconds for name, (seconds, _) in runs.items()}
        args.json.write_text(json.dumps({"tokens_per_second": figures}, indent=2))
    return 0 if runs["transformers, one by one"][1] == ours[1] else 1


if __name__ == "__main__":
    sys.exit(main())
