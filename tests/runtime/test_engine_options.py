"""The options of an engine: one list of them, wherever they are given."""

import inspect
import math
import pickle
import re
from dataclasses import fields
from pathlib import Path

import pytest

from dsa_compile.errors import FLAGS, OptionError, OptionValueError, UserError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.loading import load_parts


def test_loading_takes_every_option_with_its_default_and_no_other():
    parameters = dict(inspect.signature(Engine.load).parameters)
    del parameters["path"], parameters["options"]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    signature = {name: p.default for name, p in parameters.items()}
    assert signature == {each.name: each.default for each in fields(EngineOptions)}


def test_loading_passes_every_option_on(monkeypatch):
    given = {
        "max_num_batched_tokens": 7, "max_num_seqs": 6, "max_model_len": 5,
        "enable_prefix_caching": False, "async_scheduling": False, "deterministic": True,
        "num_gpu_blocks_override": 4, "gpu_memory_utilization": 0.5, "enforce_eager": True,
        "shipped_kernels": True, "load_format": "dummy", "verify": "header",
        "digest": "7" * 64, "model_dir": "moved", "debug_launches": True,
        "generation_config": "none", "skip_tokenizer_init": True, "draft": "ngram",
        "num_speculative_tokens": 2, "draft_max_rows": 3, "rank_timeout": 2.5,
        "collectives": "replay", "rank": 3, "ranks": 8, "latencies": "times.json",
        "mixed_graph_tokens": (512, 2048), "force_accept": 2.5,
        "count_experts": True,
    }  # fmt: skip
    assert given.keys() == {each.name for each in fields(EngineOptions)}
    assert all(given[each.name] != each.default for each in fields(EngineOptions))
    seen = []

    def stop(path, options):
        seen.append((path, options))
        raise UserError("seen")

    monkeypatch.setattr(load_parts, "load_parts", stop)
    for call in (
        lambda: Engine.load("a", **given),
        lambda: Engine.load("a", EngineOptions(**given)),
    ):
        with pytest.raises(UserError, match="seen"):
            call()
    assert seen == [(Path("a"), EngineOptions(**given))] * 2


def test_options_are_given_in_one_way():
    with pytest.raises(UserError, match=r"give options=EngineOptions\(\.\.\.\) or single options"):
        Engine.load("a", EngineOptions(), max_num_seqs=3)


def test_every_option_is_described():
    for described in (EngineOptions, Engine.load):
        names = set(re.findall(r"^ {4}(\w+): ", inspect.getdoc(described), re.M))
        assert names >= {each.name for each in fields(EngineOptions)}


def test_former_names_are_taken_with_a_warning():
    with pytest.warns(DeprecationWarning, match="max_running is now max_num_seqs"):
        assert EngineOptions(max_running=3) == EngineOptions(max_num_seqs=3)
    with pytest.warns(DeprecationWarning, match="cuda_graphs is now enforce_eager"):
        assert EngineOptions(cuda_graphs=False) == EngineOptions(enforce_eager=True)
    with pytest.raises(OptionError, match="max_running is max_num_seqs, which is given too"):
        EngineOptions(max_running=3, max_num_seqs=4)


def test_an_error_survives_a_pipe_and_names_flags_to_commands():
    with pytest.raises(OptionValueError) as caught:
        EngineOptions(digest="{x}", max_num_seqs=0)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == "max_num_seqs must be an integer >= 1; got 0"
    assert error.spelt(FLAGS) == "--max-num-seqs must be an integer >= 1; got 0"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: EngineOptions(max_num_seq=1),
            r"EngineOptions\(\).*'max_num_seq'; did you mean 'max_num_seqs'\?",
        ),
        (lambda: EngineOptions(max_batch_size=1), r"did you mean 'max_num_seqs'\?"),
        (
            lambda: Engine.load("x", chunked_prefill_size=1),
            r"Engine.load\(\).*mean 'max_num_batched_tokens'",
        ),
        (lambda: Engine.load("x", zzz=1), r"'zzz'; choose one of path, options, max_num_batched_"),
        (lambda: SamplingParams(max_new_tokens=4), r"SamplingParams\(\).*mean 'max_tokens'\?"),
        (lambda: SamplingParams(temprature=4), r"mean 'temperature'\?"),
    ],
)
def test_a_wrong_name_suggests_the_right_one(call, message):
    with pytest.raises(OptionError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer >= 1; got 0"),
        ({"num_gpu_blocks_override": True}, "override must be an integer >= 1; got True"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False; got 1"),
        ({"mixed_graph_tokens": [512, 0]}, r"must be a tuple of integers >= 1; got \(512, 0\)"),
        ({"gpu_memory_utilization": 1.5}, r"must be a number in \(0, 1\]; got 1.5"),
        ({"gpu_memory_utilization": "x"}, r"must be a number in \(0, 1\]; got 'x'"),
        ({"rank_timeout": math.nan}, r"a number of seconds in \(0, 1000000\]; got nan"),
        ({"model_dir": 3}, "model_dir must be a text; got 3"),
        ({"load_format": "gguf"}, "unknown load format 'gguf'; choose one of auto, dummy"),
        ({"generation_config": "vllm"}, "unknown generation config 'vllm'; choose one of auto"),
        ({"debug_launches": True, "async_scheduling": True}, "leave out async_scheduling"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(UserError, match=message):
        Engine.load("nowhere", **options)


def test_only_what_differs_is_shown():
    assert repr(EngineOptions()) == "EngineOptions()"
    assert repr(EngineOptions(max_num_seqs=3)) == "EngineOptions(max_num_seqs=3)"
    shown = SamplingParams(temperature=0.0, stop="x", logit_bias={3: 1.5})
    assert repr(shown) == "SamplingParams(temperature=0.0, logit_bias={3: 1.5}, stop=('x',))"
    assert eval(repr(shown)) == shown
