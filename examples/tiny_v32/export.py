"""Write a trained model as DeepSeek publishes its own: hub keys, one tensor an expert, bf16.

    python -m examples.tiny_v32.export --run examples/tiny_v32/runs/first

fills ``checkpoint/`` of the model that ``--model`` names. The MTP module, where there is one, is
layer ``num_hidden_layers``; it repeats the embedding and the head under its own keys, as the hub's
files do.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.tiny_v32.blocks import dequantize
from examples.tiny_v32.choice import DATA, EXAMPLES, MODELS, add_model_argument, config_of
from examples.tiny_v32.config import TinyConfig
from examples.tiny_v32.model import TinyModel

FILE = "model.safetensors"
_FP32 = ("e_score_correction_bias", "k_norm.weight", "k_norm.bias")


def to_hub(state: dict[str, Tensor], config: TinyConfig) -> dict[str, Tensor]:
    """State dict of :class:`TinyModel` under the hub's keys and dtypes."""
    hub: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for key, part in _split_experts(_hub_name(name, config), tensor, config):
            dtype = torch.float32 if key.endswith(_FP32) else torch.bfloat16
            hub[key] = part.to("cpu", dtype).contiguous()
    if config.num_nextn_predict_layers == 0:
        return hub
    mtp = f"model.layers.{config.num_hidden_layers}."
    hub[mtp + "embed_tokens.weight"] = hub["model.embed_tokens.weight"].clone()
    hub[mtp + "shared_head.head.weight"] = hub["lm_head.weight"].clone()
    return hub


def load_checkpoint(directory: Path) -> TinyModel:
    """The training model in fp32 with the weights of an exported checkpoint, in eval mode.

    Weights in FP8 blocks are taken at the value that is stored.
    """
    config = config_of(directory)
    hub = load_file(directory / FILE)
    for name in [n for n in hub if n + "_scale_inv" in hub]:
        hub[name] = dequantize(hub[name], hub.pop(name + "_scale_inv"))
    model = TinyModel(config)
    state = {}
    for name, tensor in model.state_dict().items():
        parts = _split_experts(_hub_name(name, config), tensor, config)
        keys = [key for key, _ in parts]
        joined = torch.cat([hub[k] for k in keys], 1 if keys[0].endswith("down_proj.weight") else 0)
        state[name] = joined.float()
    model.load_state_dict(state)
    return model.eval()


def _hub_name(name: str, config: TinyConfig) -> str:
    if name == "lm_head.weight":
        return name
    mtp = f"model.layers.{config.num_hidden_layers}."
    for ours, theirs in (("mtp.layer.", mtp), ("mtp.norm.", mtp + "shared_head.norm.")):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return mtp + name.removeprefix("mtp.") if name.startswith("mtp.") else "model." + name


def _split_experts(name: str, tensor: Tensor, config: TinyConfig) -> Iterator[tuple[str, Tensor]]:
    """The matrices of the single experts, if ``name`` holds them all, in order of the expert."""
    prefix, _, leaf = name.partition(".mlp.")
    layer = int(prefix.rpartition(".")[2]) if leaf else 0
    if layer < config.first_k_dense_replace or leaf not in (
        "gate_proj.weight", "up_proj.weight", "down_proj.weight",
    ):  # fmt: skip
        yield name, tensor
        return
    dim = 1 if leaf.startswith("down") else 0
    for expert, part in enumerate(tensor.chunk(config.n_routed_experts, dim)):
        yield f"{prefix}.mlp.experts.{expert}.{leaf}", part


def write_checkpoint(model: TinyModel, tokenizer_from: Path, out: Path) -> None:
    """Fill ``out`` with weights, index, configuration and the tokenizer of ``tokenizer_from``."""
    config = model.config
    out.mkdir(parents=True, exist_ok=True)
    tensors = to_hub(model.state_dict(), config)
    save_file(tensors, out / FILE, metadata={"format": "pt"})
    write_json(out / "model.safetensors.index.json", shard_index(tensors))
    write_json(out / "config.json", config.to_hub())
    generation = {
        "_from_model_config": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": False,
    }
    write_json(out / "generation_config.json", generation)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if tokenizer_from.resolve() != out.resolve():
            shutil.copyfile(tokenizer_from / name, out / name)


def shard_index(tensors: dict[str, Tensor]) -> dict[str, object]:
    """``model.safetensors.index.json`` of a checkpoint in one file."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), FILE)}


def write_json(path: Path, value: object) -> None:
    """Write ``value`` indented."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_argument(parser)
    parser.add_argument("--run", type=Path, help="default: runs/default of the model")
    parser.add_argument(
        "--tokenizer", type=Path, default=DATA / "corpus", help="a folder that has it"
    )
    parser.add_argument("--out", type=Path, help="default: checkpoint of the model")
    args = parser.parse_args()
    home = EXAMPLES / args.model
    model = TinyModel(MODELS[args.model])
    state = torch.load((args.run or home / "runs" / "default") / "state.pt", map_location="cpu")
    model.load_state_dict(state["model"])
    out = args.out or home / "checkpoint"
    write_checkpoint(model, args.tokenizer, out)
    size = (out / FILE).stat().st_size
    print(f"{out}: {size / 1e6:.2f} MB after {state['seconds']:.0f} s of training")


if __name__ == "__main__":
    main()
