"""A process that tries grammars: ``python -m dsa_compile.server.grammar_process``.

Whatever a grammar does to its compiler happens here: the kernel ends the process when one takes too
much CPU time, and refuses it memory.

Messages are MessagePack behind their length, on standard input and output.
"""

import os
import resource
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from dsa_compile.errors import RequestError
from dsa_compile.runtime.requests.grammar import Grammar

CPU_SECONDS = 10
MEMORY = 2 << 30
_LENGTH = struct.Struct("<Q")


class Vocabulary(msgspec.Struct, frozen=True):
    """The first message.

    Attributes:
        tokenizer: a ``tokenizers.Tokenizer`` as JSON, or None.
        size: token ids.
        eos_ids: the model's end tokens.
        cpu_seconds: that one grammar may take.
    """

    tokenizer: str | None
    size: int
    eos_ids: tuple[int, ...]
    cpu_seconds: int = CPU_SECONDS


class GrammarTrial:
    """The other end: tries grammars one after another, in a process that is made anew if it ends.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def problem(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar; None if a request may use it."""
        process = self._process
        if process is None or self._stopped or process.poll() is not None:
            self.close()
            process = self._process = _start()
            self._stopped = False
            _send(process.stdin, self._vocabulary)
        try:
            _send(process.stdin, grammar)
            answer: str | None = msgspec.msgpack.decode(_receive(process.stdout), type=str | None)
        except (EOFError, OSError):
            if process.wait() == -signal.SIGXCPU:
                return f"the grammar takes more than {self._vocabulary.cpu_seconds} s to compile"
            return "the grammar's compiler failed, perhaps for lack of memory; make it smaller"
        return answer

    def stop(self) -> None:
        """End what :meth:`problem` does in another thread, which finds a problem then."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _start() -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "dsa_compile.server.grammar_process")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _send(stream: Any, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: Any) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    data: bytes = stream.read(*_LENGTH.unpack(head))
    return data


def main() -> None:
    """Try grammars until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with suppress(EOFError):
        _serve(sys.stdin.buffer, answers)


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    vocabulary = msgspec.msgpack.decode(_receive(questions), type=Vocabulary)
    from tokenizers import Tokenizer

    from dsa_compile.runtime.sampling.grammar import GrammarCompiler

    text = vocabulary.tokenizer
    tokenizer = None if text is None else Tokenizer.from_str(text)
    compiler = GrammarCompiler(lambda: tokenizer, vocabulary.size)
    with suppress(RequestError):  # which every grammar will meet again
        compiler.compile(Grammar("regex", "a"), vocabulary.eos_ids)  # reads the vocabulary
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY)
    while True:
        grammar = msgspec.msgpack.decode(_receive(questions), type=Grammar)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(
            resource.RLIMIT_CPU,
            int(used.ru_utime + used.ru_stime) + 1 + vocabulary.cpu_seconds,
        )
        problem: str | None = None
        try:
            compiler.rehearse(grammar, vocabulary.eos_ids)
        except RequestError as error:
            problem = str(error)
        except Exception as error:  # of xgrammar, of whatever kind
            problem = f"the grammar cannot be compiled: {' '.join(str(error).split())[:300]}"
        _send(answers, problem)


def _limit(what: int, most: int) -> None:
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
