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

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.tiny_v32.export import FILE, shard_index, write_json

BLOCK = 128
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj", "head.")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [N, K] and fp32 scales [ceil(N / 128), ceil(K / 128)] of ``weight`` [N, K]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [r, 128, c, 128]
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-8)
    scale = torch.exp2(torch.ceil(torch.log2(largest / _E4M3_MAX)))
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored.view(padded.shape)[:rows, :columns].contiguous(), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [N, K]: the value that :func:`quantize` stored."""
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


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
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=here / "checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="a directory that does not exist")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists; name a new directory")
    quantize_checkpoint(args.checkpoint, args.out)
    print(f"{args.out}: {(args.out / FILE).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
