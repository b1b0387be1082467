"""A tokenizer that needs no download: one token a byte."""

from pathlib import Path

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
