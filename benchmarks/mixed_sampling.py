"""Decode steps of greedy requests, and of as many with one among them that has every option.

That one has penalties, a logit bias, log-probabilities and a JSON schema, whose text it never ends.
Both batches run in one process over one runner, in turns; prints the median and the 90th percentile
of the time of a step in milliseconds, the median of the last steps' host part (a step less its wait
for tokens), and whether the greedy requests had the same tokens.

    python benchmarks/mixed_sampling.py ARTIFACT [--load-format dummy] [--requests 32]
    python benchmarks/mixed_sampling.py ARTIFACT --only logprobs grammar

Without weights the artifact has no tokenizer; ``--tokenizer FILE`` names a ``tokenizer.json``, else
one with words of random letters is made, a token for each id of the model.
"""

import argparse
import json
import random
import string
import time

import numpy as np

from dsa_compile.runtime import Engine, EngineOptions, Grammar, SamplingParams
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.sampling.device_sampler import DeviceTokens

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
OPTIONS = ("penalties", "bias", "logprobs", "grammar")


def random_words(size):
    """A tokenizer whose first tokens are the letters and signs of JSON."""
    from tokenizers import Tokenizer, models

    chance = random.Random(0)
    words = dict.fromkeys(["<end>", *string.printable])
    while len(words) < size:
        words["".join(chance.choices(string.ascii_letters, k=chance.randint(2, 8)))] = None
    vocabulary = {word: index for index, word in enumerate(list(words)[:size])}
    return Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))


def special_params(args, tokenizer, ends):
    """Options of the one request."""
    options = {}
    quotes = [i for text, i in tokenizer.get_vocab().items() if '"' in text]
    if "penalties" in args.only:
        options |= {
            "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1,
        }  # fmt: skip
    if "bias" in args.only or "grammar" in args.only:  # or the string would end
        options["logit_bias"] = dict.fromkeys([*quotes, *ends], -100.0)
    if "logprobs" in args.only:
        options["logprobs"] = 5
    if "grammar" in args.only:
        options["grammar"] = Grammar.json_schema(SCHEMA)
    return options


class Waited:
    """Adds up the time in which tokens are waited for."""

    def __init__(self):
        self.seconds = 0.0
        wait = DeviceTokens.wait

        def timed(tokens):
            start = time.perf_counter()
            result = wait(tokens)
            self.seconds += time.perf_counter() - start
            return result

        DeviceTokens.wait = timed


def run(runner, tokenizer, args, waited, special):
    """One batch: milliseconds of each step, of its host part, and the greedy requests' tokens."""
    config = EngineOptions(
        max_num_seqs=args.requests,
        max_model_len=args.max_model_len,
        async_scheduling=True,
        enable_prefix_caching=False,
    )
    engine = Engine(runner, config, tokenizer)
    rng = np.random.default_rng(0)
    for index in range(args.requests):
        prompt = rng.integers(3, runner.vocab_size, args.context).tolist()
        options = {"ignore_eos": True}
        if special and index == args.requests - 1:
            options = special_params(args, tokenizer, engine.eos_token_ids)
        params = SamplingParams(max_tokens=args.steps + 99, temperature=0.0, **options)
        engine.add_request(f"r{index}", prompt, params)
    while len(engine.step()) < args.requests:
        pass
    for _ in range(10):
        engine.step()
    spent, host, tokens = [], [], {}
    for _ in range(args.steps):
        before, start = waited.seconds, time.perf_counter()
        outputs = engine.step()
        spent.append((time.perf_counter() - start) * 1e3)
        host.append(spent[-1] - (waited.seconds - before) * 1e3)
        assert len(outputs) == args.requests, "a request ended"
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    for index in range(args.requests):
        engine.abort(f"r{index}")
    engine.drain()
    assert engine.stats().late_kernels == 0
    tokens.pop(f"r{args.requests - 1}")
    return spent, host, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--tokenizer", help="a tokenizer.json")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=200, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=OPTIONS)
    parser.add_argument("--json", action="store_true", help="print one line of JSON too")
    args = parser.parse_args()
    options = EngineOptions(
        num_gpu_blocks_override=args.requests * -(-args.max_model_len // 64),
        load_format=args.load_format,
        max_num_seqs=args.requests,
        max_model_len=args.max_model_len,
    )
    runner = load_runner(args.artifact, options)
    if args.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(args.tokenizer)
    else:
        tokenizer = random_words(runner.vocab_size)
    waited = Waited()
    times, hosts, tokens = ({False: [], True: []} for _ in range(3))
    for _ in range(args.turns):
        for special in (False, True):
            spent, host, found = run(runner, tokenizer, args, waited, special)
            times[special] += spent
            hosts[special] += host
            tokens[special].append(found)
    print(f"{'batch':>12} {'median':>8} {'p90':>8} {'host':>8}   milliseconds a step")
    for special, name in ((False, f"{args.requests}"), (True, f"{args.requests - 1}+1")):
        spent = times[special]
        print(
            f"{name:>12} {np.median(spent):8.3f} {np.percentile(spent, 90):8.3f} "
            f"{np.median(hosts[special]):8.3f}"
        )
    ratio = np.median(times[True]) / np.median(times[False])
    same = all(found == tokens[False][0] for found in tokens[False] + tokens[True])
    print(f"with one of {', '.join(args.only)}: {ratio - 1:+.1%}")
    print(f"tokens of the greedy requests: {'the same' if same else 'DIFFERENT'}")
    if args.json:
        print(json.dumps({"ratio": ratio, "same_tokens": same, "requests": args.requests}))


if __name__ == "__main__":
    main()
