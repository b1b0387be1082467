"""Evaluation of the checkpoint, with controls that show wrong ways to select keys as wrong.

    python -m examples.tiny_v32.evaluate

All in fp32 on the exported (bf16-rounded) weights: perplexity of held-out text, recall by distance
and the agreement of draft and model, each with the indexer's top-k, with dense attention and with
three controls that must fail. Writes ``results.json`` beside the checkpoint.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from examples.tiny_v32.attention import Select
from examples.tiny_v32.choice import DATA, EXAMPLES, add_model_argument
from examples.tiny_v32.export import load_checkpoint, write_json
from examples.tiny_v32.model import TinyModel
from examples.tiny_v32.recall import Filler, Prompt, RecallWriter, common_words

DISTANCES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1400)
CONTEXTS = (512, 1024, 1536)  # tokens of a perplexity window; the last is the longest trained
_PROMPT, _GENERATED = 256, 96  # tokens, for the draft


def held_out(checkpoint: Path) -> tuple[Tokenizer, NDArray[np.uint16]]:
    """The tokenizer, and the held-out text as one token stream."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    return tokenizer, np.array(tokenizer.encode(text).ids[1:], dtype=np.uint16)


def recall_prompts(
    tokenizer: Tokenizer, stream: NDArray[np.uint16], distance: int, count: int, seed: int = 1
) -> list[Prompt]:
    """``count`` questions at ``distance``, a function of the seed; the filler is ``stream``."""
    writer = RecallWriter(
        tokenizer, Filler(stream, tokenizer), common_words(stream, tokenizer, 600)
    )
    rng = random.Random(f"{seed}/{distance}")
    return [writer.prompt(rng, distance) for _ in range(count)]


@torch.inference_mode()
def perplexity(
    model: TinyModel, stream: Tensor, select: Select, context: int = CONTEXTS[-1], batch: int = 4
) -> float:
    """Perplexity of an int64 stream in windows that do not overlap, each after a begin token."""
    bos = model.config.bos_token_id
    windows = stream[: len(stream) // (context - 1) * (context - 1)].view(-1, context - 1)
    windows = F.pad(windows, (1, 0), value=bos)
    total = 0.0
    for rows in windows.split(batch):
        logits, _, _ = model(rows, select, mtp=False)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        total += losses.item() * len(rows)
    return math.exp(total / len(windows))


@torch.inference_mode()
def recall(
    model: TinyModel, prompts: Sequence[Prompt], select: Select, device: str, batch: int = 8
) -> float:
    """Share of prompts whose whole answer is the greedy continuation."""
    right = 0
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        rows = [torch.tensor(p.ids + p.answer) for p in some]
        # Padding is on the right, where a causal model does not see it.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        logits, _, _ = model(ids, select, mtp=False)
        guesses = logits.argmax(-1).tolist()
        for prompt, guess in zip(some, guesses, strict=True):
            first = len(prompt.ids) - 1
            right += guess[first : first + len(prompt.answer)] == prompt.answer
    return right / len(prompts)


@torch.inference_mode()
def generate(model: TinyModel, ids: Tensor, count: int) -> Tensor:
    """Greedy continuation of ids [B, S] by ``count`` tokens; each step runs the whole text."""
    for _ in range(count):
        logits, _, _ = model(ids, Select.TOPK, mtp=False)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids


@torch.inference_mode()
def acceptance(model: TinyModel, stream: Tensor, prompts: int, batch: int = 16) -> dict[str, float]:
    """Acceptance: how often the draft's first token is the model's, at temperature 0.

    ``generated``: over the model's own greedy continuations of held-out text, which is what
    speculative decoding sees; ``text``: at every position of the text itself.
    """
    starts = torch.linspace(0, len(stream) - _PROMPT, prompts).long().tolist()
    rows = torch.stack([stream[s : s + _PROMPT - 1] for s in starts])
    rows = F.pad(rows, (1, 0), value=model.config.bos_token_id)
    hits = {"generated": 0.0, "text": 0.0}
    for some in rows.split(batch):
        ids = generate(model, some, _GENERATED)
        logits, drafted, _ = model(ids, Select.TOPK)
        assert drafted is not None
        # Row t of the draft, given tokens up to t + 1, proposes token t + 2.
        agree = (drafted.argmax(-1) == logits[:, 1:].argmax(-1)).float()
        hits["generated"] += agree[:, _PROMPT - 1 : -1].mean().item() * len(some)
        hits["text"] += agree[:, : _PROMPT - 2].mean().item() * len(some)
    return {name: value / prompts for name, value in hits.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_argument(parser)
    parser.add_argument("--checkpoint", type=Path, help="default: checkpoint of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=200, help="recall prompts a distance")
    parser.add_argument("--out", type=Path, help="default: results.json beside the checkpoint")
    args = parser.parse_args()

    began = time.perf_counter()
    torch.manual_seed(0)
    checkpoint = args.checkpoint or EXAMPLES / args.model / "checkpoint"
    tokenizer, tokens = held_out(checkpoint)
    stream = torch.from_numpy(tokens.astype(np.int64)).to(args.device)
    model = load_checkpoint(checkpoint).to(args.device)
    results: dict[str, object] = {"heldout_tokens": len(tokens), "recall_prompts": args.prompts}

    print(f"{'keys':12} {'perplexity':>10}  exact recall at distance (tokens)")
    print(" " * 24 + "".join(f"{d:>7}" for d in DISTANCES))
    sets = {d: recall_prompts(tokenizer, tokens, d, args.prompts) for d in DISTANCES}
    for select in (Select.TOPK, Select.ALL, Select.RECENT, Select.RANDOM, Select.WRONG_ROPE):
        score = perplexity(model, stream, select)
        by_distance = {d: recall(model, p, select, args.device) for d, p in sets.items()}
        results[select.value] = {"perplexity": score, "recall": by_distance}
        shown = "".join(f"{100 * r:6.1f}%" for r in by_distance.values())
        print(f"{select.value:12} {score:10.3f} {shown}", flush=True)
    results["perplexity_by_context"] = by_context = {
        context: {
            select.value: perplexity(model, stream, select, context)
            for select in (Select.TOPK, Select.ALL)
        }
        for context in CONTEXTS
    }
    for context, scores in by_context.items():
        more = 100 * (scores["topk"] / scores["all"] - 1)
        print(f"perplexity in windows of {context}: top-k {more:+.2f} % against dense")
    if model.mtp is not None:
        results["mtp_acceptance"] = accepted = acceptance(model, stream, 64)
        print("MTP depth-1 agreement: " + ", ".join(f"{k} {v:.3f}" for k, v in accepted.items()))
    results["seconds"] = round(time.perf_counter() - began, 1)
    results["device"] = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    out = args.out or checkpoint.parent / "results.json"
    write_json(out, results)
    print(json.dumps({"seconds": results["seconds"], "written": str(out)}))


if __name__ == "__main__":
    main()
