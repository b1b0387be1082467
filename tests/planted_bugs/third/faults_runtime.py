"""Faults of the runtime: batches, blocks, prefixes, sampling, drafts."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="blocks-taken-before-the-prefix-is-held",
        about="new blocks are allocated while the reused ones may still be evicted",
        file="runtime/scheduling/residency.py",
        old=(
            "        for node in chain:\n"
            "            self.pool.acquire(node.block)\n"
            "        request.blocks = [node.block for node in chain]\n"
            "        request.blocks += [self.pool.allocate() for _ in range(missing)]\n"
        ),
        new=(
            "        fresh = [self.pool.allocate() for _ in range(missing)]\n"
            "        for node in chain:\n"
            "            self.pool.acquire(node.block)\n"
            "        request.blocks = [node.block for node in chain] + fresh\n"
        ),
        kind="runtime",
        culprit="residency",
        recipe="fp8-kv-tensor",
        hidden_by="enable_prefix_cache=False",
    ),
    Fault(
        id="context-of-the-whole-prompt",
        about="a chunk's context is as long as its request, not as what is computed of it",
        file="runtime/execution/batch.py",
        old="    contexts = starts + counts\n",
        new=("    contexts = np.maximum(starts + counts, [r.num_tokens for r in requests])\n"),
        kind="runtime",
        culprit="batch",
        recipe="fp8",
        hidden_by="max_batched_tokens=2048",
    ),
    Fault(
        id="temperature-multiplied",
        about="logits are multiplied by their temperature",
        file="runtime/sampling/sampler.py",
        old="logits.sub_(logits.amax(1, keepdim=True)).div_(temperature[:, None])",
        new="logits.sub_(logits.amax(1, keepdim=True)).mul_(temperature[:, None])",
        kind="runtime",
        culprit="sampler",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="drafted-from-the-first-row",
        about="the next draft is made from a step's first row, not from the last one kept",
        file="runtime/execution/draft_rows.py",
        old="self.places.gather(1, kept[:, None] - 1)[:, 0]",
        new="self.places[:, 0]",
        kind="runtime",
        culprit="draft_rows",
        recipe="bf16",
        model="trained",
        options=(("draft", "mtp"),),
    ),
    Fault(
        id="following-is-the-token-itself",
        about="along a prompt the draft layer takes each token and not the one behind it",
        file="runtime/execution/draft_inputs.py",
        old="following[:-1] = batch.input_ids[1:]",
        new="following[:-1] = batch.input_ids[:-1]",
        kind="runtime",
        culprit="draft_inputs",
        model="trained",
        options=(("draft", "mtp"),),
    ),
    Fault(
        id="shared-block-not-in-the-table",
        about="a request that shares another's block goes on reading its own, which is handed out",
        file="runtime/scheduling/residency.py",
        old=(
            "                request.blocks[index] = node.block\n"
            "                self.block_rows[request.row, index] = node.block\n"
        ),
        new="                request.blocks[index] = node.block\n",
        kind="runtime",
        culprit="residency",
        recipe="bf16",
        hidden_by="enable_prefix_cache=False",
    ),
    Fault(
        id="frequency-as-presence",
        about="the frequency penalty counts a token once however often it came",
        file="runtime/sampling/penalties.py",
        old="values -= frequency * times + presence * (times > 0)",
        new="values -= frequency * (times > 0) + presence * (times > 0)",
        kind="runtime",
        culprit="penalties",
        recipe="fp8-kv-tensor",
    ),
    Fault(
        id="caches-by-the-calls-own-name",
        about="a call is given the caches of its own name, not of the call whose rows it shares",
        file="runtime/execution/bound_calls.py",
        old="own = {} if call.caches is None else caches.get(call.caches, {})",
        new="own = {} if call.caches is None else caches.get(call.name, {})",
        kind="runtime",
        culprit="bound_calls",
        model="trained",
        options=(("draft", "mtp"),),
    ),
    Fault(
        id="layers-of-a-kind-share-caches",
        about="all layers of a kind have the same caches, whatever the options",
        file="runtime/execution/caches.py",
        old="num_blocks: int, device: torch.device, *, shared: bool = False",
        new="num_blocks: int, device: torch.device, *, shared: bool = True",
        kind="runtime",
        culprit="caches",
    ),
    Fault(
        id="deeper-drafts-one-too-far",
        about="a deeper draft's row is one position too far",
        file="runtime/execution/draft_rows.py",
        old="positions = (rows.start + (depth - 2)).masked_fill(unwanted, 0)",
        new="positions = (rows.start + (depth - 1)).masked_fill(unwanted, 0)",
        kind="runtime",
        culprit="draft_rows",
        model="trained",
        options=(("draft", "mtp"),),
        hidden_by="draft=none",
    ),
    Fault(
        id="accepted-behind-a-wrong-draft",
        about="drafts that are right count behind one that is wrong",
        file="runtime/execution/draft_rows.py",
        old="kept = 1 + right.long().cumprod(1).sum(1)",
        new="kept = 1 + right.long().sum(1)",
        kind="runtime",
        culprit="draft_rows",
        model="trained",
        options=(("draft", "mtp"),),
        hidden_by="draft=none",
    ),
)
