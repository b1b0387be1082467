"""Options of a compilation: the user's choices, frozen and hashed whole."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from dsa_compile.common.option_keywords import has_options
from dsa_compile.common.options import Option, check, option
from dsa_compile.errors import OptionValueError, UserError
from dsa_compile.facts.formats import E4M3_TENSOR, RECIPES, Recipe, recipes_with
from dsa_compile.facts.gpus import AUTO, choose_target
from dsa_compile.facts.layout import ONE_RANK, Layout

# `dsa-compile --help` prints the choices below and should not wait for torch.
if TYPE_CHECKING:
    import torch

GPUS = ("sm_90a", "sm_100a")
TARGETS = ("cpu", *GPUS)
_MACHINES = {
    AUTO: "the GPU here",
    "cpu": "any machine",
    "sm_90a": "Hopper: H100, H200",
    "sm_100a": "Blackwell: B200",
}
WEIGHT_MODES = ("reference", "pack", "none")
DRAFTS = ("mtp",)
# Guesses of a step; more than the published models are trained for gain nothing.
MOST_DRAFTS = 4
# Peers' kernels page by 64 rows; smaller pages divide it and share finer prefixes.
BLOCK_SIZES = (16, 32, 64)


_LEAST_SCALE = 2.0**-64  # of keys and values: beyond it products leave fp32


def _layers(text: str) -> tuple[int, int]:
    """Layers written as ``0-3``, or as ``0``."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise UserError(f"{text!r} is not a range such as 0-3")
    return int(first), int(last or first)


@dataclass(frozen=True)
class AddedPass:
    """A pass from outside the package.

    Attributes:
        name: in the pipeline.
        where: its class, as ``"module:Class"``.
        after: name of the pass or level that it runs after.
        package: name and version of the package that adds it; empty for a pass handed to
            :func:`dsa_compile.compile`.
    """

    name: str
    where: str
    after: str
    package: str = ""


@has_options
@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Options of one compilation; :func:`dsa_compile.compile` takes the same.

    Making one checks what can be checked without the model. Sequences may be lists, and paths
    :class:`~pathlib.Path`; they are kept as tuples and as text.

    Args:
        layout: the ranks that run the model together: a :class:`~dsa_compile.facts.layout.Layout`,
            whose JSON is left out for a single one.
        added_passes: those added from outside the package, in the order in which they were put in.

    Raises:
        UserError: an option has a wrong value, or two contradict each other.
    """

    target: str = option(
        AUTO, "machine to compile for", unset="auto, by the GPU here; cpu without one",
        metavar=f"{{{','.join((AUTO, *TARGETS))}}}",
    )  # fmt: skip
    recipe: str = option(
        AUTO, "precision of weights, activations and caches", choices=tuple(RECIPES),
        unset="auto: fp32 on a CPU, which gives the reference model's tokens; on a GPU fp8 for a "
        "checkpoint in FP8 blocks, else bf16",
    )  # fmt: skip
    weights: str = option(
        "reference", "reference: stay where they are, the artifact names the files and their "
        "hashes; pack: copy them into the artifact, as the graphs take them; none: graphs only, "
        "config.json is enough", choices=WEIGHT_MODES,
    )  # fmt: skip
    layers: tuple[int, int] | None = option(
        None, "only decoder layers A to B, counted from 0", parse=_layers, metavar="A-B"
    )
    block_size: int = option(
        64, "tokens in a page of the caches", unit="tokens", choices=BLOCK_SIZES
    )
    disable: Sequence[str] = option(
        (), "leave out these passes; PASS+ takes along all that need it", several="commas",
        metavar="PASS",
    )  # fmt: skip
    stop_after: str | None = option(
        None, "end after this pass, for an artifact to read, not to run", metavar="PASS"
    )
    kernels: Sequence[str] = option(
        (), "take this provider's kernel for an op; may be repeated", metavar="OP=PROVIDER",
        also=("kernel",),
    )  # fmt: skip
    records: bool = option(True, "keep what each pass did, which dsa-inspect shows")
    kv_scale: float = option(
        1.0, "scale of the latent cache in recipe fp8-kv-tensor, one for all layers: a value is "
        "stored as e4m3 of itself over the scale, so magnitudes above 448 times it saturate",
        least=_LEAST_SCALE, most=1 / _LEAST_SCALE,
    )  # fmt: skip
    profile: str | None = option(
        None, "decide what overlaps by times measured on the target (dsa-bench step --profile); by "
        "estimates without", metavar="FILE",
    )  # fmt: skip
    pass_options: Sequence[str] = option(
        (), "set an option of a pass, such as overlap_streams.streams=3; may be repeated",
        metavar="PASS.NAME=VALUE", also=("option",),
    )  # fmt: skip
    added_passes: tuple[AddedPass, ...] = ()
    compiled_kernels: bool = option(
        True, "ship machine code of the CUDA kernels, if NVRTC is installed here; without, loading "
        "compiles what it needs",
    )  # fmt: skip
    draft: str | None = option(
        None, "draft tokens with the model's multi-token-prediction (MTP) layer", choices=DRAFTS
    )
    num_speculative_tokens: int | None = option(
        None, "tokens to draft in a step unless an engine is loaded with another number",
        unset="1", unit="tokens", least=1, most=MOST_DRAFTS,
    )  # fmt: skip
    # the JSON leaves these out where they have their defaults
    layout: Layout = field(default=ONE_RANK, metadata={"optional": True})
    ignore_tensors: Sequence[str] = field(
        default=(),
        metadata={
            "optional": True,
            "option": Option(
                "do not refuse weights for tensors of such names, patterns as a shell has them, "
                "that the model does not need; may be repeated",
                metavar="PATTERN",
            ),
        },
    )
    # of an instance: what ``auto`` became, and why; and whether the recipe is left to the model
    chosen: ClassVar[tuple[str, ...]] = ()
    undecided: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.target == AUTO:
            target, why = choose_target()
            object.__setattr__(self, "target", target)
            object.__setattr__(self, "chosen", (f"target {target}: {why}",))
        if self.target not in TARGETS:  # "gpu" is near to "cpu", and is not meant by it
            known = ", ".join(f"{name} ({machine})" for name, machine in _MACHINES.items())
            raise UserError(f"unknown target {self.target!r}; choose one of {known}")
        if self.recipe == AUTO:
            object.__setattr__(self, "recipe", "fp32")
            object.__setattr__(self, "undecided", self.target != "cpu")
        check(self)
        if self.profile is not None:
            object.__setattr__(self, "profile", os.fspath(self.profile))
        if self.layers is not None and not (len(self.layers) == 2 and self.layers[0] >= 0):
            raise UserError(f"layers {self.layers} should be the first and the last to keep")
        if self.num_speculative_tokens is not None and self.draft is None:
            raise OptionValueError("{num_speculative_tokens} needs a way to draft: --draft mtp")
        one_scale = {"latent_rows": E4M3_TENSOR}
        if self.kv_scale != 1.0 and not self.formats.has(one_scale):
            known = ", ".join(recipes_with(one_scale))
            raise UserError(f"recipe {self.recipe} takes no kv scale; {known} does")

    @property
    def formats(self) -> Recipe:
        """The formats of the recipe."""
        return RECIPES[self.recipe]

    @property
    def dtype(self) -> "torch.dtype":
        """Compute dtype of the recipe. A few parameters stay fp32 whatever it is: see
        ``dsa_compile.weights.canonical``."""
        import torch

        dtype: torch.dtype = getattr(torch, self.formats.compute.values)
        return dtype

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        options = asdict(self)
        for each in fields(self):
            if each.metadata.get("optional") and getattr(self, each.name) == each.default:
                del options[each.name]
        return json.loads(json.dumps(options))  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Hex SHA-256 over every option."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
