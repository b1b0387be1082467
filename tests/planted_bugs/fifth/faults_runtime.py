"""Faults of the runtime: rows, plans and results of ranks and lanes."""

from tests.planted_bugs.second.fault import Fault

TP2_DP2 = (("tp", 2), ("dp", 2))
DP2_EP2 = (("dp", 2), ("ep", 2))
ALL4 = (("tp", 2), ("dp", 2), ("ep", 4))

FAULTS = (
    Fault(
        id="padding-writes-the-first-row",
        about="tokens that pad a lane write the first cache row",
        file="runtime/execution/step_shape.py",
        old="slot_mapping=np.pad(batch.slot_mapping, (0, missing), constant_values=-1)",
        new="slot_mapping=np.pad(batch.slot_mapping, (0, missing))",
        kind="runtime",
        culprit="step_shape",
        options=DP2_EP2,
    ),
    Fault(
        id="rows-of-the-place-in-the-lane",
        about="a rank takes the rows of the sum that its place in its lane has, not its lane's",
        file="runtime/ranks/gloo.py",
        old="own = self._layout.numbers(self._rank)[axis]",
        new="own = self._rank % ranks",
        kind="runtime",
        culprit="gloo",
        options=TP2_DP2,
    ),
    Fault(
        id="plans-dealt-in-turn",
        about="ranks are sent the plans of lanes in turn",
        file="runtime/ranks/group.py",
        old="other.connection.send(plans[self._layout.numbers(other.rank)[DP]])",
        new="other.connection.send(plans[other.rank % self._layout.dp])",
        kind="runtime",
        culprit="group",
        options=ALL4,
    ),
    Fault(
        id="sampling-sent-once-a-row",
        about="how a request samples is sent for the first request of a row alone",
        file="runtime/ranks/messages.py",
        old="            if self._sent.get(row) is not state:\n",
        new="            if row not in self._sent:\n",
        kind="runtime",
        culprit="messages",
        hidden_by="overlap=False",
        options=(("tp", 2),),
    ),
    Fault(
        id="targets-of-the-first-lane",
        about="the tokens to score of a lane's prompts are the first ones of all lanes",
        file="runtime/ranks/lanes.py",
        old="prompt.rows[first:last] - start, prompt.targets[first:last]",
        new="prompt.rows[first:last] - start, prompt.targets[: last - first]",
        kind="runtime",
        culprit="lanes",
        options=DP2_EP2,
    ),
    Fault(
        id="own-lane-last",
        about="logits of the other lanes come before those of the first one",
        file="runtime/ranks/lane_results.py",
        old="every = (own, *others)",
        new="every = (*others, own)",
        kind="runtime",
        culprit="lane_results",
        recipe="bf16",
        options=(("dp", 2),),
    ),
    Fault(
        id="tables-of-the-first-lane",
        about="the block tables of a lane are those of as many requests from the first one on",
        file="runtime/ranks/lanes.py",
        old="        block_tables=batch.block_tables[chosen],\n",
        new="        block_tables=batch.block_tables[: chosen.stop - chosen.start],\n",
        kind="runtime",
        culprit="lanes",
        recipe="fp8",
        model="wide",
        options=DP2_EP2,
    ),
    Fault(
        id="control-least-busy-lane",
        about="a request goes to the lane with the fewest requests, whatever it has cached",
        file="runtime/scheduling/lanes.py",
        old=(
            "        return max(near, key=lambda lane: (lane.cached_prefix(request),"
            " -len(lane.requests)))\n"
        ),
        new="        return min(near, key=lambda lane: len(lane.requests))\n",
        kind="runtime",
        culprit="",
        control=True,
        options=DP2_EP2,
    ),
)
