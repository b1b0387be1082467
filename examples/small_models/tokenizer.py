"""A tokenizer that needs no download: one token a byte."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def save_byte_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json``: one token a byte, ``<bos>`` = 0, ``<eos>`` = 1, 258 tokens in all.

    It loads with ``tokenizers.Tokenizer.from_file`` and encodes without adding special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<bos>", "<eos>"]
    vocab = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))


def with_tags(tokenizer: dict[str, Any], tags: Sequence[str]) -> dict[str, Any]:
    """A ``tokenizer.json`` of byte pairs whose last merges give their ids to tags."""
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    ids = sorted(vocabulary.values())[-len(tags) :]
    gone = {text for text, id_ in vocabulary.items() if id_ in ids}
    kept = [m for m in merges if "".join(m if isinstance(m, list) else m.split(" ")) not in gone]
    like = tokenizer["added_tokens"][-1]
    added = [{**like, "id": id_, "content": tag} for id_, tag in zip(ids, tags, strict=True)]
    vocabulary = {text: id_ for text, id_ in vocabulary.items() if text not in gone}
    return {
        **tokenizer,
        "model": {**tokenizer["model"], "vocab": vocabulary, "merges": kept},
        "added_tokens": [*tokenizer["added_tokens"], *added],
    }
