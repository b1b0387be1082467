"""The options of ``dsa-generate``."""

import argparse
from pathlib import Path
from typing import Any

from dsa_compile.cli.common import Parser, token_counts

_DESCRIPTION = """\
Continue one or more prompts with a model compiled by dsa-compile.

ARTIFACT is the directory that dsa-compile wrote. Prompts are texts when the model came with a
tokenizer, and token ids always. Several prompts run together as one batch.
"""
_EXAMPLES = """\
examples:
  dsa-generate artifact/ --prompt "Once upon a time" --max-tokens 50
  dsa-generate artifact/ --prompt-ids "1 2 3" "4 5" --temperature 0
  dsa-generate artifact/ --prompt-file prompts.txt --json > results.jsonl
  dsa-generate artifact/ --chat --system "Be brief." --prompt "What is RoPE?"
  dsa-generate artifact/ --input questions.jsonl --output answers.jsonl
"""
# Those of the engine, by the names that it has for them.
ENGINE_OPTIONS = (
    "num_blocks",
    "max_batched_tokens",
    "gpu_memory_utilization",
    "model_dir",
    "digest",
    "deterministic",
    "overlap",
    "cuda_graphs",
    "mixed_graph_tokens",
    "shipped_kernels",
    "debug_launches",
    "generation_config",
    "draft",
    "num_speculative_tokens",
    "draft_max_rows",
    "force_accept",
    "load_format",
    "rank_timeout",
    "collectives",
    "rank",
    "ranks",
    "latencies",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``dsa-generate``."""
    parser = Parser(
        prog="dsa-generate",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s ARTIFACT (--prompt TEXT | --prompt-ids IDS | --prompt-file FILE | "
        "--input FILE --output FILE) [options]",
    )
    parser.add_argument("artifact", metavar="ARTIFACT", help="directory written by dsa-compile")
    where = parser.add_argument_group("prompts (one of)").add_mutually_exclusive_group(
        required=True
    )
    where.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="each TEXT is one prompt; - is all of standard input",
    )
    where.add_argument(
        "--prompt-ids",
        nargs="+",
        action="extend",
        metavar="IDS",
        help='each quoted list of token ids, such as "1 2 3", is one prompt',
    )
    where.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="each line that is not empty is one text prompt; - is standard input",
    )
    where.add_argument(
        "--input",
        metavar="FILE",
        type=Path,
        help='each line is a JSON object with "prompt" (a text or token ids) or "messages", and '
        'perhaps "id" and options such as "max_tokens"',
    )
    more = parser.add_argument_group("more on prompts")
    more.add_argument(
        "--separator",
        metavar="LINE",
        help="with --prompt-file: a line such as --separator=--- stands between prompts, which may "
        "have many lines",
    )
    more.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="with --input: a JSON object is appended for each line as it is finished; those that "
        "are there already are not run again",
    )
    more.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, encoded in the model's chat format",
    )
    more.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    more.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="with --chat: let the answer begin with reasoning (default: as the model does)",
    )

    # Without a default here the one of SamplingParams holds.
    sampling = parser.add_argument_group("choosing tokens", argument_default=argparse.SUPPRESS)
    ending = parser.add_argument_group("when to end", argument_default=argparse.SUPPRESS)
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    sampling.add_argument(
        "--temperature",
        **number,
        help="randomness; 0 always takes the likeliest (default: the model's, or 1.0)",
    )
    sampling.add_argument(
        "--top-k", **count, help="keep the N likeliest tokens (default: the model's, or all)"
    )
    sampling.add_argument(
        "--top-p",
        **number,
        help="keep the likeliest tokens that sum to X (default: the model's, or 1.0: all)",
    )
    sampling.add_argument(
        "--min-p",
        **number,
        help="keep tokens at least X times as likely as the likeliest (default: the model's, or "
        "0.0: all)",
    )
    sampling.add_argument("--seed", **count, help="repeatable draws (default: fresh each time)")
    sampling.add_argument(
        "--repetition-penalty",
        **number,
        help="above 1: fewer tokens seen before (default: the model's, or 1.0)",
    )
    sampling.add_argument(
        "--presence-penalty", **number, help="taken from tokens already generated (default 0.0)"
    )
    sampling.add_argument(
        "--frequency-penalty", **number, help="the same for each time they were (default 0.0)"
    )
    ending.add_argument(
        "--max-tokens", **count, help="most tokens to generate (default: the model's, or 16)"
    )
    ending.add_argument(
        "--min-tokens", **count, help="tokens before anything else may end it (default 0)"
    )
    ending.add_argument(
        "--stop", nargs="+", action="extend", metavar="TEXT", help="end when this text appears"
    )
    ending.add_argument(
        "--stop-token-ids",
        nargs="+",
        action="extend",
        type=int,
        metavar="ID",
        help="end after any of these tokens",
    )
    ending.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the model's end token"
    )

    output = parser.add_argument_group("output")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    form.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print tokens as they come (default: if standard output is a terminal)",
    )
    output.add_argument(
        "--logprobs",
        default=argparse.SUPPRESS,
        **count,
        help="report each token's log-probability and the N likeliest (default: none)",
    )

    engine = parser.add_argument_group("engine", argument_default=argparse.SUPPRESS)
    engine.add_argument(
        "--num-blocks", **count, help="blocks of each cache (default: chosen for the model)"
    )
    engine.add_argument(
        "--max-batched-tokens", **count, help="most tokens in one step (default 2048)"
    )
    engine.add_argument(
        "--gpu-memory-utilization",
        **number,
        help="share of a GPU's memory to use, where --num-blocks is not given (default 0.9)",
    )
    engine.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="the model's weights, if they moved since dsa-compile ran",
    )
    engine.add_argument(
        "--digest",
        metavar="SHA256",
        help="load the artifact with this digest in its manifest.json, and no other",
    )
    engine.add_argument(
        "--deterministic",
        action="store_true",
        help="the same tokens whatever else is in the batch, to the last bit; slower under load",
    )
    engine.add_argument(
        "--draft",
        choices=("mtp", "ngram", "none"),
        help="draft tokens with the artifact's draft plans, or by looking up the last tokens "
        "earlier in the request (default: mtp if the artifact has the plans)",
    )
    engine.add_argument(
        "--num-speculative-tokens",
        **{**count, "metavar": "N"},
        help="tokens drafted for a request in a step, 0 to 4 (default: as compiled; 3 with ngram)",
    )
    engine.add_argument(
        "--draft-max-rows",
        **count,
        help="check no drafts while more requests than these run in a lane (default: always do)",
    )
    engine.add_argument(
        "--force-accept",
        **{**number, "metavar": "N"},
        help="to time random weights: keep N tokens of a step on average, right or wrong",
    )
    engine.add_argument(
        "--load-format", choices=("auto", "dummy"), help="dummy: random weights (default auto)"
    )
    engine.add_argument(
        "--rank-timeout",
        type=float,
        metavar="S",
        help="of several ranks, seconds that they wait for each other in a step (default: 60)",
    )
    engine.add_argument(
        "--collectives",
        choices=("nccl", "symmetric", "replay"),
        help="who sums and gathers for ranks on GPUs: nccl (the default) or symmetric; replay: "
        "load one rank without the others, to project times: what is generated means nothing",
    )
    engine.add_argument(
        "--rank", type=int, metavar="R", help="with --collectives replay: the rank to load, from 0"
    )
    engine.add_argument(
        "--of", dest="ranks", **count, help="with it: how many ranks the artifact must be of"
    )
    engine.add_argument(
        "--latencies", type=Path, metavar="FILE", help="with it: collectives' times to replay"
    )
    engine.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="on a GPU, wait for each step's tokens before the next is launched",
    )
    engine.add_argument(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        help="on a GPU, launch every kernel of every step, and capture nothing at the start",
    )
    engine.add_argument(
        "--mixed-graph-tokens",
        type=token_counts,
        metavar="N[,N...]",
        help="on a GPU, also capture steps of so many tokens with prompts among them: 512,2048",
    )
    engine.add_argument(
        "--shipped-kernels",
        action=argparse.BooleanOptionalAction,
        help="run the machine code of CUDA kernels in the artifact; it is trusted then. If not, "
        "they are taken from your cache or compiled (default: run it only with --digest)",
    )
    engine.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        help="auto: defaults of sampling from the model's generation_config.json; none: without",
    )
    engine.add_argument(
        "--debug-launches",
        action="store_true",
        help="on a GPU, wait for every op, so that one that fails on the GPU is named; slow",
    )
    engine.add_argument(
        "--verbose",
        action=argparse.BooleanOptionalAction,
        help="say on standard error what loading does, and how long it takes (default: if it is a "
        "terminal)",
    )
    return parser
