"""Collect text that every Python and Debian machine has, train the tokenizer, tokenise.

    python -m examples.tiny_v32.corpus --out examples/tiny_v32/corpus

writes ``tokenizer.json``, ``train.npy`` and ``heldout.npy`` (uint16 token ids; each file between a
begin- and an end-of-sentence token), ``heldout.txt`` and ``corpus.json`` (what was read).
"""

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from examples.tiny_v32.config import TinyConfig
from examples.tiny_v32.tokenizer import save_tokenizer, train_tokenizer

_SUFFIXES = (".py", ".txt", ".rst", ".md")
_SKIP = ("site-packages", "dist-packages", "__pycache__", "lib2to3", "encodings", "cjkencodings")
_MAX_FILE = 200_000  # bytes: larger ones are tables
_HELD_OUT_SHARE = 0.06
_HELD_OUT_BYTES = 290_000  # of the standard library; the committed file


def text_files(root: Path) -> Iterator[tuple[str, str]]:
    """(path below ``root``, text) of every readable UTF-8 text file, in order of the path."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.suffix not in _SUFFIXES or set(relative.parts) & set(_SKIP):
            continue
        if not path.is_file() or not 200 <= path.stat().st_size <= _MAX_FILE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if max(map(len, text.split("\n"))) < 400:
            yield str(relative), text.strip() + "\n"


def is_held_out(text: str) -> bool:
    """The split: by hash of the content, so a file is on one side wherever it lies."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") < _HELD_OUT_SHARE * 2**32


def encode(tokenizer: Tokenizer, texts: Iterable[str], config: TinyConfig) -> NDArray[np.uint16]:
    """All texts in one stream."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        stream += [*encoding.ids, config.eos_token_id]
    return np.array(stream, dtype=np.uint16)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "corpus")
    parser.add_argument("--tokenizer", type=Path, help="take this folder's; else it is trained")
    parser.add_argument("--docs", type=Path, default=Path("/usr/share/doc"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    library = dict(text_files(Path(sysconfig.get_path("stdlib"))))
    documents = dict(text_files(args.docs)) if args.docs.is_dir() else {}
    # Packages install the same licence texts and changelogs many times.
    seen: set[str] = set()
    train, held_out, held_out_size = [], [], 0
    for source, files in (("library", library), ("documents", documents)):
        for name, text in files.items():
            if text in seen:
                continue
            seen.add(text)
            if not is_held_out(text):
                train.append(text)
            elif source == "library" and "test" not in name:
                held_out.append(text)
                held_out_size += len(text)
    print(f"{len(train)} files, {sum(map(len, train)) / 1e6:.1f} M characters to train on")
    print(f"{len(held_out)} files, {held_out_size / 1e6:.2f} M characters held out")

    config = TinyConfig()
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(train, config.vocab_size)
    save_tokenizer(tokenizer, args.out, config.max_position_embeddings)
    arrays = {name: encode(tokenizer, t, config) for name, t in (("train", train),)}
    committed = "\n".join(held_out).encode()[:_HELD_OUT_BYTES].decode(errors="ignore")
    arrays["heldout"] = encode(tokenizer, [committed], config)
    for name, array in arrays.items():
        np.save(args.out / f"{name}.npy", array)
        print(f"{name}: {len(array) / 1e6:.2f} M tokens")
    (args.out / "heldout.txt").write_text(committed, encoding="utf-8")
    facts = {
        "python": sys.version.split()[0],
        "train_files": len(train),
        "train_tokens": len(arrays["train"]),
        "heldout_files": len(held_out),
        "heldout_tokens": len(arrays["heldout"]),
    }
    (args.out / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
