"""``Engine``: a compiled model, from prompts and conversations to outputs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from dsa_compile.common.keyword_names import suggests_names
from dsa_compile.errors import RequestError
from dsa_compile.runtime.engine_options import OTHER_NAMES, EngineOptions
from dsa_compile.runtime.failures.interrupts import Uninterrupted
from dsa_compile.runtime.output_stream import OutputStream
from dsa_compile.runtime.requests.chat_prompt import ChatOutput, ChatPrompt, encode_chat
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.prompts import Prompt
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.request import Request, Status
from dsa_compile.runtime.step_engine import StepEngine

Options = EngineOptions  # short, for the defaults below
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
        self._in_generate = Lock()
        self._generating: list[str] = []  # requests of the call of generate()
        # Dropping a stream ends it, so it is not kept alive here.
        self._streams: WeakValueDictionary[str, OutputStream] = WeakValueDictionary()

    @classmethod
    @suggests_names(OTHER_NAMES)
    def load(
        cls,
        path: str | Path,
        *,
        max_batched_tokens: int = Options.max_batched_tokens,
        max_running: int = Options.max_running,
        max_model_len: int | None = Options.max_model_len,
        enable_prefix_cache: bool = Options.enable_prefix_cache,
        overlap: bool | None = Options.overlap,
        deterministic: bool = Options.deterministic,
        num_blocks: int | None = Options.num_blocks,
        gpu_memory_utilization: float = Options.gpu_memory_utilization,
        cuda_graphs: bool = Options.cuda_graphs,
        mixed_graph_tokens: tuple[int, ...] = Options.mixed_graph_tokens,
        shipped_kernels: bool | None = Options.shipped_kernels,
        load_format: str = Options.load_format,
        verify: str = Options.verify,
        digest: str | None = Options.digest,
        model_dir: str | Path | None = Options.model_dir,
        debug_launches: bool = Options.debug_launches,
        generation_config: str = Options.generation_config,
        skip_tokenizer: bool = Options.skip_tokenizer,
        draft: str | None = Options.draft,
        num_speculative_tokens: int | None = Options.num_speculative_tokens,
        draft_max_rows: int | None = Options.draft_max_rows,
        force_accept: float | None = Options.force_accept,
        count_experts: bool = Options.count_experts,
        rank_timeout: float = Options.rank_timeout,
        collectives: str = Options.collectives,
        rank: int | None = Options.rank,
        ranks: int | None = Options.ranks,
        latencies: str | Path | None = Options.latencies,
    ) -> "Engine":
        """Load an artifact; log each phase of it to ``dsa_compile.runtime``, at level INFO.

        Args:
            path: the artifact's directory. :class:`EngineOptions` describes the other arguments,
                and :meth:`from_artifact` takes them as one object.
            max_batched_tokens: most tokens of a step.
            max_running: most requests of a step.
            max_model_len: most tokens of a request.
            enable_prefix_cache: reuse the cache rows of equal prefixes.
            overlap: launch the next step while one runs.
            deterministic: tokens that do not depend on what runs beside them.
            num_blocks: blocks of each cache.
            gpu_memory_utilization: share of the GPU's memory to use.
            cuda_graphs: run decode steps as CUDA graphs.
            mixed_graph_tokens: of the steps with prompts to run as CUDA graphs.
            shipped_kernels: run the machine code in the artifact.
            load_format: ``auto``, or ``dummy`` for random weights.
            verify: check weight files ``full`` or their ``header`` alone.
            digest: of the one artifact to take.
            model_dir: where the model's weights are now.
            debug_launches: wait for every op, to have a failing one named.
            generation_config: ``auto``, or ``none`` to leave out the model's sampling parameters.
            skip_tokenizer: work in token ids alone.
            draft: ``mtp``, ``ngram`` or ``none``; None: as the artifact can.
            num_speculative_tokens: most tokens drafted for a request in a step, 0 to 4.
            draft_max_rows: most requests running for any to get drafts.
            force_accept: tokens that a step keeps, right or wrong, to time random weights.
            count_experts: count the tokens of routed experts.
            rank_timeout: seconds that ranks wait for each other.
            collectives: ``nccl`` or ``symmetric``: how ranks on GPUs meet; ``replay``: one rank
                without the others, to project times.
            rank: the rank to load so.
            ranks: how many there must be.
            latencies: the file of times to replay.

        Raises:
            ArtifactError: the artifact or its weights are absent, edited or of another version, or
                its digest is another.
            UserError: an option is not what it may be, or the caches do not fit into memory.
        """
        options = EngineOptions(
            max_batched_tokens=max_batched_tokens,
            max_running=max_running,
            max_model_len=max_model_len,
            enable_prefix_cache=enable_prefix_cache,
            overlap=overlap,
            deterministic=deterministic,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            cuda_graphs=cuda_graphs,
            mixed_graph_tokens=mixed_graph_tokens,
            shipped_kernels=shipped_kernels,
            load_format=load_format,
            verify=verify,
            digest=digest,
            model_dir=model_dir,
            debug_launches=debug_launches,
            generation_config=generation_config,
            skip_tokenizer=skip_tokenizer,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            draft_max_rows=draft_max_rows,
            force_accept=force_accept,
            count_experts=count_experts,
            rank_timeout=rank_timeout,
            collectives=collectives,
            rank=rank,
            ranks=ranks,
            latencies=latencies,
        )
        return cls.from_artifact(path, options)

    @classmethod
    def from_artifact(cls, path: str | Path, options: EngineOptions | None = None) -> "Engine":
        """Load an artifact as :meth:`load` does, with the options in one object.

        Raises:
            ArtifactError: as :meth:`load`.
            UserError: likewise.
        """
        # Here, so that an engine over another runner loads nothing of the artifact's reader.
        from dsa_compile.runtime.loading.load_parts import load_parts

        options = options or EngineOptions()
        parts = load_parts(Path(path), options)
        return cls(
            parts.runner,
            options,
            parts.tokenizer,
            generation_config=parts.generation_config,
            chat_format=parts.chat_format,
            vocabulary=parts.vocabulary,
            acceptance=parts.acceptance,
            expert_counts=parts.runner.expert_counts,
            name=parts.name,
        )

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
        if not self._in_generate.acquire(blocking=False):
            raise RequestError(
                "generate() runs in another thread, and an engine is for one at a time; "
                "use AsyncEngine"
            )
        try:
            return self._generate(prompts, params)
        finally:
            self._in_generate.release()

    def _generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        self._end_generating()  # an interrupt may have kept the last call from it
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
        finally:
            self._end_generating()
        return [outputs[request_id] for request_id in ids]

    def _end_generating(self) -> None:
        if not self._generating:
            return
        with Uninterrupted():
            for request_id in self._generating:
                self.abort(request_id)
        self.drain()
        with Uninterrupted():
            for request in [r for r in self._live if r.finish_reason is not None]:
                del self._live[request]  # an interrupt has kept it from being reported
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
        self._end_generating()
        if not self._streams and self.scheduler.has_unfinished():
            raise RequestError("stream() needs an idle engine; finish or abort its requests")
        self._calls += 1
        request_id = f"stream-{self._calls}"
        self.add_request(request_id, prompt, params)
        stream = OutputStream(self, request_id)
        self._streams[request_id] = stream
        return stream

    def _output(self, request: Request) -> RequestOutput:
        output = super()._output(request)
        stream = self._streams.get(request.request_id)
        if stream is not None:
            stream.push(output)
        return output

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        drop_thinking: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Encode a conversation in the model's chat format, for any method that takes a prompt.

        Args:
            messages: in the form of OpenAI's API.
            tools: that the model may call.
            thinking: whether the answer begins with reasoning; None is the model's default.
            drop_thinking: leave out the reasoning of earlier turns; None is the model's default.
            response_format: OpenAI's.
            template_kwargs: further options, by the names that the model's template gives them.

        Raises:
            ChatError: the conversation cannot be encoded.
            RequestError: the model has no chat format or no tokenizer.
        """
        return encode_chat(
            self._get_chat_format(),
            self._tokenizer,
            messages,
            tools=tools,
            thinking=thinking,
            drop_thinking=drop_thinking,
            response_format=response_format,
            template_kwargs=template_kwargs,
        )

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        drop_thinking: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatOutput:
        """Answer one conversation: reasoning, content and tool calls.

        Args:
            messages: as for :meth:`chat_prompt`; the others too.
            params: None for :attr:`default_params`.
            tools: see :meth:`chat_prompt`.
            thinking: see :meth:`chat_prompt`.
            drop_thinking: see :meth:`chat_prompt`.
            response_format: see :meth:`chat_prompt`; the answer is not forced to follow it.
            template_kwargs: see :meth:`chat_prompt`.

        Raises:
            ChatError: as :meth:`chat_prompt`.
            RequestError: as :meth:`generate`.
        """
        prompt = self.chat_prompt(
            messages,
            tools=tools,
            thinking=thinking,
            drop_thinking=drop_thinking,
            response_format=response_format,
            template_kwargs=template_kwargs,
        )
        (output,) = self.generate([prompt], params)
        return ChatOutput(prompt.parse(output.text or ""), output)
