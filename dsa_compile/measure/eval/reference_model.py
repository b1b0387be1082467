"""The reference model of transformers in fp32, with weights that our loader has not touched.

transformers loads them itself where it can. It cannot load FP8 blocks without a GPU: those are read
by :class:`~dsa_compile.measure.eval.stored_weights.StoredWeights`. The functions import
transformers when called.
"""

from pathlib import Path
from typing import Any

import torch

from dsa_compile.errors import CheckpointError, UserError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.stored_weights import StoredWeights

NO_MODEL = "transformers has no model of text alone"
"""Reason why nothing is compared with a reference where :func:`has_reference` is false."""


def load_reference(model_dir: Path, spec: ModelSpec) -> Any:
    """The model in eval mode.

    Args:
        model_dir: config.json and weights.
        spec: its geometry.

    Raises:
        UserError: transformers is not installed, refuses the model, or misses weights of it.
    """
    config, reference = _config_and_class(model_dir)
    if spec.quantization is None:
        return _loaded_by_transformers(model_dir, config, reference).eval()
    with torch.random.fork_rng():
        model = reference._from_config(config, attn_implementation="sdpa")
    stored = StoredWeights(model_dir, spec.quantization.block)
    for name, tensor in model.state_dict().items():
        value = stored.tensor(name)
        if value.shape != tensor.shape:
            raise _misshapen(model_dir, name, tuple(value.shape), tuple(tensor.shape))
        tensor.copy_(value)
    return model.eval()


def has_reference(model_dir: Path) -> bool:
    """Whether transformers has a class that makes logits of text alone, for the model's type.

    Raises:
        UserError: transformers is not installed or refuses the configuration.
    """
    return _runs_alone(_config_and_architecture(model_dir)[1])


def parameter_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of transformers' model by name; no memory is taken.

    Raises:
        UserError: transformers is not installed or refuses the model.
    """
    from dsa_compile.frontend.reference import parameter_shapes as shapes_of

    return shapes_of(*_config_and_class(model_dir))


def _config_and_class(model_dir: Path) -> tuple[Any, Any]:
    config, architecture = _config_and_architecture(model_dir)
    if not _runs_alone(architecture):
        raise UserError(
            f"comparing with transformers is not supported for model_type={config.model_type!r}: "
            "no class there makes logits of text alone"
        )
    return config, architecture.model


def _runs_alone(architecture: Any) -> bool:
    from transformers import PreTrainedModel

    return issubclass(architecture.model, PreTrainedModel)


def _config_and_architecture(model_dir: Path) -> tuple[Any, Any]:
    try:
        from dsa_compile.frontend.architectures import architecture_of, load_config
        from dsa_compile.frontend.config_json import read_config_json
    except ImportError as error:
        raise UserError(f"comparing with transformers needs it installed ({error})") from None
    raw = read_config_json(model_dir)
    config = load_config(raw)
    config.dtype = torch.float32
    return config, architecture_of(raw)


def _loaded_by_transformers(model_dir: Path, config: Any, reference: Any) -> Any:
    from transformers.utils import logging

    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # it lists the tensors of MTP layers, which are not loaded
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = reference.from_pretrained(
            model_dir,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        line = " ".join(str(error).split())
        raise CheckpointError(f"{model_dir}: transformers cannot load it: {line:.200}") from None
    finally:
        logging.set_verbosity(shown)
        if bar:
            logging.enable_progress_bar()
    for missing in sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise CheckpointError(f"{model_dir}: {missing!r} is not stored")
    return model


def _misshapen(
    model_dir: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> CheckpointError:
    return CheckpointError(
        f"{model_dir}: {name!r} is stored as {list(found)}, transformers wants {list(wanted)}"
    )
