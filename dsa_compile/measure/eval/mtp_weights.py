"""The multi-token-prediction module of a checkpoint: a decoder layer and what feeds it.

Hub layout: layer ``num_hidden_layers`` holds a mixture-of-experts decoder layer under the usual
names, and ``enorm``, ``hnorm``, ``eh_proj``, ``embed_tokens``, ``shared_head.norm`` and
``shared_head.head``.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.weights.canonical import ParameterInfo, canonical_parameters, compute_dtype
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.layout import stored_parts
from dsa_compile.weights.shard_index import read_shard_index
from dsa_compile.weights.validation import check_part, open_homes, require_keys


def load_mtp(model_dir: Path, spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The module's weights by name without the layer's prefix, in ``dtype`` or fp32.

    The same parameters as in other layers stay fp32.

    Raises:
        CheckpointError: the model has no such module, or it is incomplete or misshapen.
    """
    if not spec.num_nextn_predict_layers:
        raise CheckpointError(
            f"{model_dir}: config.json has num_nextn_predict_layers 0: the model cannot draft"
        )
    prefix = f"model.layers.{spec.num_hidden_layers}."
    checkpoint = _open(model_dir, spec, _parameters(spec, prefix))
    weights = {}
    for name in _parameters(spec, prefix):
        out = torch.empty(checkpoint.shape(name), dtype=compute_dtype(name, dtype))
        checkpoint.read_into(name, out)
        weights[name.removeprefix(prefix)] = out
    return weights


def _parameters(spec: ModelSpec, prefix: str) -> dict[str, ParameterInfo]:
    layer = spec.num_hidden_layers
    kind = next(k.name for k in spec.kinds if k.mlp == "experts" and k.indexer)
    longer = replace(spec, num_hidden_layers=layer + 1, layer_kinds=(*spec.layer_kinds, kind))
    decoder = {
        name: info
        for name, info in canonical_parameters(longer, [layer]).items()
        if name.startswith(prefix)
    }
    hidden, vocab = spec.hidden_size, spec.vocab_size
    own = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (vocab, hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }
    return decoder | {prefix + name: ParameterInfo(shape, False) for name, shape in own.items()}


def _open(model_dir: Path, spec: ModelSpec, parameters: Mapping[str, ParameterInfo]) -> Checkpoint:
    """A checkpoint that gives these parameters and cares for no others."""
    index = read_shard_index(model_dir)
    parts = {name: stored_parts(name, info.shape, index) for name, info in parameters.items()}
    wanted = [part for group in parts.values() for part in group]
    require_keys(model_dir, [part.key for part in wanted], index)
    used = {part.key for part in wanted}
    used |= {part.scale_key for part in wanted if part.scale_key in index}
    homes = open_homes(model_dir, used, index)
    block = spec.quantization.block if spec.quantization else None
    for part in wanted:
        check_part(part, homes, block)
    return Checkpoint(model_dir, parameters, parts, homes, block, ())
