"""Damage to a model directory, and what else several of these tests need."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NORM = "model.layers.0.input_layernorm.weight"
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json"]


def shard_of(model: Path, key: str) -> Path:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    return model / index["weight_map"][key]


def edit_shard(model: Path, key: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    path = shard_of(model, key)
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
