"""Compilation of a model to an artifact: requests are checked before torch is imported."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_compile.common.keyword_names import suggests_names
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.gpus import AUTO, choose_target
from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.lowering.compile_result import Clock, CompileResult, Progress, Silence

# The compiler brings torch and transformers with it, and wrong names should not wait for those.
if TYPE_CHECKING:
    from dsa_compile.ir.passes import Pass


@suggests_names(name="compile")
def compile_model(
    model: Path | str,
    out: Path | str,
    *,
    options: CompileConfig | None = None,
    force: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
    passes: "Sequence[tuple[Pass, str]]" = (),
    target: str = AUTO,
    recipe: str = "fp32",
    weights: str = "reference",
    layers: tuple[int, int] | None = None,
    block_size: int = 64,
    disable: Sequence[str] = (),
    stop_after: str | None = None,
    kernels: Sequence[str] = (),
    records: bool = True,
    kv_scale: float = 1.0,
    profile: Path | str | None = None,
    pass_options: Sequence[str] = (),
    compiled_kernels: bool = True,
    draft: str | None = None,
    num_speculative_tokens: int | None = None,
    layout: Layout = ONE_RANK,
) -> CompileResult:
    """Compile a model into an artifact; :func:`dsa_compile.compile` is this function.

    Args:
        model: a directory of a DeepSeek-V3.2 model, in the layout of ``save_pretrained`` or of the
            Hub; or ``owner/name`` of a model on the Hub, which is taken from the local cache or
            downloaded.
        out: where the artifact will be; must not exist unless ``force``.
        options: the choices below as one object, instead of them.
        force: replace an artifact that is there.
        revision: branch, tag or commit of a model on the Hub.
        progress: receives phases, passes and bytes.
        passes: passes to add beside those of installed packages, each with the name of the pass
            that it runs after.
        target: ``cpu``, ``sm_90a`` (Hopper), ``sm_100a`` (Blackwell); ``auto``: that of the GPU
            here, or ``cpu`` where there is none.
        recipe: ``fp32``, ``bf16``, ``fp8`` or ``fp8-kv-tensor``.
        weights: ``reference`` names the model's files and their hashes, ``pack`` copies them
            re-laid out, ``none`` leaves them out, and config.json is enough.
        layers: first and last decoder layer to keep, counted from 0; None for all.
        block_size: rows of one cache page: 16, 32 or 64.
        disable: names of passes to skip; ``"name+"`` for a pass and all that need it.
        stop_after: name of the last pass to run, for an artifact to read, not to run.
        kernels: providers to use for ops, each as ``"op=provider"``.
        records: keep what each pass did, for ``dsa-inspect``.
        kv_scale: of the latent cache in recipe ``fp8-kv-tensor``.
        profile: file of times of calls measured on the target (``dsa-bench step --profile``), from
            which overlap is planned; None to plan from estimates.
        pass_options: options of passes, each as ``"pass.name=value"``.
        compiled_kernels: ship machine code of the CUDA kernels, if NVRTC is installed here.
        draft: ``mtp`` to draft tokens with the model's multi-token-prediction layer.
        num_speculative_tokens: how many an engine drafts by default, 1 to 4.
        layout: the ranks that run the model together, see :class:`~dsa_compile.facts.layout.Layout`.

    Raises:
        UserError: anything wrong with the options, the configuration, the weights or the output;
            nothing is left half-written. Wrong options, an unknown model type and an ``out`` that
            is taken are found before torch is imported.
    """
    single = CompileConfig(
        target=target,
        recipe=recipe,
        weights=weights,
        layers=layers,
        block_size=block_size,
        disable=disable,  # type: ignore[arg-type]
        stop_after=stop_after,
        kernels=kernels,  # type: ignore[arg-type]
        records=records,
        kv_scale=kv_scale,
        profile=profile,  # type: ignore[arg-type]
        pass_options=pass_options,  # type: ignore[arg-type]
        compiled_kernels=compiled_kernels,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
        layout=layout,
    )
    if options is not None and single != CompileConfig():
        raise UserError("compile(): give options=CompileConfig(...) or single options, not both")
    from dsa_compile.lowering.request import check_request

    clock = Clock(progress or Silence())
    request = check_request(
        model,
        out,
        options or single,
        force=force,
        revision=revision,
        more_passes=bool(passes),
        phase=clock.start,
    )
    if options is None and target == AUTO:
        chosen, why = choose_target()
        request = replace(request, notes=(f"target {chosen}: {why}", *request.notes))
    clock.start("imports")
    from dsa_compile.lowering.stages import run

    return run(request, force, clock, passes)
