"""A runner that keeps sampled tokens to itself, as one on a GPU does, and fails when told to."""

import math
from dataclasses import replace

import numpy as np
import torch

from dsa_compile.runtime.sampling.device_sampler import DeviceSampler
from tests.runtime.hash_runner import HashRunner


class LaunchError(RuntimeError):
    pass


class ResultError(RuntimeError):
    pass


NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 412.00 MiB is free. Process 7 has 139.40 GiB memory in use."
)


class AsyncHashRunner(HashRunner):
    """``log`` lists launches, and waits for their tokens, by number.

    A step needs memory for every key of every token, and ``memory`` is what there is; one that
    finds too little has spoiled the cache rows it was to write when it says so.
    """

    def __init__(self, num_blocks, block_size, vocab_size, rows=256, **options):
        super().__init__(num_blocks, block_size, vocab_size, **options)
        self.token_buffer = torch.zeros(rows, dtype=torch.int64)
        self.rows_ahead = rows
        self.device_sampler = DeviceSampler(vocab_size, self.token_buffer)
        self.logits_buffer = torch.zeros(rows, vocab_size)
        self.log: list[tuple[str, int]] = []
        self.launches = 0
        self.failing_launches = 0
        self.failing_results = 0
        self.flatness = 1.0
        self.memory = math.inf

    def samples_ahead(self, states):
        return self.device_sampler.takes(states)

    def launch(self, inputs):
        self.check(inputs.batch)
        if not inputs.ahead:
            self.log.append(("run", self.launches))
            assert (inputs.batch.input_ids >= 0).all(), "a token that only the device knows"
            return super().launch(inputs)
        self.log.append(("launch", self.launches))
        logits = self.execute(self.resolve(inputs.batch))
        # One buffer for all steps, as behind a captured graph.
        self.logits_buffer.fill_(math.nan)
        self.logits_buffer[: len(logits)] = logits
        made = self.device_sampler.launch(self.logits_buffer[: len(logits)], inputs)
        tokens = WatchedTokens(self, self.launches, made)
        self.launches += 1
        return tokens

    def check(self, batch):
        """Fail as told to."""
        if np.dot(np.diff(batch.cu_seqlens), batch.context_lens) > self.memory:
            self.log.append(("no memory", batch.num_tokens))
            self.caches[:, batch.slot_mapping] = 0xBAD
            raise torch.OutOfMemoryError(NO_MEMORY)
        self.check_launch()

    def check_launch(self):
        if self.failing_launches:
            self.failing_launches -= 1
            raise LaunchError("the launch failed")

    def resolve(self, batch):
        """The batch with the tokens that only the device knows."""
        last = self.token_buffer.numpy()[np.repeat(batch.request_rows, np.diff(batch.cu_seqlens))]
        return replace(batch, input_ids=np.where(batch.input_ids < 0, last, batch.input_ids))

    def execute(self, batch):
        return super().execute(batch) / self.flatness


class WatchedTokens:
    """Tokens of a launch, whose sampling and waiting are logged."""

    def __init__(self, runner, number, tokens):
        self.runner, self.number, self.tokens = runner, number, tokens

    def sample(self):
        if self.tokens._chosen is None:
            self.runner.log.append(("sample", self.number))
            self.runner.check_launch()
            self.tokens.sample()

    def wait(self):
        self.runner.log.append(("wait", self.number))
        if self.runner.failing_results:
            self.runner.failing_results -= 1
            raise ResultError("device lost")
        return self.tokens.wait()
