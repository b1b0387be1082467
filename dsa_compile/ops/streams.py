"""Streams and events as calls of a graph: what runs beside what on a GPU.

A region begins and ends on stream 0, the one its caller is on. Every call belongs to the stream
that was last chosen by ``on_stream``; streams are numbered from 0, events from 0 in each region.
The ops compute nothing, and on a CPU they do nothing: the order of the calls in a graph is always a
legal order to run them in. On a GPU the runtime puts its own functions in their place.
"""

from collections.abc import Sequence

from torch import Tensor

from dsa_compile.ops.library import define_marker


def on_stream(stream: int) -> None:
    """Run the calls that follow on ``stream``, until the next ``on_stream``."""


def record_event(event: int) -> None:
    """``event`` is reached when all that the current stream was given so far is done."""


def wait_event(event: int) -> None:
    """Let the current stream wait for ``event``, recorded by an earlier call."""


def keep_alive(tensors: Sequence[Tensor]) -> None:
    """Hold ``tensors`` up to here.

    A graph drops a tensor after the last call that takes it, in the order of the calls. The
    allocator may then give its memory to the next tensor made on the same stream, although another
    stream still reads it.
    """


ON_STREAM = define_marker("on_stream(int stream) -> ()", on_stream)
RECORD_EVENT = define_marker("record_event(int event) -> ()", record_event)
WAIT_EVENT = define_marker("wait_event(int event) -> ()", wait_event)
KEEP_ALIVE = define_marker("keep_alive(Tensor[] tensors) -> ()", keep_alive)

STREAM_OPS = frozenset({ON_STREAM, RECORD_EVENT, WAIT_EVENT, KEEP_ALIVE})
"""Ops that steer execution; no kernel is ever bound to them."""
