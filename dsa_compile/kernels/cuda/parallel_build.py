"""Many CUDA kernels compiled at a time, each by a process of its own.

NVRTC compiles one program of a process at a time, whatever the number of threads.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import dsa_compile
from dsa_compile.kernels.cuda.compiler import Defines, build, cubin_name, find_cached

Source = tuple[str, Defines]
"""A source file and its macros, as for :func:`~dsa_compile.kernels.cuda.compiler.build`."""
SLOWEST = ("experts_fp8.cu", "sample_tokens.cu", "experts_fp8_many.cu", "mla_decode.cu")
"""Sources that take NVRTC longest, 3 to 13 s. They come first: at the end, all other processors
would wait for one of them."""


def processors() -> int:
    """Count of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def build_each(sources: Iterable[Source], arch: str) -> Iterator[tuple[str, bytes]]:
    """Compile as many at a time as there are processors.

    Args:
        sources: those with equal names (:func:`~dsa_compile.kernels.cuda.compiler.cubin_name`) are
            compiled once.
        arch: real architecture, such as ``"sm_90a"``.

    Yields:
        Names and machine code, in the order in which they are done.

    Raises:
        KernelCompileError: a source does not compile.
        UserError: NVRTC or CUDA's headers are not installed.
    """
    ordered = sorted(sources, key=lambda job: job[0] not in SLOWEST)
    named = {cubin_name(source, arch=arch, defines=d): (source, d) for source, d in ordered}
    pool = ThreadPoolExecutor(processors())
    try:
        futures = {pool.submit(_build_apart, *job, arch): name for name, job in named.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt need not wait for the rest


def _build_apart(source: str, defines: Defines, arch: str) -> bytes:
    if cubin := find_cached(source, arch=arch, defines=defines):
        return cubin
    package = str(Path(dsa_compile.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, source, arch, json.dumps(dict(defines))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout
    # Here again: it raises what is wrong, or succeeds where no process can be started.
    return build(source, arch=arch, defines=defines)


def main() -> None:
    """Write the machine code of one source to the standard output."""
    source, arch, defines = sys.argv[1:]
    sys.stdout.buffer.write(build(source, arch=arch, defines=json.loads(defines)))


if __name__ == "__main__":
    main()
