"""Every kernel of some layers of the released geometry against its reference: ratios, seconds.

    python benchmarks/verify_kernels.py [--recipe fp8] [--layers 2-4] [--tokens 3075]

Random weights. A ratio above 1 is an accusation. Needs a Hopper GPU. Not finished: on an H200 the
embedding and a dense layer pass, and the process crashes in the first layer of experts.
"""

import argparse
import tempfile
import time
from pathlib import Path

import dsa_compile
from dsa_compile.measure.step.released import write_released
from dsa_compile.verify.checks.kernel_check import KernelReport, check_kernels
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights.dummy import DummyWeights


def main() -> None:
    """Compile, check, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--layers", default="2-4", help="first and last of the released model")
    parser.add_argument("--tokens", type=int, default=3075)
    parser.add_argument("--target", default="sm_90a")
    args = parser.parse_args()
    first, last = map(int, args.layers.split("-"))
    with tempfile.TemporaryDirectory() as name:
        model, path = Path(name) / "model", Path(name) / "artifact"
        model.mkdir()
        dsa_compile.compile(
            write_released(model), path, recipe=args.recipe, target=args.target,
            layers=(first, last), weights="none", records=False,
        )  # fmt: skip
        recompiled = RecompiledArtifact.open(path, model, dummy=True)
        manifest, spec = recompiled.artifact.manifest, recompiled.exported.spec
        ids = random_tokens(args.tokens, spec.vocab_size)
        prompt = Prompt.of(ids, spec.index_topk, manifest.block_size)
        worst: dict[tuple[str, str], KernelReport] = {}
        began = time.perf_counter()

        def say(line: str) -> None:
            print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

        program = recompiled.replay.final
        for found in check_kernels(
            program, manifest.kernels, manifest.target, DummyWeights(), prompt, say
        ):
            known = worst.get((found.op, found.provider))
            if known is None or found.ratio > known.ratio:
                worst[found.op, found.provider] = found
        for found in sorted(worst.values(), key=lambda f: -f.ratio):
            print(f"{found.ratio:9.3f}  {found}  {found.problem}")


if __name__ == "__main__":
    main()
