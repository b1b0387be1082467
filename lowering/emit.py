"""Write a program as an artifact directory."""

import difflib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.records import (
    ABOUT,
    CacheRecord,
    ModelRecord,
    PassSummary,
    WeightFile,
    WeightsRecord,
)
from dsa_compile.artifact.writer import ArtifactWriter
from dsa_compile.errors import ArtifactError
from dsa_compile.ir.passes import PassRecord
from dsa_compile.ir.program import Program
from dsa_compile.ir.refusal import way_into
from dsa_compile.ir.region import Role
from dsa_compile.lowering.binding import Binding
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.expr import resolve, taken_in_blocks
from dsa_compile.weights.pack import PackedFile, write_packed
from dsa_compile.weights.ranks import file_stem, plan_at_rank
from dsa_compile.weights.sharing import homes_of, weight_homes

PLAN = "weights/plan.json"


def emit(
    program: Program,
    writer: ArtifactWriter,
    model_dir: Path,
    checkpoint: Checkpoint | None,
    bindings: Sequence[Binding],
    progress: Callable[[int], None] = lambda count: None,
) -> Manifest:
    """Write everything and commit.

    Args:
        program: at the KERNEL level, or earlier if it was compiled for inspection.
        writer: an open writer.
        model_dir: for tokenizer files, and for the reference to the weights.
        checkpoint: the model's weights; None to leave them out.
        bindings: of the program's ops.
        progress: called with bytes of weights hashed or written since its last call.

    Raises:
        ArtifactError: the artifact cannot be written.
        CheckpointError: the weights cannot be read.
    """
    regions = tuple(writer.add_region(region) for region in program.regions.values())
    weights = _write_weights(program, writer, model_dir, checkpoint, progress)
    manifest = Manifest.build(
        config=program.config,
        model=ModelRecord(program.spec, _fingerprint(program, weights.files)),
        plans=program.plans,
        regions=regions,
        kernels={binding.op: binding.records() for binding in bindings},
        variants=program.variants,
        weights=weights,
        caches=_caches(program),
        exported=_write_exported(writer, program),
        passes=_write_records(writer, program),
        tokenizer=writer.add_tokenizer(model_dir),
    )
    return writer.commit(manifest)


def _write_weights(
    program: Program,
    writer: ArtifactWriter,
    model_dir: Path,
    checkpoint: Checkpoint | None,
    progress: Callable[[int], None],
) -> WeightsRecord:
    mode = program.config.weights
    writer.add_json(PLAN, program.weights.to_json())
    if checkpoint is None:  # the plan says what random weights would have to look like
        return WeightsRecord(mode, PLAN, None, ())
    if not program.config.stop_after:  # else it is to be read, also where its plan is wrong
        _validate(program, checkpoint)
    if mode == "pack":
        packed = _pack(program, writer.add_dir("weights"), checkpoint, progress)
        return WeightsRecord(mode, PLAN, None, writer.add_packed(packed))
    hashes = checkpoint.hash_files(progress)
    files = tuple(WeightFile.of(model_dir, name, digest) for name, digest in hashes.items())
    return WeightsRecord(mode, PLAN, str(model_dir.resolve()), files)


def _validate(program: Program, checkpoint: Checkpoint) -> None:
    """Hold the weight plan to the parameters that there are, as they are stored.

    Raises:
        ArtifactError: says what does not fit, and how to look into the program.
        CheckpointError: what loading the artifact would refuse.
    """
    try:
        for call in program.calls:
            program.weights.validate(call.kind, call.vars, checkpoint.shape)
            for entry in program.weights.entries(call.kind).values():
                for key in taken_in_blocks(entry.expr):
                    checkpoint.check_blocks(resolve(key, call.vars))
    except ArtifactError as error:
        raise ArtifactError(f"{error}{way_into(program.records)}") from error


def _pack(
    program: Program, folder: Path, checkpoint: Checkpoint, progress: Callable[[int], None]
) -> list[PackedFile]:
    """Write the weights of every rank; those that ranks have in common once."""
    layout, homes = program.config.layout, weight_homes(program.calls, program.weights)
    written: list[PackedFile] = []
    stems: set[str] = set()
    for rank in range(layout.world):
        numbers = layout.numbers(rank)
        own: dict[str, list[str]] = {}
        regions = []
        for call in program.calls:
            entries = program.weights.entries(call.kind)
            for key in homes_of(homes, call.name):
                stem = file_stem(call.name, entries[key].expr, numbers)
                if stem in stems:
                    continue
                if stem not in own:
                    regions.append((stem, call.kind, call.vars))
                own.setdefault(stem, []).append(key)
        stems |= own.keys()
        plan = plan_at_rank(program.weights, numbers)
        written += write_packed(folder, plan, regions, checkpoint, progress, own)
    return written


def _caches(program: Program) -> dict[str, tuple[CacheRecord, ...]]:
    found: dict[str, dict[str, CacheRecord]] = {}
    for region in program.regions.values():
        for node in region.inputs_of(Role.CACHE):
            key, value = node.meta["key"], node.meta["val"]
            dtype = str(value.dtype).removeprefix("torch.")
            of_kind = found.setdefault(region.kind, {})
            of_kind[key] = CacheRecord(key, int(value.shape[-1]), dtype)
    return {kind: tuple(caches.values()) for kind, caches in found.items()}


def _write_exported(writer: ArtifactWriter, program: Program) -> str | None:
    if not program.exported:
        return None
    path = "passes/00_export/graphs.json"
    writer.add_stage(path, program.exported.values(), ())
    return path


def _write_records(writer: ArtifactWriter, program: Program) -> tuple[PassSummary, ...]:
    records = program.records
    if program.config.records:
        writer.add_json(ABOUT, {record.name: record.about for record in records})
    writer.add_timings({record.name: record.seconds for record in records})
    return tuple(_write_record(writer, i, record) for i, record in enumerate(records, start=1))


def _write_record(writer: ArtifactWriter, number: int, record: PassRecord) -> PassSummary:
    folder = f"passes/{number:02d}_{record.name}"
    before: str | None = None
    after: str | None = None
    graphs: str | None = None
    if record.before:
        before, after, graphs = (f"{folder}/{n}" for n in ("before.py", "after.py", "graphs.json"))
        texts = [
            "\n\n".join(text for text in side.values() if text)
            for side in (record.before, record.after)
        ]
        writer.add_text(before, texts[0])
        writer.add_text(after, texts[1])
        writer.add_text(f"{folder}/changes.diff", _diff(*texts))
        writer.add_stage(graphs, record.graphs.values(), map(asdict, record.journal.sites))
    return PassSummary(
        name=record.name,
        numerics=record.numerics.value,
        rewrites=record.rewrites,
        expected=record.expected,
        by_region=record.by_region,
        nodes_before=record.nodes_before,
        nodes_after=record.nodes_after,
        near_misses=tuple(record.near_misses),
        before=before,
        after=after,
        graphs=graphs,
        remarks=tuple(record.remarks),
    )


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "before.py", "after.py"
    )
    return "".join(lines)


def _fingerprint(program: Program, files: Sequence[WeightFile]) -> str:
    """Tells one model from another: its geometry and the headers of its weights."""
    content = [program.spec.to_json(), [[f.name, f.size, f.header_sha256] for f in files]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
