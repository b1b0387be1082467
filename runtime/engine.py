"""``Engine``: a compiled model, from prompts and conversations to outputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, overload
from weakref import ref

from dsa_compile.common.option_keywords import keywords_of, takes_options
from dsa_compile.errors import RequestError
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.failures.interrupts import SoleCall, Uninterrupted
from dsa_compile.runtime.output_stream import OutputStream
from dsa_compile.runtime.requests.chat_prompt import (
    ChatOptions,
    ChatOutput,
    ChatPrompt,
    encode_chat,
)
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.prompts import Prompt
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.request import Request, Status
from dsa_compile.runtime.step_engine import StepEngine

Messages = Sequence[Mapping[str, Any]]


class Engine(StepEngine):
    """Generates tokens for many requests at once; not thread-safe.

    Use :meth:`generate`, :meth:`stream` or :meth:`chat`; a server calls :meth:`add_request`, and
    :meth:`step` until :meth:`has_unfinished` is false. As a context manager it closes itself. See
    :class:`StepEngine` for the arguments.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._calls = 0  # of generate() and stream()
        self._in_generate = SoleCall()
        self._generating: list[str] = []  # requests of the call of generate()
        # Those with outputs to come. Dropping a stream ends it, so it is not kept alive here.
        self._streams: dict[str, ref[OutputStream]] = {}

    @overload
    @classmethod
    def load(cls, path: str | Path, options: EngineOptions | None = None) -> "Engine": ...

    @overload
    @classmethod
    @keywords_of(EngineOptions)
    def load(cls, path: str | Path) -> "Engine": ...

    @classmethod
    @takes_options(EngineOptions)
    def load(cls, path: str | Path, options: EngineOptions) -> "Engine":
        """Load an artifact; log each phase of it to ``dsa_compile.runtime``, at level INFO.

        Args:
            path: the artifact's directory.
            options: the options below as one object, instead of them.

        Raises:
            ArtifactError: the artifact or its weights are absent, edited or of another version, or
                its digest is another.
            UserError: an option is not what it may be, or the caches do not fit into memory.
        """
        # Here, so that an engine over another runner loads nothing of the artifact's reader.
        from dsa_compile.runtime.loading.load_parts import load_parts

        return cls(options=options, **load_parts(Path(path), options))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return the finished outputs in the prompts' order.

        Args:
            prompts: each a text, token ids or a conversation, see :data:`Prompt`.
            params: one for all, or one a prompt; None for :attr:`default_params`.

        Raises:
            RequestError: a prompt or its parameters cannot be served (nothing is run), requests
                added with :meth:`add_request` are unfinished, or another thread generates.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise RequestError(
                "prompts must be a list of prompts, each a text or a list of ids; "
                "put a single prompt into a list"
            )
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        if not self._in_generate.enter():
            raise RequestError(
                "generate() runs in another thread, and an engine is for one at a time; "
                "use AsyncEngine"
            )
        try:
            return self._generate(prompts, params)
        finally:
            self._in_generate.leave()

    def _generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        self._end_left()  # an interrupt may have kept the last call from it
        if self.scheduler.has_unfinished():
            raise RequestError("generate() needs an idle engine; finish or abort its requests")
        self._calls += 1
        ids = [f"generate-{self._calls}-{index}" for index in range(len(prompts))]
        outputs: dict[str, RequestOutput] = {}
        self._generating = ids
        try:
            for request_id, prompt, chosen in zip(ids, prompts, params, strict=True):
                self.add_request(request_id, prompt, chosen)
            while self.has_unfinished():
                for request in self._pipeline.advance():
                    if request.status is Status.FINISHED:
                        outputs[request.request_id] = self._output(request)
                self.wait()
        finally:
            self._end_left()
        return [outputs[request_id] for request_id in ids]

    def _end_left(self) -> None:
        """Abort the requests of the last call of generate(), and of streams closed or dropped."""
        held = [(request_id, stream()) for request_id, stream in self._streams.items()]
        left = [request_id for request_id, stream in held if stream is None or stream.closed]
        del held
        left += self._generating
        if not left:
            return
        with Uninterrupted():
            for request_id in left:
                self.abort(request_id)
                self._streams.pop(request_id, None)
        self.drain()
        self._generating = []

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> OutputStream:
        """Generate for one prompt and yield an output a step: ``new_text`` and ``new_token_ids``
        are what the step added; the last has a ``finish_reason``.

        Several streams may be open at once and share steps; each runs them as it needs them.
        Closing a stream, or dropping it, aborts its request.

        Args:
            prompt: as for :meth:`add_request`.
            params: None for :attr:`default_params`.

        Raises:
            RequestError: the prompt or its parameters cannot be served, or requests added with
                :meth:`add_request` are unfinished.
        """
        self._end_left()
        if not self._streams and self.scheduler.has_unfinished():
            raise RequestError("stream() needs an idle engine; finish or abort its requests")
        self._calls += 1
        request_id = f"stream-{self._calls}"
        stream = OutputStream(self, request_id)
        self._streams[request_id] = ref(stream)
        self.add_request(request_id, prompt, params)
        return stream

    def _output(self, request: Request) -> RequestOutput:
        held = self._streams.get(request.request_id)
        if held is None:
            return super()._output(request)
        with Uninterrupted():
            output = super()._output(request)
            if (stream := held()) is not None:
                stream.push(output)
            if output.finished:
                del self._streams[request.request_id]
        return output

    def chat_prompt(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatPrompt:
        """Encode a conversation in the model's chat format, for any method that takes a prompt.

        Args:
            messages: in the form of OpenAI's API.
            **options: see :class:`~dsa_compile.runtime.requests.chat_prompt.ChatOptions`.

        Raises:
            ChatError: the conversation cannot be encoded.
            RequestError: the model has no chat format or no tokenizer.
        """
        return encode_chat(self._get_chat_format(), self.tokenizer, messages, **options)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatOutput:
        """Answer one conversation: reasoning, content and tool calls.

        Args:
            messages: as for :meth:`chat_prompt`.
            params: None for :attr:`default_params`.
            **options: as for :meth:`chat_prompt`.

        Raises:
            ChatError: as :meth:`chat_prompt`.
            RequestError: as :meth:`generate`.
        """
        prompt = self.chat_prompt(messages, **options)
        (output,) = self.generate([prompt], params)
        cut = output.finish_reason != "stop"
        return ChatOutput(prompt.parse(output.text or "", cut), output)
