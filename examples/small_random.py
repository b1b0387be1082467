"""Write a small DeepSeek-V3.2 model with random weights, to try the tools on.

    python examples/small_random.py demo/model

The directory has what a downloaded model has: config.json, model.safetensors, tokenizer.json (one
token a byte). The same seed gives the same bytes. The weights are random, so the text is too.
"""

import argparse
import tempfile
from pathlib import Path

from small_models.models import save_byte_tokenizer, save_hf, tiny_config, tiny_model
from transformers.utils.logging import disable_progress_bar


def write_model(directory: Path, layers: int, seed: int) -> None:
    """Write the model; ``directory`` must not exist, and appears whole or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        whole = Path(temporary, "model")
        # 258 tokens: <bos>, <eos> and a byte each
        config = tiny_config(layers, vocab_size=258, bos_token_id=0, eos_token_id=1)
        save_hf(tiny_model(config, seed=seed), whole)
        save_byte_tokenizer(whole)
        whole.rename(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where to write the model; must not exist")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    args = parser.parse_args()
    if args.directory.exists():
        parser.error(f"{args.directory} exists; remove it or choose another")
    disable_progress_bar()
    write_model(args.directory, args.layers, args.seed)
    size = sum(file.stat().st_size for file in args.directory.iterdir())
    print(f"{args.directory}: a random model of {args.layers} layers, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
