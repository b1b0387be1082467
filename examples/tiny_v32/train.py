"""Train a small model: dense attention, the indexer, sparse attention, and adapt to it.

    python -m examples.tiny_v32.corpus
    python -m examples.tiny_v32.train --run examples/tiny_v32/runs/first
    python -m examples.tiny_v32.train --model tiny_glm

The curriculum is that of DeepSeek-V3.2: the language model with dense attention; a warm-up of the
indexer alone against the attention summed over heads, the model frozen; then attention over the
indexer's top-k, the indexer learning on the selected keys with its inputs detached. A last phase
is ours: it holds attention to the selected keys, with dropout and harder questions. An MTP module
learns along. ``--resume`` continues a run that was cut; every batch is a function of its step.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from examples.tiny_v32.attention import Aux, Select
from examples.tiny_v32.choice import DATA, EXAMPLES, MODELS, add_model_argument
from examples.tiny_v32.config import TinyConfig
from examples.tiny_v32.data import Batches, Mixture
from examples.tiny_v32.export import load_checkpoint
from examples.tiny_v32.losses import draft_loss, language_loss, progress_figures
from examples.tiny_v32.model import TinyModel

_LOG_EVERY = 25
_DRAFT_WEIGHT = 0.3
_BALANCE_RATE = 1e-3


@dataclass(frozen=True)
class Phase:
    """One part of the curriculum. ``curriculum`` is the share of steps until data are hardest."""

    name: str
    steps: int
    batch_size: int
    length: int
    select: Select
    index_loss: bool
    frozen: bool  # train the indexer only
    rate: float  # peak learning rate of the model
    index_rate: float
    ramp: int  # steps of linear warm-up of the rate
    decay: float  # share of the steps, at the end, in which the rate falls linearly
    floor: float  # to this share of its peak
    curriculum: float
    spread: float = 0.0  # weight of the loss on attention outside the top-k
    dropout: float = 0.0
    hard: bool = False  # recall from further away, of words more easily confused

    @property
    def aux(self) -> Aux:
        """The auxiliary losses of the phase."""
        if not self.index_loss:
            return Aux.NONE
        return Aux.INDEX_AND_SPREAD if self.spread else Aux.INDEX

    def factor(self, step: int) -> float:
        """Learning rate at ``step`` over its peak."""
        left = (self.steps - step) / max(self.decay * self.steps, 1)
        return min((step + 1) / self.ramp, 1.0, max(left, self.floor))


_SPARSE = Phase("sparse", 2600, 32, 1536, Select.TOPK, True, False, 6e-4, 1e-3, 40, 1.0, 0.01, 0.0)
PHASES = (
    Phase("dense", 5000, 64, 1024, Select.ALL, False, False, 2e-3, 0.0, 200, 0.4, 0.25, 0.6),
    Phase("warmup", 400, 32, 1536, Select.ALL, True, True, 0.0, 4e-3, 40, 0.5, 0.1, 0.0),
    _SPARSE,
    # The dense phase leaves the first layer with attention wider than the top-k can follow, and
    # sparse attention alone does not narrow it: keys left out get no gradient. The spread loss
    # does. Dropout, because the text has been seen many times by now.
    replace(
        _SPARSE,
        name="adapt",
        steps=1400,
        rate=8e-4,
        index_rate=5e-4,
        ramp=60,
        spread=0.2,
        dropout=0.1,
        hard=True,
    ),
)


class Run:
    """A training run in a directory: its state, its history, its clock."""

    def __init__(self, config: TinyConfig, directory: Path, device: str, seed: int) -> None:
        self.directory, self.device, self.seed = directory, torch.device(device), seed
        self.model = TinyModel(config)
        self.model.initialise(seed)
        self.model.to(self.device)
        self.phase, self.step, self.seconds = 0, 0, 0.0
        self.optimizer_state: dict[str, object] | None = None
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds of training, cut runs included."""
        return self.seconds + time.perf_counter() - self.started

    def log(self, record: dict[str, object]) -> None:
        """Append to ``history.jsonl`` and show."""
        record["seconds"] = round(self.elapsed(), 1)
        with (self.directory / "history.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = " ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()
        )
        print(shown, flush=True)

    def save(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Write ``state.pt``, atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict() if optimizer else None,
            "phase": self.phase,
            "step": self.step,
            "seconds": self.elapsed(),
        }
        torch.save(state, self.directory / "state.tmp")
        (self.directory / "state.tmp").replace(self.directory / "state.pt")

    def resume(self) -> None:
        """Read ``state.pt``."""
        state = torch.load(self.directory / "state.pt", map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer_state = state["optimizer"]
        self.phase, self.step, self.seconds = state["phase"], state["step"], state["seconds"]


def make_optimizer(model: TinyModel, phase: Phase) -> torch.optim.AdamW:
    """AdamW with two rates; freezes what the phase does not train."""
    indexer = {id(p) for p in model.indexer_parameters()}
    for parameter in model.parameters():
        trained = phase.index_loss if id(parameter) in indexer else not phase.frozen
        parameter.requires_grad_(trained)

    def group(wanted_indexer: bool, matrix: bool, rate: float) -> dict[str, object]:
        chosen = [
            p
            for p in model.parameters()
            if p.requires_grad and (id(p) in indexer) == wanted_indexer and (p.dim() > 1) == matrix
        ]
        return {"params": chosen, "lr": rate, "peak": rate, "weight_decay": 0.05 if matrix else 0.0}

    groups = [
        group(of_indexer, matrix, phase.index_rate if of_indexer else phase.rate)
        for of_indexer in (False, True)
        for matrix in (False, True)
    ]
    groups = [g for g in groups if g["params"]]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=fused)


def batches(
    corpus: Path, phase: Phase, seed: int, start: int, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a phase from step ``start``, in order, whatever the number of workers."""
    mixture = Mixture(phase.batch_size, phase.length, f"{seed}/{phase.name}", phase.hard)
    data = Batches(corpus, mixture, int(phase.curriculum * phase.steps))
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=range(start, phase.steps),
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    yield from loader


def train_step(
    model: TinyModel, phase: Phase, ids: Tensor, weights: Tensor, measure: bool
) -> dict[str, float]:
    """Forward and backward; gives the figures to log if ``measure``."""
    inputs, targets, wanted = ids[:, :-1], ids[:, 1:], weights[:, 1:]
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits, drafted, aux = model(inputs, phase.select, phase.aux)
    index, spread = aux.unbind()
    loss = index + phase.spread * spread
    figures: dict[str, float] = {}
    if not phase.frozen:
        language = language_loss(logits, targets, wanted)
        loss = loss + language
        figures |= {"loss": language.item()} if measure else {}
        if drafted is not None:
            draft = draft_loss(drafted, logits, wanted)
            loss = loss + _DRAFT_WEIGHT * draft
            figures |= {"draft_loss": draft.item()} if measure else {}
    loss.backward()
    if measure:
        figures |= {"kl": index.item()} if phase.index_loss else {}
        figures |= {"spread": spread.item()} if phase.spread else {}
        figures |= progress_figures(logits, drafted, targets, wanted)
    return figures


def run_phase(run: Run, phase: Phase, corpus: Path, workers: int, stop: float) -> bool:
    """Train one phase from ``run.step``; False if ``stop`` (seconds of this process) cut it."""
    model, optimizer = run.model, make_optimizer(run.model, phase)
    if run.optimizer_state:
        optimizer.load_state_dict(run.optimizer_state)
        run.optimizer_state = None
    model.train()
    model.set_dropout(phase.dropout)
    saved = time.perf_counter()
    for ids, weights in batches(corpus, phase, run.seed, run.step, workers):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * phase.factor(run.step)
        ids = ids.to(run.device, non_blocking=True)
        weights = weights.to(run.device, non_blocking=True)
        measure = run.step % _LOG_EVERY == 0 or run.step == phase.steps - 1
        figures = train_step(model, phase, ids, weights, measure)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for router in model.routers():
            if phase.frozen:
                router.load.zero_()
            else:
                router.balance(_BALANCE_RATE)
        if measure:
            run.log({"phase": phase.name, "step": run.step, **figures, "norm": norm.item()})
        run.step += 1
        now = time.perf_counter()
        if now - run.started > stop:
            run.save(optimizer)
            return False
        if now - saved > 120:
            run.save(optimizer)
            saved = now
    run.phase, run.step = run.phase + 1, 0
    run.save(None)
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_argument(parser)
    parser.add_argument("--corpus", type=Path, default=DATA / "corpus")
    parser.add_argument("--run", type=Path, help="default: runs/default of the model")
    parser.add_argument("--resume", action="store_true", help="continue from state.pt in --run")
    parser.add_argument("--init", type=Path, help="begin with the weights of this checkpoint")
    parser.add_argument("--first", choices=[p.name for p in PHASES], help="phase to begin with")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12, help="processes that write batches")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps of phases")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="multiplies batch sizes")
    parser.add_argument("--phases", type=int, default=len(PHASES), help="stop after so many")
    parser.add_argument("--stop", type=float, default=1e9, help="save and stop after SECONDS")
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    directory = args.run or EXAMPLES / args.model / "runs" / "default"
    directory.mkdir(parents=True, exist_ok=True)
    run = Run(MODELS[args.model], directory, args.device, args.seed)
    if args.init:
        run.model.load_state_dict(load_checkpoint(args.init).state_dict())
    if args.first:
        run.phase = [p.name for p in PHASES].index(args.first)
    if args.resume:
        run.resume()
    if not args.eager:
        # Kinds of layer × four phases × with or without gradients, of one code object.
        torch._dynamo.config.recompile_limit = 64
        for layer in run.model.decoder_layers():
            layer.compile(dynamic=False)
    for phase in PHASES[run.phase : args.phases]:
        phase = replace(
            phase,
            steps=max(int(phase.steps * args.scale), 1),
            batch_size=max(int(phase.batch_size * args.batch_scale), 1),
        )
        if not run_phase(run, phase, args.corpus, args.workers, args.stop):
            print(f"stopped after {args.stop:.0f} s; continue with --resume")
            return
    print(f"done in {run.elapsed():.0f} s")


if __name__ == "__main__":
    main()
