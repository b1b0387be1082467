"""Suite of measures over artifacts, one after another; finished ones stay if a later one fails."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import UserError
from dsa_compile.ir.plan import DRAFT
from dsa_compile.measure.eval.acceptance_record import record_acceptance
from dsa_compile.measure.eval.draft_chains import chains_of
from dsa_compile.measure.eval.engine_acceptance import (
    Comparison,
    drafting_engine,
    engine_acceptance,
)
from dsa_compile.measure.eval.hf import NAME, HfModel
from dsa_compile.measure.eval.hf_agreement import compare_logits, measure_generations
from dsa_compile.measure.eval.indexer_overlap import measure_overlap, references
from dsa_compile.measure.eval.layer_error import measure_layers, require_same_model
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.material import Material, make_material
from dsa_compile.measure.eval.mtp_acceptance import measure_acceptance
from dsa_compile.measure.eval.options import Options
from dsa_compile.measure.eval.perplexity import measure_perplexity
from dsa_compile.measure.eval.probe import ProbeRunner
from dsa_compile.measure.eval.progress import Tick, ignore, part
from dsa_compile.measure.eval.recall_accuracy import measure_recall
from dsa_compile.measure.eval.results import ArtifactResults, Row
from dsa_compile.measure.eval.selections import DENSE, SPARSE


class Progress:
    """Progress of an evaluation; its methods do nothing, and subclasses override some of them."""

    def begin(self, artifact: str, measure: str) -> Tick:
        """Begin a measure; the function returned is called with how far it is."""
        return ignore

    def found(self, results: Sequence[ArtifactResults]) -> None:
        """Take all results so far, of which there are more now."""

    def end(self) -> None:
        """The measure has ended."""


def evaluate(
    paths: Sequence[Path],
    options: Options,
    model_dir: Path | None = None,
    progress: Progress | None = None,
) -> list[ArtifactResults]:
    """Evaluate artifacts one after another.

    What cannot be measured on an artifact, for example drafts of a model that has no module for
    them, is noted in its results and the rest goes on.

    Args:
        paths: artifacts.
        options: what to measure.
        model_dir: see :meth:`LoadedArtifact.open`.
        progress: called when a measure begins, finds something and ends.

    Raises:
        UserError: an artifact or its model cannot be opened, or a text not be read. Only a model
            whose files are not there can still be found out after other artifacts were measured.
    """
    progress = progress or Progress()
    for path in paths:  # what is wrong with the last should be known before the first is measured
        options.context_of(Artifact.open(path, verify="header").manifest.model.spec)
    reference = None
    if options.reference is not None and "layers" in options.measures:
        reference = LoadedArtifact.open(options.reference, model_dir)
    finished: list[ArtifactResults] = []
    for path, name in zip(paths, distinct_names(paths), strict=True):
        loaded = LoadedArtifact.open(path, model_dir, name)
        run = _ArtifactRun(loaded, make_material(loaded, options), options, reference)
        results = ArtifactResults.of(loaded)
        finished.append(results)
        for measure in options.measures:
            start = time.perf_counter()
            tick = progress.begin(loaded.name, measure)
            try:
                for rows in run.measure(measure, tick):
                    results.rows += rows
                    progress.found(finished)
            except UserError as error:
                results.notes.append(f"{measure}: {error}")
            results.seconds[measure] = round(time.perf_counter() - start, 3)
            progress.found(finished)
            progress.end()
    return finished


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The directories' own names, or the paths as given where these repeat."""
    names = [path.resolve().name for path in paths]
    return [
        str(path) if names.count(name) > 1 else name
        for path, name in zip(paths, names, strict=True)
    ]


class _ArtifactRun:
    """The measures of one artifact; each gives its rows part by part."""

    def __init__(
        self,
        loaded: LoadedArtifact,
        material: Material,
        options: Options,
        reference: LoadedArtifact | None,
    ) -> None:
        self._loaded, self._material, self._options = loaded, material, options
        self._reference = reference
        self._measures: dict[str, Callable[[Tick], Iterator[Sequence[Row]]]] = {
            "perplexity": self._perplexity,
            "recall": self._recall,
            "indexer": self._indexer,
            "mtp": self._mtp,
            "layers": self._layers,
            "hf": self._hf,
        }

    def measure(self, name: str, tick: Tick) -> Iterator[Sequence[Row]]:
        return self._measures[name](tick)

    def _runner(self, selection: str = SPARSE) -> ProbeRunner:
        return self._loaded.runner(selection, self._options.seed, self._material.longest)

    def _selections(self, names: Sequence[str], tick: Tick) -> Iterator[tuple[str, Tick]]:
        """Each selection with a tick for its share of the measure."""
        for index, name in enumerate(names):
            yield name, part(tick, index, len(names))

    def _perplexity(self, tick: Tick) -> Iterator[Sequence[Row]]:
        windows = self._material.windows
        for selection, share in self._selections(self._options.selections, tick):
            yield [measure_perplexity(self._runner(selection), windows, selection, share)]

    def _recall(self, tick: Tick) -> Iterator[Sequence[Row]]:
        prompts = self._material.recall
        for selection, share in self._selections(self._options.selections, tick):
            yield measure_recall(self._runner(selection), prompts, selection, share)

    def _indexer(self, tick: Tick) -> Iterator[Sequence[Row]]:
        indexers = references(self._loaded)
        sequences, topk = self._material.around_topk, self._loaded.spec.index_topk
        choosing = [name for name in self._options.selections if name != DENSE]
        for name, share in self._selections(choosing, tick):
            yield measure_overlap(self._runner(name), indexers, sequences, topk, name, share)

    def _mtp(self, tick: Tick) -> Iterator[Sequence[Row]]:
        self._require_whole("drafting")
        options, material = self._options, self._material
        depth, generate = options.depth, options.generate
        drafts = chains_of(self._loaded, material.longest + depth)
        texts = material.sequences(material.context)
        prompts = material.prompts(options.draft_prompts, material.context // 4)
        yield measure_acceptance(drafts, self._runner(), texts, prompts, generate, depth, tick)
        if DRAFT not in self._loaded.manifest.plans:
            if options.record:
                raise UserError("--record: it has no draft plan; compile with --draft mtp")
            return
        engine = drafting_engine(self._loaded, depth, material.longest)
        exact = self._loaded.manifest.compile.recipe == "fp32"
        by_text = material.prompts_by_text(options.draft_prompts, material.context // 4)
        found = {
            text: engine_acceptance(engine, drafts, some, generate, depth, exact=exact)
            for text, some in by_text.items()
        }
        whole = Comparison.of_all(list(found.values()))
        yield whole.rows()
        if len(found) > 1:
            for text, comparison in found.items():
                yield comparison.rows(text)
        whole.require_agreement()
        if options.record:
            record_acceptance(self._loaded, engine, by_text, found, generate)

    def _layers(self, tick: Tick) -> Iterator[Sequence[Row]]:
        assert self._reference is not None
        require_same_model(self._loaded, self._reference)
        runner = self._reference.runner(max_tokens=self._material.longest)
        layers = [layer.index for layer in self._loaded.manifest.layers]
        sequences = self._material.sequences(self._material.context)
        yield measure_layers(self._runner(), runner, layers, sequences, tick)
        name = self._reference.name
        yield [compare_logits(name, self._runner().logits(sequences), runner.logits(sequences))]

    def _hf(self, tick: Tick) -> Iterator[Sequence[Row]]:
        self._require_whole("comparing with transformers")
        options, material, runner = self._options, self._material, self._runner()
        model = HfModel(self._loaded.model_dir, self._loaded.spec)
        sequences = material.sequences(material.context)
        yield [compare_logits(NAME, runner.logits(sequences), model.logits(sequences))]
        longest = min(8 * self._loaded.spec.index_topk, material.context)
        prompts = material.prompts(options.greedy_prompts, longest)
        yield [measure_generations(NAME, runner, model.generate, prompts, options.generate, tick)]

    def _require_whole(self, what: str) -> None:
        if not self._loaded.is_whole:
            raise UserError(f"{what} needs all layers, the artifact was compiled with --layers")
