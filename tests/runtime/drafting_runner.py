"""A runner that drafts tokens, right and wrong ones at random, and yields what was right.

What a drafting model derives on its device (the tokens that the host does not know, positions,
slots, context lengths and counts) is derived on the host here, from the same state by row: where a
request's last step ended, and the token it ended with.
"""

import random
from copy import copy
from dataclasses import replace

import numpy as np

from dsa_compile.runtime.execution.runner import ReadTokens, StepTokens
from dsa_compile.runtime.sampling.sampler import Sampler
from dsa_compile.runtime.scheduling.step import Failure
from tests.runtime.hash_runner import HashRunner

from .async_runner import AsyncHashRunner


class DraftingRunner(AsyncHashRunner):
    """``yields`` counts the steps of a request by how many tokens they yielded."""

    def __init__(self, num_blocks, block_size, vocab_size, num_drafts=4, right=0.6, **options):
        super().__init__(num_blocks, block_size, vocab_size, **options)
        self.num_drafts = num_drafts
        self.right = right
        self.chance = random.Random(1)
        self.sampler = Sampler(vocab_size)
        self.ends = np.zeros(self.rows_ahead, np.int64)  # the position of each row's last token
        self.yields: dict[int, int] = {}

    def samples_ahead(self, states):
        return not any(state.special for state in states)

    def launch(self, inputs):
        self.check(inputs.batch)
        self.log.append(("launch" if inputs.ahead else "run", self.launches))
        self.launches += 1
        self.steps.append(inputs.batch)
        wanted = iter(zip(inputs.states, inputs.counts, inputs.max_new, strict=True))
        with_logits = set(inputs.batch.logit_rows.tolist())
        results, logprobs = [], {}
        for index in range(inputs.batch.num_requests):
            part, excess = self.corrected(request_of(inputs.batch, index))
            if inputs.batch.cu_seqlens[index + 1] - 1 not in with_logits:
                self.run(part)
                continue
            state, count, max_new = next(wanted)
            choices = self.verified(part, state, count - excess, max_new)
            if choices[-1].failed is not None:
                results.append(Failure(choices[-1].failed))
                continue
            tokens = [choice.token_id for choice in choices]
            if choices[0].logprob is not None:
                logprobs[len(results)] = [choice.logprob for choice in choices]
            results.append(tokens)
            row = part.request_rows[0]
            self.token_buffer[row] = tokens[-1]
            self.ends[row] = part.positions[0] + part.num_tokens - max_new + len(tokens)
            self.yields[len(tokens)] = self.yields.get(len(tokens), 0) + 1
        return ReadTokens(lambda: StepTokens(results, logprobs))

    def corrected(self, part):
        """One request's part of a batch where its last step ended, and how much was taken off."""
        if part.input_ids[0] >= 0:
            return part, 0
        row = part.request_rows[0]
        ids = part.input_ids.copy()
        ids[0] = self.token_buffer[row]
        excess = int(part.positions[0] - self.ends[row])
        assert 0 <= excess <= self.num_drafts
        positions = part.positions - excess
        page, offset = np.divmod(positions, self.block_size)
        slots = part.block_tables[0, page].astype(np.int64) * self.block_size + offset
        assert (part.block_tables[0, page] >= 0).all()
        lengths = part.context_lens - excess
        part = replace(
            part, input_ids=ids, positions=positions, slot_mapping=slots, context_lens=lengths
        )
        return part, excess

    def verified(self, part, state, count, max_new):
        """Run a request with drafts; its choices up to the first that is not its draft's token."""
        ids, last = part.input_ids.copy(), part.num_tokens - max_new
        assert (ids[: last + 1] >= 0).all()
        assert (ids[last + 1 :] == -1).all()
        choices, right = [], True
        for token in range(last, part.num_tokens):
            now = replace(part, input_ids=ids)
            logits = self.run(prefix_of(now, token + 1) if token == last else only(now, token))
            if right:
                choices.append(self.choose(logits, state, count + token - last))
            if token + 1 < part.num_tokens:
                # After a wrong draft the rest is computed all the same, and its cache rows are bad.
                lucky = self.chance.random() < self.right and choices[-1].failed is None
                ids[token + 1] = choices[-1].token_id if lucky else self.chance.randrange(8)
                right &= ids[token + 1] == choices[-1].token_id and not state.special
        return choices

    def choose(self, logits, state, count):
        assert not state.special or count == state.generated
        then = copy(state)
        then.generated = count
        return self.sampler.sample(logits, [then])[0]

    def run(self, part):
        logits = HashRunner.execute(self, part) / self.flatness
        self.steps.pop()
        return logits


def request_of(batch, index):
    """The part of a batch that is one request's; logits of its last token."""
    start, end = batch.cu_seqlens[index : index + 2].tolist()
    return replace(
        batch,
        input_ids=batch.input_ids[start:end],
        positions=batch.positions[start:end],
        slot_mapping=batch.slot_mapping[start:end],
        block_tables=batch.block_tables[index : index + 1],
        cu_seqlens=np.array([0, end - start], np.int32),
        context_lens=batch.context_lens[index : index + 1],
        logit_rows=np.array([end - start - 1]),
        request_rows=batch.request_rows[index : index + 1],
    )


def prefix_of(part, count):
    return between(part, 0, count)


def only(part, token):
    return between(part, token, token + 1)


def between(part, start, end):
    """Tokens of a request's part."""
    rest = part.num_tokens - end
    return replace(
        part,
        input_ids=part.input_ids[start:end],
        positions=part.positions[start:end],
        slot_mapping=part.slot_mapping[start:end],
        cu_seqlens=np.array([0, end - start], np.int32),
        context_lens=part.context_lens - rest,
        logit_rows=np.array([end - start - 1]),
    )
