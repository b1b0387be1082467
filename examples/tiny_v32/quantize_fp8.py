"""Derive the FP8 copy of a checkpoint: DeepSeek's block format.

    python -m examples.tiny_v32.quantize_fp8 --out /tmp/tiny_v32_fp8

Projections become float8_e4m3fn with one fp32 ``weight_scale_inv`` for each block of 128 × 128, the
grid rounded up at the edges; scales are powers of two (``ue8m0``) as in the released model. Norms,
embeddings, heads, routers, the indexer's head weights and ``eh_proj`` stay as they are.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.tiny_v32.blocks import BLOCK, quantize
from examples.tiny_v32.choice import DATA
from examples.tiny_v32.export import FILE, shard_index, write_json

_KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj", "head.")


def quantize_checkpoint(source: Path, out: Path) -> None:
    """Write the FP8 copy of ``source`` to ``out``, a new directory."""
    out.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / FILE).items():
        if tensor.dim() == 2 and not any(part in name for part in _KEPT):
            tensors[name], tensors[name + "_scale_inv"] = quantize(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, out / FILE, metadata={"format": "pt"})
    write_json(out / "model.safetensors.index.json", shard_index(tensors))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
    }
    write_json(out / "config.json", config)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, out / name)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=DATA / "checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="a directory that does not exist")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists; name a new directory")
    quantize_checkpoint(args.checkpoint, args.out)
    print(f"{args.out}: {(args.out / FILE).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
