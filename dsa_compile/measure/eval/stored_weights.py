"""The parameters of a model directory, read without the compiler's loader.

The loader (:mod:`dsa_compile.weights`) is checked against this one, so nothing is shared between
them: safetensors' own reader, whole tensors, and FP8 blocks dequantised as the checkpoint's format
defines them, value times the scale of its block.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dsa_compile.errors import CheckpointError

_EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class StoredWeights:
    """Parameters by the names of transformers' ``state_dict``, in fp32.

    Args:
        model_dir: ``model.safetensors``, or shards with an index.
        block: rows and columns of the FP8 blocks; None where nothing is quantised.
    """

    name = "the stored tensors, read by safetensors"

    def __init__(self, model_dir: Path, block: tuple[int, int] | None) -> None:
        self._model_dir = model_dir
        self._block = block
        self._files = _files(model_dir)

    def tensor(self, name: str) -> Tensor:
        """A parameter, fp32; experts as ``[E, 2I, H]`` (gate rows first) and ``[E, H, I]``.

        Raises:
            CheckpointError: it is not stored.
        """
        stem, _, leaf = name.rpartition(".")
        if not stem.endswith(".experts") or name in self._files:
            return self._stored(name)
        experts: list[Tensor] = []
        leaves = _EXPERT_MATRICES[leaf]
        common = self._scales(name) if f"{name}_scale_inv" in self._files else None
        while f"{stem}.{(number := len(experts))}.{leaves[0]}.weight" in self._files:
            scales = [None] * len(leaves) if common is None else common[number].chunk(len(leaves))
            keys = [f"{stem}.{number}.{part}.weight" for part in leaves]
            experts.append(torch.cat(list(map(self._stored, keys, scales))))
        if not experts:
            raise CheckpointError(f"{self._model_dir}: {name!r} is not stored")
        return torch.stack(experts)

    def _stored(self, key: str, scales: Tensor | None = None) -> Tensor:
        if key not in self._files:
            raise CheckpointError(f"{self._model_dir}: {key!r} is not stored")
        values = self._raw(key)
        if values.dtype is not torch.float8_e4m3fn:
            return values.float()
        assert self._block is not None, key
        scales = self._scales(key) if scales is None else scales
        row = torch.arange(values.shape[0]) // self._block[0]
        column = torch.arange(values.shape[1]) // self._block[1]
        return values.float() * scales[row][:, column]

    def _scales(self, key: str) -> Tensor:
        scales = self._raw(f"{key}_scale_inv")
        if scales.dtype is torch.uint8:  # the bytes of float8_e8m0fnu
            return torch.exp2(scales.float() - 127)
        return scales.float()

    def _raw(self, key: str) -> Tensor:
        with safe_open(self._model_dir / self._files[key], "pt") as file:
            found: Tensor = file.get_tensor(key)
            return found


def _files(model_dir: Path) -> Mapping[str, str]:
    """The file of every stored tensor; a lone file wins over an index, as in transformers."""
    single = "model.safetensors"
    if (model_dir / single).exists():
        with safe_open(model_dir / single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = json.loads((model_dir / f"{single}.index.json").read_text(encoding="utf-8"))
    weight_map: Mapping[str, str] = index["weight_map"]
    return weight_map
