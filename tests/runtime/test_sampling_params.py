import dataclasses
import math

import pytest

from dsa_compile.errors import RequestError
from dsa_compile.runtime.requests.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("seed", 2**63),
        ("seed", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logprobs", -1),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {"1": 0.5}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 1),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"sampling parameter {field} must be ")
    assert "; got " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1},
        {"min_p": 1},
        {"temperature": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"logprobs": 0},
        {"max_tokens": 3, "min_tokens": 3},
    ],
)
def test_the_ends_of_the_ranges_are_taken(options):
    params = SamplingParams(**options)
    assert {name: getattr(params, name) for name in options} == options


def test_sequences_are_frozen():
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 1.0
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 1
    hash(params)


def test_one_stop_string_is_one_string():
    assert SamplingParams(stop="end").stop_strings == ("end",)


def test_end_ids():
    assert SamplingParams(stop_token_ids=[7]).end_ids([1, 2]) == {1, 2, 7}
    assert SamplingParams(stop_token_ids=[7], ignore_eos=True).end_ids([1, 2]) == {7}


def test_tiny_temperatures_are_greedy():
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 10**400),
        ("repetition_penalty", 10**400),
        ("max_tokens", -(10**4000)),
        ("stop", ["x"] * 65),
        ("stop", ["x" * 1025]),
        ("stop", [f"stop {n}" for n in range(10**5)]),
        ("stop_token_ids", range(2**20 + 1)),
        ("top_p", "x" * 10**6),
    ],
)
def test_values_beyond_what_a_step_should_pay_for(field, value):
    with pytest.raises(RequestError, match=f"sampling parameter {field}") as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 500
