"""``dsa-bench serve``: load a server of OpenAI's API and measure its times; needs no torch."""

import argparse
import asyncio
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.tables import console, print_json
from dsa_compile.common.names import one_of
from dsa_compile.errors import UserError

if TYPE_CHECKING:
    from dsa_compile.measure.serve.client import Backend, Outcome, Target
    from dsa_compile.measure.serve.workload import Sample


def run_serve(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit status."""
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise UserError("dsa-bench serve needs aiohttp: pip install aiohttp") from None
    from dsa_compile.measure.serve.metrics import METRICS, parse_goodput, summarize
    from dsa_compile.measure.serve.report import detailed, plot, save, to_text

    metrics = [name for name in args.percentile_metrics.split(",") if name]
    for name in metrics:
        one_of("metric", name, [metric.name for metric in METRICS])
    goodput = parse_goodput(args.goodput)
    metadata = dict(_pair("--metadata", text) for text in args.metadata)
    _check(args)
    rng = random.Random(args.seed)
    samples = _samples(args, rng)
    model, outcomes, duration = asyncio.run(_load(args, samples, rng))
    percentiles = args.metric_percentiles
    result = {
        **_described(args, model, len(samples)),
        **metadata,
        **summarize(outcomes, duration, percentiles, goodput),
    }
    out = console(stderr=args.json)
    for each in [each for each in outcomes if each.error][:10]:
        out.print(f"failed: {each.error}", markup=False)
    out.print(to_text(result, metrics, percentiles), markup=False)
    if args.save_detailed:
        result.update(detailed(outcomes))
    if args.json:
        print_json(result)
    if args.save_result or args.save_detailed:
        path = _result_path(args, result)
        save(path, result)
        out.print(f"result: {path}", markup=False)
    if args.plot and result["completed"]:
        plot(args.plot, outcomes, metrics)
    return 1 if result["failed"] else 0


def _check(args: argparse.Namespace) -> None:
    if args.num_prompts < 1:
        raise UserError(f"--num-prompts must be at least 1; got {args.num_prompts}")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise UserError(f"--max-concurrency must be at least 1; got {args.max_concurrency}")
    for name in ("request_rate", "burstiness"):
        if not getattr(args, name) > 0:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} must be above 0; got {getattr(args, name)}")
    if args.output_len is not None and args.output_len < 1:
        raise UserError(f"--output-len must be at least 1; got {args.output_len}")
    if (args.dataset_path is None) != (args.dataset_name == "random"):
        needs = "takes no" if args.dataset_name == "random" else "needs"
        raise UserError(f"--dataset-name {args.dataset_name} {needs} --dataset-path")
    if args.dataset_name == "random" and args.backend == "openai-chat":
        raise UserError(
            "random prompts are token ids, which chats do not take: use --backend openai, or a file"
        )


def _samples(args: argparse.Namespace, rng: random.Random) -> "list[Sample]":
    from dsa_compile.measure.serve.workload import RandomTokens, chosen, read_custom, read_sharegpt

    tokens = RandomTokens(rng, args.random_vocab_size, args.random_prefix_len)
    if args.dataset_name == "random":
        output_len = args.output_len or args.random_output_len
        ratio = args.random_range_ratio
        return tokens.samples(args.num_prompts, args.random_input_len, output_len, ratio)
    if args.dataset_name == "custom":
        found = read_custom(args.dataset_path, tokens, args.output_len)
    else:
        found = read_sharegpt(args.dataset_path, args.output_len, _counter(args.tokenizer))
    return chosen(found, args.num_prompts, rng)


def _counter(file: Path | None) -> Callable[[str], int] | None:
    if file is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises this very type
        raise UserError(f"cannot read --tokenizer {file}: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


async def _load(
    args: argparse.Namespace, samples: "list[Sample]", rng: random.Random
) -> "tuple[str, list[Outcome], float]":
    """Send the requests; the model's name, the outcomes and the seconds."""
    from dsa_compile.measure.serve.client import first_model, new_session, send
    from dsa_compile.measure.serve.run import arrival_times, run_load

    target = _target(args)
    async with new_session() as session:
        if not target.model:
            model = await first_model(session, target.base_url, target.headers)
            target = _target(args, model)
        trial = await send(session, target, samples[0])
        if trial.error:
            raise UserError(f"the first request to {target.url} failed: {trial.error}")
        warmups = [samples[n % len(samples)] for n in range(args.num_warmups)]
        await run_load(session, target, warmups, [0.0] * len(warmups), args.max_concurrency)
        times = arrival_times(len(samples), args.request_rate, args.burstiness, rng)
        with _Progress(len(samples), hidden=args.disable_tqdm) as progress:
            outcomes, duration = await run_load(
                session, target, samples, times, args.max_concurrency, progress.advance
            )
    return target.model, outcomes, duration


def _target(args: argparse.Namespace, model: str | None = None) -> "Target":
    from dsa_compile.measure.serve.client import Target

    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    if not base_url.startswith(("http://", "https://")):
        raise UserError(f"--base-url {base_url}: should begin with http:// or https://")
    headers = dict(_pair("--header", text) for text in args.header)
    if args.api_key:
        headers.setdefault("authorization", f"Bearer {args.api_key}")
    names = ("temperature", "top_p", "top_k", "min_p")
    extra = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.dataset_name == "random" if args.ignore_eos is None else args.ignore_eos:
        extra["ignore_eos"] = True
    backend: Backend = "openai-chat" if args.backend == "openai-chat" else "openai"
    chosen = model or args.model or ""
    return Target(base_url, backend, chosen, headers, {**extra, **args.extra_body})


def _described(args: argparse.Namespace, model: str, num_prompts: int) -> dict[str, Any]:
    rate = args.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": None if args.tokenizer is None else str(args.tokenizer),
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }


def _result_path(args: argparse.Namespace, result: dict[str, Any]) -> Path:
    limit = args.max_concurrency
    parts = (
        f"{args.label or args.backend}-{result['request_rate']}qps",
        *([] if limit is None else [f"concurrency{limit}"]),
        result["model_id"].split("/")[-1],
        result["date"],
    )
    return (args.result_dir or Path()) / (args.result_filename or "-".join(parts) + ".json")


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"{flag} {text}: should be NAME=VALUE")
    return name.strip(), value.strip()


class _Progress:
    """A bar on standard error, in a terminal alone."""

    def __init__(self, total: int, hidden: bool) -> None:
        from rich.progress import Progress

        out = console(stderr=True)
        self._bar = Progress(console=out, transient=True, disable=hidden or not out.is_terminal)
        self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, outcome: "Outcome") -> None:
        self._bar.advance(self._task)
