"""Small random models, and writers for the checkpoint layouts found in the wild.

The models are the reference implementations of transformers with weights scaled so that every part
of it matters: attention is peaked, routing is uneven, norms and biases are not identities.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from .geometries import (
    tiny_axk2_config,
    tiny_config,
    tiny_glm_config,
    tiny_mistral_config,
    yarn_parameters,
)
from .tokenizer import save_byte_tokenizer

__all__ = [
    "dequantise",
    "dequantised_twin",
    "hub_config",
    "quantise",
    "save_byte_tokenizer",
    "save_hf",
    "save_hub",
    "tiny_axk2_config",
    "tiny_config",
    "tiny_glm_config",
    "tiny_mistral_config",
    "tiny_model",
    "yarn_parameters",
]

FP8_BLOCK = (128, 128)
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# Parameters the reference keeps in fp32 when the rest of the model is bf16.
_FP32_SUFFIXES = ("indexer.weights_proj.weight", "mlp.gate.e_score_correction_bias")
# What DeepSeek stores unquantised, beside everything that is not a matrix.
_UNQUANTISED = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "eh_proj", "head.")


def tiny_model(
    config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The reference model with random weights that depend on ``seed`` alone, in eval mode.

    With ``dtype=torch.bfloat16`` the weights are the fp32 model's, rounded, except those that must
    stay in fp32 (the indexer's ``weights_proj``, the router's bias or matrix, RoPE's frequencies).
    A matrix beside a bias is rounded, as published checkpoints store it, though transformers keeps
    it in fp32 from 5.24 on.
    """
    text_only = type(config) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    with torch.random.fork_rng():
        model = auto.from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            _fill(name, tensor, generator)
        if dtype != torch.float32:
            strict = tuple(model._keep_in_fp32_modules_strict or ())
            names = set(model.state_dict())
            for name, parameter in model.named_parameters():
                bias = name.removesuffix("gate.weight") + "gate.e_score_correction_bias"
                rounded = parameter.data.to(dtype)
                if not name.endswith((*_FP32_SUFFIXES, *strict)):
                    parameter.data = rounded
                elif bias in names:
                    parameter.data = rounded.to(parameter.dtype)
            model.config.dtype = dtype
    made: PreTrainedModel = model.eval()
    return made


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.dim() > 1:
        # Unit-variance outputs for unit-variance inputs; embeddings have no fan-in.
        scale = 1.0 if "embed_tokens" in name else tensor.shape[-1] ** -0.5
        tensor.normal_(0.0, scale, generator=generator)
    elif name.endswith(("norm.weight", "softmax_scaling.bias")):
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith("rotary_emb.alpha"):
        tensor.normal_(0.0, 0.3, generator=generator)
    else:  # the router's e_score_correction_bias and the index key norm's bias
        tensor.normal_(0.0, 0.05, generator=generator)


def save_hf(
    model: PreTrainedModel,
    directory: Path,
    *,
    max_shard_size: str = "5GB",
    fused_experts: bool = False,
) -> None:
    """Write ``model`` as ``save_pretrained`` does (one tensor an expert), or with fused experts.

    ``fused_experts`` writes one file whose keys are those of ``model.state_dict()``.
    """
    directory = Path(directory)
    if not fused_experts:
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def save_hub(
    model: PreTrainedModel,
    directory: Path,
    *,
    fp8: bool = True,
    shards: int = 3,
    mtp: bool = True,
    seed: int = 0,
) -> None:
    """Write ``model`` (fp32) as DeepSeek and Z.ai publish theirs.

    Per-expert keys over ``shards`` files with an index; with ``fp8`` the projections are
    float8_e4m3fn with fp32 ``weight_scale_inv`` (one a 128×128 block, grids rounded up), the rest
    bf16, the router's bias and the index key norm fp32. ``mtp`` adds a multi-token-prediction layer
    of random weights after the last layer.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _stored(_per_expert(model.state_dict()), fp8)
    if mtp:
        tensors.update(_stored(_mtp_layer(model, seed), fp8))
    files: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    # Round robin in key order: a weight and its scale often land in different files, as upstream.
    for position, name in enumerate(sorted(tensors)):
        files[position % shards][name] = tensors[name]
    weight_map = {}
    for number, content in enumerate(files, start=1):
        file_name = f"model-{number:05d}-of-{shards:06d}.safetensors"
        save_file(content, directory / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(content, file_name))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", hub_config(model.config, fp8=fp8, mtp=mtp))


def dequantised_twin(model: PreTrainedModel, *, fp8: bool = True) -> PreTrainedModel:
    """A copy of ``model`` in fp32 that holds exactly what :func:`save_hub` stored for it."""
    twin = copy.deepcopy(model)
    stored = _stored(_per_expert(model.state_dict()), fp8)

    def value(name: str) -> Tensor:
        scale = stored.get(name + "_scale_inv")
        return stored[name].float() if scale is None else dequantise(stored[name], scale)

    with torch.no_grad():
        for name, tensor in twin.state_dict().items():
            prefix, _, leaf = name.rpartition(".")
            if leaf not in ("gate_up_proj", "down_proj"):
                tensor.copy_(value(name))
                continue
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            for expert, matrix in enumerate(tensor):
                names = [f"{prefix}.{expert}.{part}.weight" for part in parts]
                matrix.copy_(torch.cat([value(n) for n in names]))
    return twin


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [N, K] to float8_e4m3fn with fp32 scales [ceil(N/128), ceil(K/128)]."""
    rows, columns = weight.shape
    grid = tuple(-(-size // block) for size, block in zip(weight.shape, FP8_BLOCK, strict=True))
    padded = weight.new_zeros(grid[0] * FP8_BLOCK[0], grid[1] * FP8_BLOCK[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], FP8_BLOCK[0], grid[1], FP8_BLOCK[1])
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-8) / _FP8_MAX
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return stored[:rows, :columns].contiguous(), scale.float()


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    """The inverse of :func:`quantise`: fp32 [N, K]. Written apart from the loader, to check it."""
    rows = torch.arange(weight.shape[0]) // FP8_BLOCK[0]
    columns = torch.arange(weight.shape[1]) // FP8_BLOCK[1]
    return weight.float() * scale[rows][:, columns]


def hub_config(config: PreTrainedConfig, *, fp8: bool = True, mtp: bool = True) -> dict[str, Any]:
    """``config.json`` in the words of the published ones (``rope_scaling``, dense-layer count)."""
    values: dict[str, Any] = config.to_dict()
    rope = dict(values.pop("rope_parameters"))
    kinds = values["mlp_layer_types"]
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds == ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        del values["mlp_layer_types"]
    for name in ("layer_types", "mlp_bias", "head_dim", "dtype", "transformers_version"):
        values.pop(name, None)
    if rope["rope_type"] == "default":
        values["rope_parameters"] = rope
    else:
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    values |= {
        "architectures": [AutoModelForCausalLM._model_mapping[type(config)].__name__],
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": int(mtp),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    }
    if fp8:
        values["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(FP8_BLOCK),
        }
    return values


def _per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(_split_experts(state))


def _split_experts(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif leaf == "down_proj":
            for expert, matrix in enumerate(tensor):
                yield f"{prefix}.{expert}.down_proj.weight", matrix
        else:
            yield name, tensor


def _stored(state: dict[str, Tensor], fp8: bool) -> dict[str, Tensor]:
    stored = {}
    for name, tensor in state.items():
        if fp8 and tensor.dim() == 2 and not any(part in name for part in _UNQUANTISED):
            stored[name], stored[name + "_scale_inv"] = quantise(tensor.float())
        elif "e_score_correction_bias" in name or "k_norm" in name:
            stored[name] = tensor.float().clone()
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def _mtp_layer(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """Layer ``num_hidden_layers``: random weights, but for copies of embedding and head."""
    config = model.config
    prefix = f"model.layers.{config.num_hidden_layers}."
    block = copy.deepcopy(config)
    block.num_hidden_layers, block.mlp_layer_types = 1, ["sparse"]
    block.layer_types = config.layer_types[:1]
    if hasattr(block, "indexer_types"):
        block.indexer_types = ["full"]
    state = _per_expert(tiny_model(block, seed=seed + 1).state_dict())
    layer = {
        prefix + name.removeprefix("model.layers.0."): tensor
        for name, tensor in state.items()
        if name.startswith("model.layers.0.")
    }
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layer[f"{prefix}embed_tokens.weight"] = embedding.weight.clone()
    layer[f"{prefix}shared_head.head.weight"] = head.weight.clone()
    hidden = config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }
    for name, shape in shapes.items():
        layer[prefix + name] = torch.empty(shape)
        _fill(name, layer[prefix + name], generator)
    return layer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
