"""Tensors that a checkpoint holds and no weight needs: left out with a note, or refused."""

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.weights.canonical import replaced_by_sharing
from dsa_compile.weights.layout import stored_parts

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_IGNORED = "{} tensors ignored, as --ignore-tensors says"
_BESIDE = "{} tensors beside the text model skipped"
_FREQUENCIES = "{} tensors of RoPE's frequencies skipped, which are computed"
_SHARED = "{} tensors skipped of layers that take what an earlier layer selected or made"
_ANOTHER_LAYER, _UNEXPECTED = "", "unexpected"


def set_aside(
    model_dir: Path,
    unused: Collection[str],
    plain: Mapping[str, str],
    spec: ModelSpec,
    layers: Sequence[int],
    ignored: Sequence[str],
) -> tuple[str, ...]:
    """Notes on what is skipped on purpose; raises CheckpointError for what should not be there.

    Args:
        model_dir: for errors.
        unused: keys that no parameter needs.
        plain: those of them that give scales of weights that are not quantised, with their types.
        spec: of the model.
        layers: that are wanted.
        ignored: patterns of keys for which the user does not want to be refused.
    """
    found: dict[str, list[str]] = {}
    shared = _parts_of_sharing(unused, spec, layers)
    for key in unused:
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in ignored):
            why = _IGNORED
        elif key in shared:
            why = _SHARED
        else:
            why = _reason(key, spec, layers)
        found.setdefault(why, []).append(key)
    for pattern in ignored:
        if not fnmatch.filter(found.get(_IGNORED, ()), pattern):
            raise CheckpointError(
                f"{model_dir}: --ignore-tensors {pattern!r} names no tensor that is stored and not "
                "needed"
            )
    if _UNEXPECTED in found:
        raise _refusal(model_dir, sorted(found[_UNEXPECTED]), plain)
    found.pop(_ANOTHER_LAYER, None)
    return tuple(why.format(len(found[why])) for why in sorted(found))


def _parts_of_sharing(
    unused: Collection[str], spec: ModelSpec, layers: Sequence[int]
) -> frozenset[str]:
    """What transformers leaves out of layers that use an earlier layer's selection or latents."""
    names = [named for layer in layers for named in replaced_by_sharing(spec, layer)]
    parts = [part for name, shape in names for part in stored_parts(name, shape, unused)]
    return frozenset(key for part in parts for key in (part.key, part.scale_key))


def _reason(key: str, spec: ModelSpec, layers: Sequence[int]) -> str:
    """The note for a key, or one of the two names that stand for none."""
    first = spec.num_hidden_layers
    match = _LAYER.match(key)
    layer = int(match[1]) if match else None
    if key.startswith(spec.other_parts):
        return _BESIDE
    if "rotary_emb.inv_freq" in key:  # wherever, as in transformers
        return _FREQUENCIES
    if layer is None or layer in layers or layer >= first + spec.num_nextn_predict_layers:
        return _UNEXPECTED
    return _ANOTHER_LAYER if layer < first else f"MTP layer {layer}: {{}} tensors skipped"


def _refusal(model_dir: Path, keys: Sequence[str], plain: Mapping[str, str]) -> CheckpointError:
    for key in keys:
        if key in plain:
            return CheckpointError(
                f"{model_dir}: {key!r} gives scales, but the weight is plain {plain[key]}; if "
                "transformers saved this, it never set those of matrices that are no whole blocks: "
                f"--ignore-tensors {key!r} leaves it out, and may have * in it"
            )
    listed = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return CheckpointError(
        f"{model_dir}: {len(keys)} tensors do not belong to this model: {listed}; does config.json "
        "belong to these weights? If no result needs them, give --ignore-tensors PATTERN"
    )
