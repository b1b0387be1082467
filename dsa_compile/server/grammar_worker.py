"""Compiling grammars beside an engine's steps, in a thread of its own."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from dsa_compile.errors import RequestError
from dsa_compile.runtime import Engine
from dsa_compile.server.grammar_process import GrammarTrial, Vocabulary
from dsa_compile.server.protocol import Compiled, CompileGrammar


class GrammarWorker:
    """Compiles grammars into the cache of an engine, from which its requests take them.

    A grammar takes milliseconds, but the first one imports xgrammar and reads the vocabulary, and
    one that means harm takes any time and memory. So each is tried in another process first, which
    has limits of both.

    Args:
        engine: whose vocabulary it is.
        trial: made when there is the first grammar; by default, of the engine's vocabulary.

    Attributes:
        news: a file descriptor that can be read when :meth:`finished` has something.
    """

    def __init__(self, engine: Engine, trial: Callable[[], GrammarTrial] | None = None) -> None:
        self.news = os.eventfd(0, os.EFD_NONBLOCK)
        self._engine = engine
        self._new_trial = trial or (lambda: GrammarTrial(_vocabulary(engine)))
        self._trial: GrammarTrial | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._tried: str | None = None  # the request whose grammar is in the other process
        self._waiting: dict[str, Future[None]] = {}
        self._finished: deque[Compiled] = deque()

    def submit(self, message: CompileGrammar) -> None:
        """Queue a grammar."""
        self._waiting[message.request_id] = self._thread.submit(self._compile, message)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Leave out grammars that nobody waits for any more, the one that is tried among them."""
        for request_id in request_ids:
            work = self._waiting.get(request_id)
            if work is not None and work.cancel():
                del self._waiting[request_id]
            with self._lock:
                if self._tried == request_id and self._trial is not None:
                    self._trial.stop()

    def finished(self) -> list[Compiled]:
        """Grammars that were compiled, or failed to be, since the last call."""
        try:
            os.eventfd_read(self.news)
        except BlockingIOError:  # none yet, or one whose signal is still to come
            return []
        found = [self._finished.popleft() for _ in range(len(self._finished))]
        for compiled in found:
            self._waiting.pop(compiled.request_id, None)
        return found

    def _compile(self, message: CompileGrammar) -> None:
        try:
            problem = self._try(message)
            if problem is None:
                self._engine.compile_grammar(message.grammar)
        except RequestError as error:
            problem = str(error)
        except Exception as error:  # of xgrammar, of whatever kind: the request's, not the engine's
            problem = f"the grammar cannot be compiled: {' '.join(str(error).split())[:300]}"
        self._finished.append(Compiled(message.request_id, problem))
        os.eventfd_write(self.news, 1)

    def _try(self, message: CompileGrammar) -> str | None:
        if self._trial is None:
            self._trial = self._new_trial()
        with self._lock:
            self._tried = message.request_id
        try:
            return self._trial.problem(message.grammar)
        finally:
            with self._lock:
                self._tried = None


def _vocabulary(engine: Engine) -> Vocabulary:
    tokenizer = engine.grammar_tokenizer
    text = None if tokenizer is None else tokenizer.to_str()
    return Vocabulary(text, engine.vocab_size, engine.eos_token_ids)
