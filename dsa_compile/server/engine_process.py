"""An engine process: ``python -m dsa_compile.server.engine_process``, started by the supervisor.

The first line of standard input holds its options. The rest of standard input is a lifeline: when
it ends, the HTTP process is gone and so is this one, in whatever step it may be. Signals are the
HTTP process's to handle.
"""

import logging
import os
import signal
import sys
import threading

from dsa_compile.errors import UserError
from dsa_compile.server.logs import set_up_logging
from dsa_compile.server.protocol import ENGINE_FAILED, EngineOptions

_LOG = logging.getLogger(__name__)


def main() -> int:
    """Load and serve.

    Returns:
        2 if the artifact cannot be loaded as wanted, with one line logged; 1 if the engine failed.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leave_a_core()
    import msgspec

    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOptions)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_up_logging(options.log_format, options.log_level)
    try:
        return _serve(options)
    except UserError as error:
        _LOG.critical("%s", " ".join(str(error).split()))
        return 2


def leave_a_core() -> None:
    """Choose OpenMP's threads, before torch is imported, unless the environment does.

    One core is the HTTP process's, and threads that wait do not spin: a step is a series of
    parallel loops, each as slow as the thread that had to share its core.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))


def _serve(options: EngineOptions) -> int:
    import zmq

    from dsa_compile.runtime import Engine
    from dsa_compile.server.engine_loop import EngineLoop

    engine = Engine.load(
        options.artifact,
        skip_tokenizer_init=True,
        **options.engine,
    )
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    # Neither end waits for the other: what may pile up is bounded by the requests' tokens.
    socket.set_hwm(0)
    socket.connect(options.address)
    EngineLoop(engine, socket).run()
    context.destroy(linger=1000)  # milliseconds, for the last message
    return ENGINE_FAILED


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock would make the interpreter abort at its own end.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
