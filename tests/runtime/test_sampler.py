import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.sampling import sampler as sampler_module
from dsa_compile.runtime.sampling.draw import draw, ordered_top, uniforms
from tests.runtime.sampled import EOS, naive_probabilities, random_logits, sample, state


def drawn_frequencies(logits, count, prompt=(1, 2, 2), output=(), **options):
    vocab = logits.shape[-1]
    states = [state(vocab, prompt, output, seed=i, **options) for i in range(count)]
    tokens = [t.token_id for t in sample(logits.expand(count, vocab), states)]
    return np.bincount(tokens, minlength=vocab) / count


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 99},
    {"top_p": 0.8},
    {"top_p": 0.01},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7, "min_p": 0.02, "temperature": 1.5},
    {"logit_bias": {0: 4.0, 7: -100.0}},
    {"min_tokens": 5, "stop_token_ids": (9,)},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
        "logit_bias": {4: 2.0, EOS: 5.0},
        "min_tokens": 4,
        "top_p": 0.9,
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_draws_follow_the_defined_distribution(options):
    count = 4_000
    logits = random_logits(1, 24, seed=5, spread=2.0)
    prompt, output = (1, 2, 2), (4, 4, 5)
    params = SamplingParams(max_tokens=1000, **options)
    want = naive_probabilities(logits[0], prompt, output, params)
    got = drawn_frequencies(logits, count, prompt, output, **options)
    assert not got[want == 0].any(), "a token outside the filters was drawn"
    # The seeds are fixed, so this cannot flake; five standard deviations leave room for 24 tokens.
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / count) + 1e-9).all()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 700),
    st.integers(0, 50),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.3),
    st.floats(0.2, 4.0),
)
def test_inverse_cdf_walks_through_the_kept_tokens(seed, vocab, top_k, top_p, min_p, temperature):
    logits = random_logits(1, vocab, seed)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    want = naive_probabilities(logits[0], (), (), params)
    points = 200
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    scaled = ((logits - logits.max()) / temperature).repeat(points, 1)
    tokens = draw(
        scaled,
        torch.full((points,), min(top_k, vocab) if top_k else vocab),
        torch.full((points,), top_p, dtype=torch.float64),
        torch.full((points,), min_p, dtype=torch.float64),
        u,
    )
    got = np.bincount(tokens.numpy(), minlength=vocab) / points
    # Evenly spread points meet each token's interval to within two points.
    assert (np.abs(got - want) <= 2 / points).all()


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(3, 600)
    logits[1, [50, 400]] = 1.0
    states = [state(600, temperature=0.0) for _ in range(3)]
    assert [t.token_id for t in sample(logits, states)] == [0, 50, 0]
    penalised = [state(600, temperature=0.0, repetition_penalty=2.0) for _ in range(3)]
    assert [t.token_id for t in sample(logits, penalised)] == [0, 50, 0]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.5, "top_k": 6}, {"top_p": 0.3}])
def test_filters_cut_equals_by_lowest_id(options):
    logits = torch.full((1, 10), -1.0)
    logits[0, [2, 4, 5, 6, 7, 9]] = 2.0
    params = SamplingParams(**options)
    want = naive_probabilities(logits[0], (), (), params) > 0
    got = drawn_frequencies(logits, 500, **options) > 0
    assert (got == want).all()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_ordered_top_is_a_stable_sort(rows, k):
    logits = torch.tensor(rows, dtype=torch.float32)
    values, ids = ordered_top(logits, k)
    for row, row_ids in zip(rows, ids.tolist(), strict=True):
        assert row_ids == sorted(range(9), key=lambda i: (-row[i], i))[:k]
    assert torch.equal(values, logits.gather(1, ids))


def stream(logits_of_step, options, neighbours=0, swap=False, prompt=(1, 2)):
    """Tokens of one request whose logits depend on its own tokens, among other requests."""
    vocab = 300
    mine = state(vocab, prompt, **options)
    others = [state(vocab, (5,), temperature=1.0, top_p=0.5 + 0.01 * i) for i in range(neighbours)]
    others += [state(vocab, (5,), temperature=0.0, logprobs=2) for _ in range(neighbours)]
    tokens = []
    for step in range(25):
        own = logits_of_step(step)
        rest = random_logits(len(others), vocab, seed=step + 999)
        rows, states = torch.cat([own, rest]), [mine, *others]
        if swap:
            order = torch.randperm(len(states), generator=torch.Generator().manual_seed(step))
            rows, states = rows[order], [states[i] for i in order.tolist()]
        chosen = dict(zip(map(id, states), sample(rows, states), strict=True))
        for one in states:
            one.append(chosen[id(one)].token_id)
        tokens.append(chosen[id(mine)].token_id)
    return tokens


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01, "presence_penalty": 1.0}]
)
def test_a_seeded_request_does_not_see_its_batch(options):
    options = {"seed": 11, **options}

    def logits(step):
        return random_logits(1, 300, seed=step)

    alone = stream(logits, options)
    assert stream(logits, options, neighbours=6) == alone
    assert stream(logits, options, neighbours=6, swap=True) == alone
    assert stream(logits, {**options, "seed": 12}) != alone
    assert len(set(alone)) > 5


def test_a_retried_step_draws_the_same_token():
    logits = random_logits(8, 200)
    states = [state(200, seed=i) for i in range(8)]
    first = sample(logits, states)
    assert sample(logits, states) == first
    for one, token in zip(states, first, strict=True):
        one.append(token.token_id)
    assert sample(logits, states) != first


def test_unseeded_requests_differ():
    logits = torch.zeros(20, 500)
    tokens = [t.token_id for t in sample(logits, [state(500) for _ in range(20)])]
    assert len(set(tokens)) > 10


def test_uniforms_are_uniform_and_unrelated():
    seeds, steps = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(100, dtype=np.uint64))
    u = uniforms(seeds.ravel(), steps.ravel()).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert len(np.unique(u)) == len(u)
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 99.9 % point at 19 degrees of freedom
    grid = u.reshape(100, 200)
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("vocab", [5, 128, 200, 1000])
@pytest.mark.parametrize(("short", "top_p"), [(0, 1.0), (0, 0.9), (1, 1.0)])
def test_the_last_uniform_stays_inside_the_kept_tokens(vocab, short, top_p):
    rows = 300
    scaled = random_logits(rows, vocab)
    scaled[:, -2:] = -torch.inf
    scaled -= scaled.amax(1, keepdim=True)
    tokens = draw(
        scaled.clone(),
        torch.full((rows,), vocab - short),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.zeros(rows, dtype=torch.float64),
        torch.full((rows,), 1 - 2.0**-52, dtype=torch.float64),
    )
    assert tokens.max() < vocab - 2


def test_a_wide_nucleus_in_a_large_vocabulary():
    vocab, rows = 6000, 64
    logits = random_logits(1, vocab, spread=0.5).expand(rows, vocab)
    want = naive_probabilities(logits[0], (), (), SamplingParams(top_p=0.95)) > 0
    assert want.sum() > 4096
    tokens = [t.token_id for t in sample(logits, [state(vocab, top_p=0.95) for _ in range(rows)])]
    assert want[tokens].all()
    assert len(set(tokens)) > rows // 2


def test_rows_are_worked_on_in_bounded_groups(monkeypatch):
    logits = random_logits(10, 64)
    options = [{"top_k": 1 + i, "seed": i, "logprobs": 1} for i in range(10)]
    whole = sample(logits, [state(64, **o) for o in options])
    monkeypatch.setattr(sampler_module, "_CHUNK_LOGITS", 3 * 64)
    assert sample(logits, [state(64, **o) for o in options]) == whole
