"""Requests that exercise the options of the runtime, one option a scene.

Each scene switches on as little as its option needs, and has the settings without it: a scene that
goes wrong, and comes right with one setting changed, names that setting. The first are the most
basic, as a fault of batches shows in all that come after.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.verify.inputs.prompt import random_tokens

TOKENS = 4
"""Tokens generated for a prompt: prompts that end up to so many before a block's end cross it."""

GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)
"""Options of a request whose answer is compared token by token."""

OVERLAP = "overlap"
"""The name of launching a step while the one before runs."""

WHOLE = 4096
"""``max_num_batched_tokens`` with which no prompt of a scene is cut."""

PLAIN: dict[str, Any] = {
    "enforce_eager": True,
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": WHOLE,
    "max_num_seqs": 8,
    "draft": "none",
}
"""Options of a run in which nothing is reused, cut or padded."""

_DRAWN = replace(GREEDY, temperature=1.0)
_OPTIONS = (
    replace(_DRAWN, seed=5),
    GREEDY,
    replace(_DRAWN, seed=6, temperature=0.5, top_k=50, top_p=0.9),
    replace(GREEDY, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5),
    replace(_DRAWN, seed=7, min_p=0.1),
    replace(GREEDY, logit_bias={3: 5.0}),
    replace(_DRAWN, seed=8, repetition_penalty=0.5),
)
"""Options of requests beside one another, in turns: whatever they do, they do it alone, too."""

_LARGEST_TOPK = 256  # up to which contexts go beyond ``index_topk``

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """Requests that are there at once, in an engine that keeps what earlier rounds left.

    Attributes:
        prompts: token ids of each.
        aborted: how many of the first are aborted, ``after`` steps; their answers do not count.
        after: steps.
        fails: whether the first request fails once its whole prompt is computed; its answer does
            not count.
        params: sampling options of the requests, in turns.
    """

    prompts: tuple[Tokens, ...]
    aborted: int = 0
    after: int = 0
    fails: bool = False
    params: tuple[SamplingParams, ...] = (GREEDY,)

    @property
    def requests(self) -> list[tuple[Tokens, SamplingParams]]:
        """Prompts with the options of each."""
        return list(zip(self.prompts, cycle(self.params), strict=False))

    @property
    def longest(self) -> int:
        """Tokens of a request at most, with its answer."""
        return max(len(prompt) + params.max_tokens for prompt, params in self.requests)


@dataclass(frozen=True)
class Scene:
    """One engine and the requests it is given.

    Attributes:
        options: of the engine, beyond :data:`PLAIN`.
        rounds: one after the other.
        without: names of settings, each with the scene without it, in the order to be tried.
        ahead: leave out log-probabilities, so that steps can be launched before the host has the
            tokens of those before.
        all_layers: run all layers of the model, and not the first of each kind.
        padded: pad decode steps as CUDA graphs do, without a graph.
    """

    options: dict[str, Any]
    rounds: tuple[Round, ...]
    without: dict[str, Callable[["Scene"], "Scene"]] = field(default_factory=dict)
    ahead: bool = False
    all_layers: bool = False
    padded: bool = False

    def but(self, **options: Any) -> "Scene":
        """Scene with other options."""
        return replace(self, options=self.options | options)


def _off(**options: Any) -> Callable[[Scene], Scene]:
    return lambda scene: scene.but(**options)


def _rounds(**changes: Any) -> Callable[[Scene], Scene]:
    return lambda scene: replace(scene, rounds=tuple(replace(r, **changes) for r in scene.rounds))


_BATCHING = {"batching": _off(max_num_seqs=1)}
_CHUNKS = {"chunked prefill": _off(max_num_batched_tokens=WHOLE)}
_PREFIX = {"prefix reuse": _off(enable_prefix_caching=False)}
_OVERLAP = {OVERLAP: _off(async_scheduling=False)}
_FIXED = {"deterministic": _off(deterministic=False)}
_BLOCKS = {"preemption": _off(num_gpu_blocks_override=None)}
_ABORTS = {"aborted requests": _rounds(aborted=0)}
_FAILURES = {"failing requests": _rounds(fails=False)}
_GRAPHS = {"CUDA graphs": _off(enforce_eager=True)}
_PADDING = {"CUDA graphs": lambda scene: replace(scene, padded=False)}
_DRAFTS = {"drafting": _off(draft="none", num_speculative_tokens=None)}

_LONG = 5  # blocks of the longest equal prefix

_REUSED = {"enable_prefix_caching": True}
_FEW = {"num_gpu_blocks_override": 6}

_MOST_DRAFTS = 3  # of a step: the third is made of what the second leaves
_DRAFTED = replace(GREEDY, max_tokens=16)  # so that steps follow those whose drafts were right
_APART = 16 + 2 * (1 + _MOST_DRAFTS)  # a step that is launched too many goes so far at most


def scenes(block: int, topk: int, vocab_size: int, gpu: bool) -> Iterator[Scene]:
    """Scenes of batches, the most basic first, in which no request has blocks of another.

    Args:
        block: tokens of a cache block.
        topk: ``index_topk``; contexts go beyond it where it is at most 256.
        vocab_size: of the model.
        gpu: whether decode steps run as CUDA graphs.
    """
    mixed = mixed_prompts(block, topk, vocab_size)
    together = (Round(mixed), Round(mixed[::-1]))
    sampled = Round((*mixed, *mixed[::-1]), params=_OPTIONS)
    if gpu:
        yield Scene({"enforce_eager": False}, (Round(mixed),), _GRAPHS | _BATCHING)
    yield Scene({}, together, _BATCHING, all_layers=True)
    if not gpu:
        yield Scene({}, together[:1], _PADDING | _BATCHING, padded=True)
        yield Scene({}, (sampled,), _BATCHING)
        yield Scene({"async_scheduling": True}, (sampled,), _OVERLAP | _BATCHING, ahead=True)
    for chunk in (block // 2 + 3, block + 5):
        yield Scene({"max_num_batched_tokens": chunk}, together[:1], _CHUNKS | _BATCHING)
    yield Scene({"async_scheduling": True}, together, _OVERLAP | _BATCHING, ahead=True)
    fixed = {"deterministic": True, "max_num_batched_tokens": block}
    yield Scene(fixed, together[:1], _FIXED | _CHUNKS | _BATCHING)


def prefix_scenes(
    block: int, vocab_size: int, answer: Callable[[Tokens], Tokens], gpu: bool = False
) -> Iterator[Scene]:
    """Scenes in which requests reuse blocks that others left.

    Args:
        block: as for :func:`scenes`.
        vocab_size: likewise.
        answer: the tokens that follow a prompt.
        gpu: as for :func:`scenes`.
    """
    yield Scene(_REUSED, _prefixes(block, vocab_size, answer), _PREFIX | _BATCHING)
    yield Scene(_FEW | _REUSED, _outlived(block, vocab_size), _PREFIX | _BLOCKS)
    cut = _REUSED | {"max_num_batched_tokens": block // 2 + 3}
    yield Scene(cut, _abandoned(block, vocab_size), _PREFIX | _ABORTS | _CHUNKS | _BATCHING)
    if not gpu:  # whose runner fails only by itself
        failed = _failed(block, vocab_size)
        yield Scene(cut, failed, _PREFIX | _FAILURES | _CHUNKS | _BATCHING)


def crowded_scenes(block: int, vocab_size: int, gpu: bool) -> Iterator[Scene]:
    """Scenes in which requests want more blocks than there are; arguments as of :func:`scenes`."""
    crowd = _crowd(block, vocab_size)
    yield Scene(_FEW, crowd, _BLOCKS | _BATCHING)
    yield Scene(_FEW | _REUSED, crowd, _PREFIX | _BLOCKS)
    every = _FEW | _REUSED | {"max_num_batched_tokens": block // 2 + 3}
    every |= {"async_scheduling": True, "enforce_eager": not gpu}
    without = _PREFIX | _CHUNKS | _OVERLAP | _GRAPHS | _BLOCKS | _BATCHING
    yield Scene(every, crowd, without, ahead=True)


def mixed_prompts(block: int, topk: int, vocab_size: int) -> tuple[Tokens, ...]:
    """Prompts whose answers lie below, across and beyond ``index_topk``; as :func:`scenes`."""
    edge = topk if topk <= _LARGEST_TOPK else 2 * block
    lengths = (5, edge // 2 + 1, edge - TOKENS // 2, edge, edge + block + 3)
    return tuple(random_tokens(n, vocab_size, seed=20 + i) for i, n in enumerate(lengths))


def drafted_scenes(block: int, topk: int, vocab_size: int, gpu: bool = False) -> Iterator[Scene]:
    """Scenes in which the artifact's draft plans draft.

    No two of the prompts have answers at the same positions: the position of a request's last token
    tells its drafts from another's. The arguments are those of :func:`scenes`.
    """
    edge = topk if topk <= _LARGEST_TOPK else 2 * block
    lengths: list[int] = []
    for length in sorted((block - 2, edge + 1, edge + block // 2 + 6, edge + block + 3)):
        lengths.append(max(length, lengths[-1] + _APART) if lengths else length)
    prompts = tuple(random_tokens(n, vocab_size, seed=80 + i) for i, n in enumerate(lengths))
    drafted = {"draft": "mtp", "num_speculative_tokens": _MOST_DRAFTS, "max_num_seqs": len(prompts)}
    turns = (Round(prompts, params=(_DRAFTED,)),)
    yield Scene(drafted, turns, _DRAFTS | _BATCHING)
    if gpu:  # tokens that are described are chosen by the host, and no graph runs
        yield Scene(drafted | {"enforce_eager": False}, turns, _GRAPHS | _DRAFTS, ahead=True)
    chunk = max(block + 5, len(prompts) * (1 + _MOST_DRAFTS))  # an engine takes no less
    cut = drafted | {
        "async_scheduling": True,
        "max_num_batched_tokens": chunk,
        "enforce_eager": not gpu,
    }
    yield Scene(cut, turns, _DRAFTS | _OVERLAP | _CHUNKS | _BATCHING, ahead=True)


def looked_up_scenes(vocab_size: int) -> Iterator[Scene]:
    """A scene in which drafts are looked up: answers repeat a token that two stand of in prompts,
    so that the first drafts, which followed there, are wrong, and those after them right."""
    token = 3
    prompts = tuple(
        (*random_tokens(n, vocab_size, seed=90), token, token, *random_tokens(n, vocab_size))
        for n in (5, 25, 45)
    )
    repeated = replace(_DRAFTED, logit_bias={token: 100.0})
    options = {"draft": "ngram", "num_speculative_tokens": _MOST_DRAFTS}
    yield Scene(options, (Round(prompts, params=(repeated,)),), _DRAFTS | _BATCHING)


def _prefixes(block: int, vocab_size: int, answer: Callable[[Tokens], Tokens]) -> tuple[Round, ...]:
    """Prompts that share blocks, and prompts that nearly do."""
    shared = random_tokens(2 * block + block // 2, vocab_size, seed=1)
    other = random_tokens(2 * block, vocab_size, seed=2)
    first, second = shared[:block], shared[block : 2 * block]
    changed = [_with(shared, at, vocab_size) for at in (0, block - 1, block, 2 * block - 1)]
    ends = tuple(
        token if at % block in (0, block - 1) else other[at % len(other)]
        for at, token in enumerate(shared)
    )
    talk = random_tokens(2 * block - TOKENS // 2, vocab_size, seed=3)  # its answer ends a block
    turn = (*talk, *answer(talk), 3, 5, 7)
    long = random_tokens(_LONG * block + 5, vocab_size, seed=4)
    return (
        Round((shared, (*shared[: block + 8], 3, 5, 7), talk)),
        Round((shared, ends, (*first, *second), (*first, *second, 3), turn)),
        Round(((*second, 5), (*other[:block], *second, 5), (*first, *other), (*first, *first, 5))),
        Round((*changed, (*first[::-1], *second, 5), (*turn, *random_tokens(block, vocab_size)))),
        Round((long,)),
        Round((_with(long, (_LONG - 1) * block, vocab_size), long, (*long[: -block - 5], 3))),
    )


def _with(tokens: Tokens, at: int, vocab_size: int) -> Tokens:
    return (*tokens[:at], (tokens[at] + 1) % vocab_size, *tokens[at + 1 :])


def _crowd(block: int, vocab_size: int) -> tuple[Round, ...]:
    """More than six blocks hold: prompts whose answers need another block each, again and again."""
    near = tuple(random_tokens(block - 2, vocab_size, seed=40 + i) for i in range(4))
    long = tuple(random_tokens(3 * block - 3, vocab_size, seed=50 + i) for i in range(2))
    branch = (*long[0][: 2 * block], *long[1][:block])
    return (
        Round((*near, long[0])),
        Round((long[1], *near[::-1])),
        Round((long[0], branch)),
        Round((branch, *near[:2], long[1], long[0])),
    )


def _outlived(block: int, vocab_size: int) -> tuple[Round, ...]:
    """A prompt whose prefix lies in the oldest blocks, while the others it needs must be evicted.

    There are six blocks: the first two requests leave two each in the cache, the third takes all.
    """
    old, new = (random_tokens(2 * block + 2, vocab_size, seed=70 + i) for i in range(2))
    rest = random_tokens(3 * block + 3, vocab_size, seed=72)
    return Round((old,)), Round((new,)), Round(((*old[: 2 * block], *rest),))


def _abandoned(block: int, vocab_size: int) -> tuple[Round, ...]:
    """Requests that end in the middle of their prompts, and come again."""
    prompts: Sequence[Tokens] = [
        random_tokens(2 * block + 7 + i, vocab_size, seed=60 + i) for i in range(3)
    ]
    a, b, c = prompts
    return (
        Round((a, b, c), aborted=2, after=2),
        Round((b, a), aborted=1, after=5),
        Round((a, c, b)),
    )


def _failed(block: int, vocab_size: int) -> tuple[Round, ...]:
    """A request that fails within a block; the next ones find blocks that it shared and left."""
    failing = random_tokens(3 * block + 1, vocab_size, seed=65)  # no other gets as long
    prompt, other = failing[: -TOKENS - 2], random_tokens(2 * block + 9, vocab_size, seed=66)
    return (
        Round((failing, prompt, other), fails=True),
        Round((failing, other, prompt), fails=True),
        Round((prompt, failing)),
    )
