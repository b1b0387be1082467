"""Loading by phase and the first requests of several lengths, where no cache holds a kernel.

A dense and three MoE layers of the released geometry are compiled without weights and loaded with
random ones; caches of compiled kernels are empty. A length's first prompt should take no longer
than its second, and no kernel be late.

    python benchmarks/first_requests.py [--no-shipped-kernels] [--layers 2-5]

Needs a GPU of 48 GB: a released MoE layer has 11 GB of weights.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTHS = (8, 512, 3000, 9000, 20_000)
CONTEXT = 32_768


def load(artifact: Path, shipped: bool) -> None:
    """Load the artifact and send prompts, printing when what was done."""
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
    engine = Engine.load(
        artifact,
        load_format="dummy",
        max_model_len=CONTEXT,
        max_num_batched_tokens=8192,
        shipped_kernels=shipped,
        enable_prefix_caching=False,
    )
    say("loaded")
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for length in LENGTHS:
        times = []
        for turn in range(3):
            prompt = [3 + (turn + 7919 * place) % 100_000 for place in range(length)]
            before = time.perf_counter()
            engine.generate([prompt], params)
            times.append(1e3 * (time.perf_counter() - before))
        said = ", ".join(f"{each:.1f}" for each in times)
        say(f"prompt of {length:,} tokens and 2 more, three times: {said} ms")
    say(f"late kernels: {engine.stats().late_kernels}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="2-5", help="first and last of the released model")
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--no-shipped-kernels", action="store_true", help="compile them on loading")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        load(args.load, not args.no_shipped_kernels)
        return
    import torch

    import dsa_compile
    from dsa_compile.measure.step.released import CONFIG

    if not torch.cuda.is_available():
        print("no GPU: nothing to measure")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
        first, last = map(int, args.layers.split("-"))
        started = time.perf_counter()
        dsa_compile.compile(
            folder / "model",
            folder / "artifact",
            recipe=args.recipe,
            target="sm_90a",
            layers=(first, last),
            weights="none",
        )
        files = list((folder / "artifact" / "kernels").iterdir())
        size = sum(file.stat().st_size for file in files)
        print(f"compiled in {time.perf_counter() - started:.1f} s: {len(files)} kernels' files, "
              f"{size / 1e6:.1f} MB")  # fmt: skip
        caches = ("DSA_COMPILE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        environment = {cache: str(folder / cache.lower()) for cache in caches}
        environment |= {"CUDA_CACHE_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, __file__, "--load", str(folder / "artifact")]
        command += ["--no-shipped-kernels"] * args.no_shipped_kernels
        subprocess.run(command, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
