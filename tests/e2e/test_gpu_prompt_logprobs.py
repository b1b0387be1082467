"""Log-probabilities of prompts on a Hopper GPU: the CPU's, beside requests that run ahead."""

import pytest
import torch

from dsa_compile.runtime import Engine, SamplingParams

pytestmark = pytest.mark.gpu(capability=(9, 0))


def test_they_are_those_of_the_cpu(trained) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 63, 65, 300, 700]
    prompts = [torch.randint(3, 1500, (n,), generator=generator).tolist() for n in lengths]
    wanted = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=4)
    plain = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    options = {"num_gpu_blocks_override": 200, "max_num_seqs": 32, "max_num_batched_tokens": 256}
    found = {}
    for target in ("cpu", "sm_90a"):
        engine = Engine.load(trained(target, "fp32"), **options)
        beside = engine.generate(prompts, plain)
        outputs = engine.generate([*prompts, *prompts], [*[wanted] * 6, *[plain] * 6])
        assert [o.token_ids for o in outputs[6:]] == [o.token_ids for o in beside]
        found[target] = [output.prompt_logprobs for output in outputs[:6]]
        assert engine.stats().late_kernels == 0
        engine.close()
    for prompt, cpu, gpu in zip(prompts, *found.values(), strict=True):
        assert [entry.token_id for entry in gpu] == prompt[1:]
        for one, other in zip(cpu, gpu, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-3)
            assert [v for _, v in other.top] == pytest.approx([v for _, v in one.top], abs=1e-3)
