"""Faults of the runtime: batches, blocks, prefixes, sampling."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="short-if-any-is",
        about="a step counts as short if one of its contexts is",
        file="runtime/execution/batch.py",
        old="int(self.context_lens.max()) <= topk",
        new="int(self.context_lens.min()) <= topk",
        kind="runtime",
        culprit="batch",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="slots-of-the-first-page",
        about="a chunk's slots take the page number from its own start",
        file="runtime/execution/batch.py",
        old=("slot_mapping = block_tables[token_row, page].astype(np.int64) * block_size + offset"),
        new=(
            "page = page - page[np.r_[0, np.cumsum(counts)[:-1]]][token_row] * "
            "(counts > 1)[token_row]\n"
            "    slot_mapping = block_tables[token_row, page].astype(np.int64) * "
            "block_size + offset"
        ),
        kind="runtime",
        culprit="batch",
        recipe="fp8",
        hidden_by="max_batched_tokens=2048",
        echo="tenstorrent/tt-metal#55630",
    ),
    Fault(
        id="prefix-key-of-two-ends",
        about="a block is found by its first and last token",
        file="runtime/scheduling/prefix_cache.py",
        old="child = node.children.get(self._edge(token_ids, start, salt))",
        new=(
            "child = next((c for k, c in node.children.items() if k[:8] == "
            "token_ids[start : start + 1].tobytes()), None)"
        ),
        kind="runtime",
        culprit="prefix_cache",
        recipe="bf16",
        hidden_by="enable_prefix_cache=False",
    ),
    Fault(
        id="evicted-block-stays-known",
        about="an evicted block stays in the tree",
        file="runtime/scheduling/block_pool.py",
        old=(
            "            self._published[block] = 0\n"
            "            if self._on_evict is not None:\n"
            "                self._on_evict(block)\n"
        ),
        new="            pass\n",
        kind="runtime",
        culprit="block_pool",
        hidden_by="enable_prefix_cache=False",
    ),
    Fault(
        id="presence-of-the-prompt",
        about="the presence penalty counts the prompt's tokens",
        file="runtime/sampling/penalties.py",
        old="presence * (times > 0)",
        new="presence",
        kind="runtime",
        culprit="penalties",
        recipe="bf16",
        echo="vllm-project/vllm-metal#69",
    ),
    Fault(
        id="penalties-by-order",
        about="penalties go to the first rows of a step",
        file="runtime/sampling/sampler.py",
        old="penalise(logits, places, counts, amounts)",
        new="penalise(logits, range(len(places)), counts, amounts)",
        kind="runtime",
        culprit="sampler",
        recipe="fp8",
        echo="vllm-project/vllm#5639",
    ),
    Fault(
        id="drawn-with-anothers-options",
        about="rows are drawn with the options of a step's first requests",
        file="runtime/sampling/sampler.py",
        old="tokens[drawn] = _draw(part, [states[i] for i in drawn])",
        new="tokens[drawn] = _draw(part, states[: len(drawn)])",
        kind="runtime",
        culprit="sampler",
        recipe="bf16",
        echo="vllm-project/vllm#5639",
    ),
    Fault(
        id="logprobs-of-the-penalised",
        about="log-probabilities are of the logits that the options changed",
        file="runtime/sampling/sampler.py",
        old=(
            "    described = raw[wanted] if wanted else None\n"
            "    work = raw\n"
            "    _apply_token_options(work, states)\n"
        ),
        new=(
            "    work = raw\n"
            "    _apply_token_options(work, states)\n"
            "    described = raw[wanted] if wanted else None\n"
        ),
        kind="runtime",
        culprit="sampler",
    ),
    Fault(
        id="nucleus-off-by-one",
        about="the nucleus leaves out the token that completes it",
        file="runtime/sampling/draw.py",
        old="last = torch.searchsorted(cdf, goal).clamp_(max=cdf.shape[1] - 1)",
        new="last = torch.searchsorted(cdf, goal).sub_(1).clamp_(0, cdf.shape[1] - 1)",
        kind="runtime",
        culprit="draw",
    ),
    Fault(
        id="logits-of-the-padding",
        about="a padded part of a step gives the logits of its last rows",
        file="runtime/execution/token_parts.py",
        old="parts.append(part[key][:count])",
        new="parts.append(part[key][-count:])",
        kind="runtime",
        culprit="token_parts",
        recipe="fp8",
        hidden_by="deterministic=False",
    ),
    Fault(
        id="bias-on-the-first-row",
        about="a bias goes to the first row",
        file="runtime/sampling/penalties.py",
        old="starts = np.array(rows, dtype=np.int64) * logits.shape[1]",
        new="starts = (np.array(rows, dtype=np.int64) - rows[0]) * logits.shape[1]",
        kind="runtime",
        culprit="penalties",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="control-free-list-from-the-top",
        about="free blocks are handed out from the other end",
        file="runtime/scheduling/block_pool.py",
        old="self._free = list(range(num_blocks - 1, -1, -1))",
        new="self._free = list(range(num_blocks))",
        kind="runtime",
        culprit="",
        control=True,
    ),
    Fault(
        id="positions-restart",
        about="positions of a chunk count from the chunk's start",
        file="runtime/execution/batch.py",
        old="np.repeat(starts - cu_seqlens[:-1], counts)",
        new="np.repeat(0 * starts - cu_seqlens[:-1], counts)",
        kind="runtime",
        culprit="batch",
        hidden_by="max_batched_tokens=2048",
        echo="mlx-node/mlx-node#33",
    ),
    Fault(
        id="short-at-one-more",
        about="a context of index_topk + 1 tokens counts as short",
        file="runtime/execution/batch.py",
        old="int(self.context_lens.max()) <= topk",
        new="int(self.context_lens.max()) <= topk + 1",
        kind="runtime",
        culprit="batch",
    ),
    Fault(
        id="logits-of-first-requests",
        about="a prompt's logits are taken of its first token",
        file="runtime/execution/batch.py",
        old="else last[max_new > 0]",
        new="else cu_seqlens[:-1][max_new > 0]",
        kind="runtime",
        culprit="batch",
        recipe="bf16",
    ),
    Fault(
        id="prefix-by-block-alone",
        about="a block's tokens are found behind any prefix",
        file="runtime/scheduling/prefix_cache.py",
        old="            node = child\n        return chain[",
        new="        return chain[",
        kind="runtime",
        culprit="prefix_cache",
        hidden_by="enable_prefix_cache=False",
    ),
    Fault(
        id="repetition-rewards-negative",
        about="the repetition penalty divides negative logits too",
        file="runtime/sampling/penalties.py",
        old="torch.where(values > 0, values / repetition, values * repetition)",
        new="values / repetition",
        kind="runtime",
        culprit="penalties",
    ),
    Fault(
        id="padding-has-block-0",
        about="padded rows write the first row of block 0",
        file="runtime/execution/cuda_graphs.py",
        old="        view[count:] = padding\n",
        new="        view[count:] = max(padding, 0)\n",
        kind="runtime",
        culprit="cuda_graphs",
        recipe="fp8-kv-tensor",
        hidden_by="deterministic=False",
    ),
    Fault(
        id="preempted-keeps-its-place",
        about="a preempted request goes on where it was",
        file="runtime/scheduling/residency.py",
        old=("request.num_computed = request.num_scheduled = len(chain) * self._block_size"),
        new=(
            "request.num_computed = request.num_scheduled = max(len(chain), "
            "request.num_preemptions) * self._block_size"
        ),
        kind="runtime",
        culprit="residency",
        hidden_by="num_blocks=240",
    ),
    Fault(
        id="control-row-order",
        about="rows of the block table are handed out from the other end",
        file="runtime/scheduling/residency.py",
        old="self._free_rows = list(reversed(self._rows))",
        new="self._free_rows = list(self._rows)",
        kind="runtime",
        culprit="",
        recipe="fp8",
        control=True,
    ),
)
