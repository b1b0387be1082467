"""Evaluation material of one artifact: texts and prompts in its own tokens."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.indexer_overlap import lengths_around
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.options import Options
from dsa_compile.measure.eval.recall import RecallGenerator, RecallPrompt
from dsa_compile.measure.eval.texts import Window, cut_windows, random_windows, read_texts, spread
from dsa_compile.runtime.requests.special_tokens import leading_ids

_DISTANCES = (1, 2, 4, 8, 12, 16)  # times index_topk


class Material:
    """Each part is made at its first use; it is the same for the same texts, tokenizer and options.

    A model without a tokenizer is evaluated on random tokens where that makes sense.

    Args:
        loaded: the artifact.
        texts: by path.
        options: how much.
    """

    def __init__(self, loaded: LoadedArtifact, texts: dict[str, str], options: Options) -> None:
        self._loaded, self._options = loaded, options
        self._texts = texts
        self.context = options.context_of(loaded.spec)

    @cached_property
    def _lead(self) -> list[int]:
        """Token ids that the model's tokenizer puts before a prompt."""
        tokenizer = self._loaded.tokenizer
        return [] if tokenizer is None else leading_ids(tokenizer)

    @cached_property
    def _all_windows(self) -> list[Window]:
        spec, tokenizer = self._loaded.spec, self._loaded.tokenizer
        if tokenizer is None:
            raise UserError(
                f"{self._loaded.name} came without a tokenizer (or tokenizers is not installed), "
                "so no text can be given to it"
            )
        windows = [window for some in self._windows_by_text.values() for window in some]
        if not windows:
            raise UserError("the texts have fewer than two tokens; give longer ones")
        if any(max(window.ids) >= spec.vocab_size for window in windows):
            raise UserError(
                f"{self._loaded.name}: its tokenizer gives token ids beyond the model's "
                f"vocabulary of {spec.vocab_size}; they do not belong together"
            )
        return windows

    @cached_property
    def _windows_by_text(self) -> dict[str, list[Window]]:
        tokenizer = self._loaded.tokenizer
        return {
            path: cut_windows(text, tokenizer, self.context, self._lead)
            for path, text in self._texts.items()
        }

    @cached_property
    def windows(self) -> list[Window]:
        """Windows for perplexity, spread over all texts.

        Raises:
            UserError: there is no tokenizer, or no text worth the name.
        """
        return spread(self._all_windows, self._options.tokens)

    @cached_property
    def recall(self) -> dict[int, list[RecallPrompt]]:
        """Questions by distance.

        Raises:
            UserError: as :attr:`windows`, or no distance fits the model.
        """
        spec, options = self._loaded.spec, self._options
        tokenizer, _ = self._loaded.tokenizer, self._all_windows

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids

        generator = RecallGenerator(encode, "\n".join(self._texts.values()), self._lead)
        distances = options.distances
        if distances is None:
            wanted = [factor * spec.index_topk for factor in _DISTANCES]
            distances = tuple(d for d in wanted if generator.longest(d) <= self.context)
        if not distances:
            raise UserError(f"no recall prompt fits a context of {self.context}; see --distances")
        prompts = generator.prompts(distances, options.prompts, options.seed)
        longest = max(len(p.ids) + len(p.answer) for group in prompts.values() for p in group)
        if longest > spec.max_position_embeddings:
            raise UserError(
                f"a recall prompt at distance {max(distances)} has {longest} tokens, more than "
                f"the model's limit of {spec.max_position_embeddings}; see --distances"
            )
        return prompts

    @property
    def longest(self) -> int:
        """No sequence has more tokens than this, generated ones included."""
        furthest = max(self._options.distances or (0,)) + 256
        return max(self.context, furthest) + self._options.generate

    @cached_property
    def around_topk(self) -> dict[int, list[list[int]]]:
        """Sequences by length, below, at and above ``index_topk``."""
        lengths = lengths_around(self._loaded.spec.index_topk, self.context)
        longest = self.sequences(lengths[-1])
        return {length: [ids[:length] for ids in longest] for length in lengths}

    def sequences(self, length: int) -> list[list[int]]:
        """A few sequences of exactly ``length`` tokens, from all over the texts."""
        return self._pieces([length] * self._options.sequences)

    def prompts(self, count: int, longest: int) -> list[list[int]]:
        """Prompts of eight lengths, spaced evenly in their logarithms, up to ``longest``."""
        lengths = np.geomspace(min(8, longest), longest, 8).round().astype(int).tolist()
        return self._pieces([lengths[index % 8] for index in range(count)])

    def prompts_by_text(self, count: int, longest: int) -> dict[str, list[list[int]]]:
        """Prompts as of :meth:`prompts`, about ``count``, as many from each text, by its path.

        Without a tokenizer they are random, under an empty name.
        """
        if self._loaded.tokenizer is None:
            return {"": self.prompts(count, longest)}
        each, found = -(-count // len(self._texts)), {}
        for path, windows in self._windows_by_text.items():
            pool = self._pool(windows)
            most = min(longest, len(pool))
            lengths = np.geomspace(min(8, most), most, min(8, each)).round().astype(int).tolist()
            found[path] = self._cut(pool, [lengths[n % len(lengths)] for n in range(each)])
        return found

    def _pieces(self, lengths: Sequence[int]) -> list[list[int]]:
        """Pieces of the texts, begin token first, from places spread over all of them."""
        if self._loaded.tokenizer is None:
            vocab_size = self._loaded.spec.vocab_size
            pool = random_windows(vocab_size, 1, 8 * max(lengths), self._options.seed)[0]
        else:
            pool = self._pool(self._all_windows)
        return self._cut(pool, lengths)

    def _pool(self, windows: Sequence[Window]) -> list[int]:
        return [i for window in windows for i in window.ids[len(self._lead) :]]

    def _cut(self, pool: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        lead = self._lead
        room = len(pool) + len(lead) - max(lengths)
        if room < 0:
            raise UserError(
                f"the texts have {len(pool)} tokens, {max(lengths)} in a row are needed; "
                "give more text or a smaller --context"
            )
        starts = np.linspace(0, room, len(lengths)).astype(int).tolist()
        return [
            [*lead, *pool[start : start + length]][:length]
            for start, length in zip(starts, lengths, strict=True)
        ]


def make_material(loaded: LoadedArtifact, options: Options) -> Material:
    """Read the texts and prepare for one artifact.

    Raises:
        UserError: a text cannot be read, or ``context`` exceeds the model's limit.
    """
    texts = read_texts(options.texts) if loaded.tokenizer is not None else {}
    return Material(loaded, texts, options)
