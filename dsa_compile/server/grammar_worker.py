"""Compiling grammars beside an engine's steps, in a thread of its own."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from dsa_compile.errors import RequestError
from dsa_compile.runtime import Engine
from dsa_compile.server.protocol import Compiled, CompileGrammar


class GrammarWorker:
    """Compiles grammars into the cache of an engine, from which its requests take them.

    A grammar takes milliseconds, but the first one imports xgrammar and reads the vocabulary.

    Args:
        engine: whose vocabulary it is.

    Attributes:
        news: a file descriptor that can be read when :meth:`finished` has something.
    """

    def __init__(self, engine: Engine) -> None:
        self.news = os.eventfd(0, os.EFD_NONBLOCK)
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._finished: deque[Compiled] = deque()

    def submit(self, message: CompileGrammar) -> None:
        """Queue a grammar."""
        self._thread.submit(self._compile, message)

    def finished(self) -> list[Compiled]:
        """Grammars that were compiled, or failed to be, since the last call."""
        try:
            os.eventfd_read(self.news)
        except BlockingIOError:  # none yet, or one whose signal is still to come
            return []
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _compile(self, message: CompileGrammar) -> None:
        problem: str | None = None
        try:
            self._engine.compile_grammar(message.grammar)
        except RequestError as error:
            problem = str(error)
        except Exception as error:  # of xgrammar, of whatever kind: the request's, not the engine's
            problem = f"the grammar cannot be compiled: {' '.join(str(error).split())[:300]}"
        self._finished.append(Compiled(message.request_id, problem))
        os.eventfd_write(self.news, 1)
