"""An engine without a model, for what the commands print."""

from dsa_compile.common.options import changed_fields
from dsa_compile.errors import ArtifactError, RequestError
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.outputs import Completion, Transcript
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.stats import SchedulerStats


class Letters:
    """Token i is the i-th letter."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + i) for i in ids)


class StubEngine:
    """Counts up from each prompt's last token; later requests take more steps."""

    tokenizer = None
    fails = ()
    loaded = None
    params = None
    default_params = SamplingParams()
    options = EngineOptions()

    def __init__(self):
        self.requests = {}

    @classmethod
    def load(cls, path, options):
        cls.loaded = (path, dict(changed_fields(options)))
        if path == "missing":
            raise ArtifactError("missing: no such\ndirectory")
        return cls()

    def add_request(self, request_id, prompt, params, priority=0):
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"request {request_id!r}: text needs a tokenizer")
            prompt = [ord(c) - ord("a") for c in prompt]
        type(self).params = params
        self.requests[request_id] = (prompt, [], Completion(params, [25], self.tokenizer))

    def stats(self):
        return SchedulerStats(0, 0, 0, 0, 0, 0, 0)

    def has_unfinished(self):
        return any(c.finish_reason is None for _, _, c in self.requests.values())

    def step(self):
        outputs = []
        for name, (prompt, tokens, completion) in reversed(self.requests.items()):
            if completion.finish_reason:
                continue
            tokens.append((prompt[-1] + len(tokens) + 1) % 26)
            completion.append(tokens[-1])
            error = None
            if name in self.fails:
                completion.finish_reason = "error"
                error = f"request {name!r}: logits hold NaN"
            wanted = completion._params.logprobs is not None
            entries = [TokenLogprobs(t, -0.5, 1, ((t, -0.5),)) for t in tokens]
            transcript = Transcript(
                prompt, completion.pieces, entries if wanted else None, list(tokens)
            )
            outputs.append(transcript.output(name, completion.finish_reason, error))
        return outputs
