"""From the directory of a packed artifact to the first token, in a process that finds nothing made.

A random checkpoint of the released geometry's first layers is written as the published one is, in
FP8 blocks with a tensor an expert, and compiled with its weights packed. Then a process of its own
loads the artifact and generates one token: caches of compiled kernels are empty, and the artifact's
files are no longer in memory.

    python -m benchmarks.cold_start [--layers 4] [--target sm_90a] [--verify full|header]
    python -m benchmarks.cold_start --config CONFIG_JSON --target cpu     another geometry

Four layers, three of them dense, take 17 GB of disk for the checkpoint and as much for the
artifact, below ``--directory``. Without a GPU a small model is taken for the CPU.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHARD = 4 << 30  # bytes of a file, about
_POOL = (1 << 24) + 43  # bytes that values are taken from
_WIDE = ("embed_tokens", "lm_head", "mlp.gate.", "weights_proj")  # stored in bf16 or fp32


def released_config(layers: int) -> dict[str, Any]:
    """``config.json`` of the first layers of the released model."""
    from dsa_compile.measure.step.released import CONFIG

    return {**CONFIG, "num_hidden_layers": layers, "num_nextn_predict_layers": 0}


def small_config(layers: int) -> dict[str, Any]:
    """``config.json`` of a model for tests with so many layers."""
    from examples.small_models.models import hub_config, tiny_config

    return hub_config(tiny_config(layers), mtp=False)


def write_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """Write random weights in the published layout, and return how many bytes."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    shard: dict[str, Any] = {}
    total = held = 0
    for name, tensor in _tensors(folder):
        shard[name] = tensor
        held += tensor.nbytes
        if held > _SHARD:
            total += _write(folder, shard, weight_map, save_file)
            held = 0
    total += _write(folder, shard, weight_map, save_file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write(folder: Path, shard: dict[str, Any], weight_map: dict[str, str], save_file: Any) -> int:
    if not shard:
        return 0
    file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
    save_file(shard, folder / file)
    weight_map.update(dict.fromkeys(shard, file))
    size = sum(tensor.nbytes for tensor in shard.values())
    shard.clear()
    return size


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    import torch

    from dsa_compile.frontend.build import load_spec
    from dsa_compile.weights.block_fp8 import scale_shape
    from dsa_compile.weights.canonical import canonical_parameters
    from dsa_compile.weights.layout import stored_parts

    spec = load_spec(folder)
    pool = torch.randint(0, 256, (_POOL,), dtype=torch.uint8)
    pool = torch.where(pool % 128 == 127, pool - 1, pool)  # no NaN
    start = 0
    for name, info in canonical_parameters(spec, range(spec.num_hidden_layers)).items():
        for part in stored_parts(name, info.shape, ()):
            if len(part.shape) == 1 or any(word in name for word in _WIDE):
                made = torch.randn(part.shape).mul_(0.02)
                made = made.add_(1.0) if name.endswith("norm.weight") else made
                yield part.key, made if info.keep_fp32 else made.bfloat16()
                continue
            count = part.shape[0] * part.shape[1]
            start = (start + 7919) % _POOL
            copies = -(-(start + count) // _POOL)
            values = pool.repeat(copies)[start : start + count].clone().view(part.shape)
            yield part.key, values.view(torch.float8_e4m3fn)
            scale = 1.0 / (128.0 * part.shape[1] ** 0.5)
            yield part.scale_key, torch.full(scale_shape(part.shape), scale)


def forget_files(folder: Path) -> None:
    """Have the operating system read them from disk the next time."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_token(artifact: Path, verify: str) -> float:
    """Seconds from starting a process to its first token; its progress is printed."""
    with tempfile.TemporaryDirectory() as empty:
        caches = ("DSA_COMPILE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        environment = {name: str(Path(empty) / name.lower()) for name in caches}
        environment |= {"CUDA_CACHE_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, __file__, "--load", str(artifact), "--verify", verify]
        started = time.perf_counter()
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        return time.perf_counter() - started


def load(artifact: Path, verify: str) -> None:
    """Load and generate one token, printing when what was done."""
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {line}")

    class Say(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger = logging.getLogger("dsa_compile.runtime")
    logger.addHandler(Say())
    logger.setLevel(logging.INFO)

    from dsa_compile.runtime import Engine, SamplingParams

    say("imports")
    engine = Engine.load(artifact, verify=verify, shipped_kernels=True)
    say("loaded")
    (done,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.0))
    say(f"first token: {done.token_ids[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--config", type=Path, help="instead of the released geometry")
    parser.add_argument("--target", help="sm_90a if there is a GPU, else cpu")
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--verify", choices=("full", "header"), default="full")
    parser.add_argument("--directory", type=Path, help="where the files are written")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        load(args.load, args.verify)
        return
    import torch

    import dsa_compile

    target = args.target or ("sm_90a" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        if args.config is not None:
            config = json.loads(args.config.read_text())
        else:
            config = released_config(args.layers) if target != "cpu" else small_config(args.layers)
        started = time.perf_counter()
        size = write_checkpoint(folder / "model", config)
        wrote = time.perf_counter() - started
        options = {"recipe": args.recipe, "target": target, "weights": "pack"}
        dsa_compile.compile(folder / "model", folder / "artifact", **options)
        shutil.rmtree(folder / "model")
        packed = sum(p.stat().st_size for p in (folder / "artifact").rglob("*") if p.is_file())
        compiled = time.perf_counter() - started - wrote
        print(f"checkpoint {size / 1e9:.1f} GB in {wrote:.1f} s, artifact {packed / 1e9:.1f} GB in "
              f"{compiled:.1f} s")  # fmt: skip
        forget_files(folder / "artifact")
        seconds = first_token(folder / "artifact", args.verify)
        print(f"first token after {seconds:.1f} s, nothing cached")
        print(f"again: {first_token(folder / 'artifact', args.verify):.1f} s, files in memory")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
