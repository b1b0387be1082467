"""The options of an engine: one list of them, wherever they are given."""

import inspect
import re
from dataclasses import fields

import pytest

from dsa_compile.common.keyword_names import suggests_names
from dsa_compile.errors import OptionError, UserError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams


def test_loading_takes_every_option_with_its_default_and_no_other():
    parameters = dict(inspect.signature(Engine.load).parameters)
    del parameters["path"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    signature = {name: p.default for name, p in parameters.items()}
    assert signature == {each.name: each.default for each in fields(EngineOptions)}


def test_loading_passes_every_option_on(monkeypatch):
    given = {
        "max_batched_tokens": 7, "max_running": 6, "max_model_len": 5, "enable_prefix_cache": False,
        "overlap": False, "deterministic": True, "num_blocks": 4, "gpu_memory_utilization": 0.5,
        "cuda_graphs": False, "shipped_kernels": True, "load_format": "dummy", "verify": "header",
        "digest": "7" * 64, "model_dir": "moved", "debug_launches": True,
        "generation_config": "none", "skip_tokenizer": True, "draft": "ngram",
        "num_speculative_tokens": 2, "draft_max_rows": 3, "rank_timeout": 2.5,
        "collectives": "replay", "rank": 3, "ranks": 8, "latencies": "times.json",
        "mixed_graph_tokens": (512, 2048), "force_accept": 2.5,
        "count_experts": True,
    }  # fmt: skip
    assert given.keys() == {each.name for each in fields(EngineOptions)}
    assert all(given[each.name] != each.default for each in fields(EngineOptions))
    seen = []
    monkeypatch.setattr(Engine, "from_artifact", lambda path, options: seen.append((path, options)))
    Engine.load("here", **given)
    assert seen == [("here", EngineOptions(**given))]


def test_every_option_is_described():
    described = set(
        re.findall(r"^ {8}(\w+): ", inspect.getdoc(EngineOptions).replace("\n", "\n    "), re.M)
    )
    assert described >= {each.name for each in fields(EngineOptions)}
    loading = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(Engine.load), re.M))
    assert loading >= {each.name for each in fields(EngineOptions)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: EngineOptions(max_runing=1),
            r"EngineOptions\(\).*'max_runing'; did you mean 'max_running'\?",
        ),
        (lambda: EngineOptions(max_num_seqs=1), r"did you mean 'max_running'\?"),
        (
            lambda: Engine.load("x", max_num_batched_tokens=1),
            r"Engine.load\(\).*mean 'max_batched_tokens'",
        ),
        (lambda: Engine.load("x", zzz=1), r"'zzz'; choose one of path, max_batched_tokens, "),
        (lambda: SamplingParams(max_new_tokens=4), r"SamplingParams\(\).*mean 'max_tokens'\?"),
        (lambda: SamplingParams(temprature=4), r"mean 'temperature'\?"),
    ],
)
def test_a_wrong_name_suggests_the_right_one(call, message):
    with pytest.raises(OptionError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, UserError)


def test_what_suggests_names_keeps_its_signature():
    @suggests_names()
    def scale(value: int, *, factor: int = 2) -> int:
        """Multiply."""
        return value * factor

    assert scale(3, factor=4) == 12
    assert str(inspect.signature(scale)) == "(value: int, *, factor: int = 2) -> int"
    with pytest.raises(OptionError, match="did you mean 'factor'"):
        scale(3, factr=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running must be an integer >= 1; got 0"),
        ({"num_blocks": True}, "num_blocks must be an integer >= 1; got True"),
        ({"cuda_graphs": 1}, "cuda_graphs must be True or False; got 1"),
        ({"mixed_graph_tokens": [512]}, r"must be a tuple of integers >= 1; got \[512\]"),
        ({"mixed_graph_tokens": (512, 0)}, "must be a tuple of integers >= 1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5 must be in"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization='x' must be in"),
        ({"load_format": "gguf"}, "load_format='gguf': choose one of auto, dummy"),
        ({"generation_config": "vllm"}, "generation_config='vllm': choose one of auto, none"),
        ({"debug_launches": True, "overlap": True}, "leave out overlap=True"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(UserError, match=message):
        Engine.load("nowhere", **options)


def test_only_what_differs_is_shown():
    assert repr(EngineOptions()) == "EngineOptions()"
    assert repr(EngineOptions(max_running=3)) == "EngineOptions(max_running=3)"
    shown = SamplingParams(temperature=0.0, stop="x", logit_bias={3: 1.5})
    assert repr(shown) == "SamplingParams(temperature=0.0, logit_bias={3: 1.5}, stop=('x',))"
    assert eval(repr(shown)) == shown
