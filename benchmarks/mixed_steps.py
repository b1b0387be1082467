"""Inter-token latency of decoding requests while prompts keep coming, with and without chunking.

Some requests decode; behind them there is always one more prompt of so many tokens to be computed.
One runner, an engine for each number of tokens that a step may have; on a GPU each with steps of
that size as CUDA graphs (mixed_graph_tokens) and without. Prints percentiles of the time between
two tokens of a request in milliseconds, the prompt tokens a second, and how many steps ran how.

    python benchmarks/mixed_steps.py ARTIFACT [--load-format dummy] [--requests 64] [--context 8192]
    python benchmarks/mixed_steps.py ARTIFACT --chunks 512 2048 8192 --prompt 8192 --json

A chunk of at least the prompt and the requests is the load without chunking.
"""

import argparse
import json
import time

import numpy as np
import torch

from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.execution.graph_plan import LONGEST_CONTEXT, GraphPlan
from dsa_compile.runtime.loading.load_runner import load_runner


def run(runner, args, tokens, prompts):
    """One load: milliseconds between tokens, prompt tokens computed, steps by kind."""
    options = EngineOptions(
        max_num_seqs=args.requests + 1,
        max_model_len=args.context + args.tokens + 99,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=False,
    )
    engine = Engine(runner, options)
    rng = np.random.default_rng(0)

    def add(name, length, count):
        ids = rng.integers(3, runner.vocab_size, length).tolist()
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.add_request(name, ids, params)

    for index in range(args.requests):
        add(f"decoding {index}", args.context, args.tokens + 90)
    started = set()
    while len(started) < args.requests:
        started |= {output.request_id for output in engine.step()}
    for _ in range(4):
        engine.step()
    before = dict(engine.stats().step_counts)
    waiting, sent, gaps = 0, 0, []
    begin = last = time.perf_counter()
    for _ in range(args.tokens):
        if prompts and waiting < 2:
            add(f"prompt {sent}", args.prompt, 1)
            waiting, sent = waiting + 1, sent + 1
        outputs = engine.step()
        now = time.perf_counter()
        if any(output.request_id.startswith("decoding") for output in outputs):
            gaps.append((now - last) * 1e3)
            last = now
        waiting -= sum(output.request_id.startswith("prompt") for output in outputs)
    seconds = time.perf_counter() - begin
    counts = {
        f"{kind.graph} {kind.variant}": count - before.get(kind, 0)
        for kind, count in engine.stats().step_counts.items()
        if count > before.get(kind, 0)
    }
    for name in [f"decoding {n}" for n in range(args.requests)]:
        engine.abort(name)
    for index in range(sent):
        engine.abort(f"prompt {index}")
    engine.drain()
    assert engine.stats().late_kernels == 0
    return gaps, (sent - waiting) * args.prompt / seconds, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--requests", type=int, default=64, help="that decode")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048], help="of a step")
    parser.add_argument("--tokens", type=int, default=128, help="of each request in each load")
    parser.add_argument("--json", action="store_true", help="print one line of JSON too")
    args = parser.parse_args()
    longest = max(args.context + args.tokens + 99, args.prompt + 1)
    sizes = [chunk + args.requests for chunk in args.chunks]
    options = EngineOptions(
        num_gpu_blocks_override=(args.requests + 4) * -(-longest // 64),
        load_format=args.load_format,
        max_num_seqs=args.requests + 4,
        max_model_len=longest,
        max_num_batched_tokens=max(sizes),
    )
    runner = load_runner(args.artifact, options)
    loads = [("decode alone", max(sizes), False, False)]
    for size, chunk in zip(sizes, args.chunks, strict=True):
        loads.append((f"chunks of {chunk}", size, True, False))
        if runner.device.type == "cuda" and longest <= LONGEST_CONTEXT:
            loads.append((f"chunks of {chunk}, graphs", size, True, True))
    results = {}
    print(f"{'':24} {'p50':>8} {'p90':>8} {'p99':>8} {'prompt tokens/s':>16}   ms between tokens")
    for name, size, prompts, captured in loads:
        runner._graphs.pop(True, None)
        if captured:
            plan = GraphPlan.of(
                mixed_tokens=[size],
                max_num_seqs=args.requests + 4,
                max_model_len=longest,
                block_size=runner.block_size,
                topk=None,
            )
            runner.capture(plan)
        gaps, rate, counts = run(runner, args, size, prompts)
        p50, p90, p99 = np.percentile(gaps, [50, 90, 99])
        print(f"{name:24} {p50:8.2f} {p90:8.2f} {p99:8.2f} {rate:16.0f}   {counts}", flush=True)
        results[name] = {"p50": p50, "p90": p90, "p99": p99, "prompt_tokens_s": rate}
        results[name]["steps"] = counts
    if args.json:
        gpu = torch.cuda.get_device_name() if runner.device.type == "cuda" else "cpu"
        print(json.dumps({"gpu": gpu, "arguments": vars(args), "loads": results}))


if __name__ == "__main__":
    main()
