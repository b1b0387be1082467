"""The planted bugs of passes that fuse, quantise and overlap, in the order of the passes."""

import torch

from dsa_compile.passes import overlap_streams
from dsa_compile.passes.fuse_add_norm_across_layers import NEXT_NORM, FuseAddNormAcrossLayers
from dsa_compile.passes.merge_projections import MergeProjections
from dsa_compile.passes.merge_shared_expert import MergeSharedExpert
from dsa_compile.passes.quantize_experts import QuantizeExperts
from dsa_compile.passes.quantize_projections import QuantizeProjections
from dsa_compile.passes.split_short_long import SplitShortLong
from dsa_compile.weights.plan import Constant, Load
from tests.planted_bugs.alterations import (
    BOTH,
    Q_A,
    backwards,
    erased,
    few_waits,
    of_kind,
    of_layer_1,
    positions,
    replanned,
    same_twice,
)
from tests.planted_bugs.planting import (
    PlantedBug,
    afterwards,
    called,
    given,
    inserting,
    replacing,
    scaled,
    swapped,
)

aten, dsa = torch.ops.aten, torch.ops.dsa

FUSE = (
    PlantedBug(
        "order of merged weights",
        "merge_projections",
        afterwards(
            MergeProjections, "_merge", replanned("dense", "mlp.gate_up_proj.weight", backwards)
        ),
    ),
    PlantedBug(
        "merged weight of another layer",
        "merge_projections",
        afterwards(MergeProjections, "_merge", replanned("moe", Q_A, of_layer_1)),
        layers=(2,),
    ),
    PlantedBug(
        "shared expert in front of the others",
        "merge_shared_expert",
        afterwards(MergeSharedExpert, "_merge", replanned("moe", BOTH, backwards)),
    ),
    PlantedBug(
        "angles of fused queries",
        "fuse_rope_absorb",
        inserting("fuse_rope_absorb", dsa.absorb_rope_query.default, swapped(2, 3), region="moe"),
    ),
    PlantedBug(
        "dropped sign of the index heads",
        "fuse_index_weights",
        inserting(
            "fuse_index_weights", dsa.index_head_weights.default, scaled(2, -1.0), region="dense"
        ),
    ),
    PlantedBug(
        "wrong residual",
        "fuse_add_norm",
        inserting("fuse_add_norm", dsa.add_rms_norm.default, same_twice, region="moe"),
    ),
    PlantedBug(
        "next norm of a kind",
        "fuse_add_norm_across_layers",
        afterwards(
            FuseAddNormAcrossLayers, "_close",
            replanned("moe", NEXT_NORM, lambda _: Load("model.norm.weight")),
        ),
        layers=(1,),  # the last layer's next norm it is
    ),
    PlantedBug(
        "rows of logits by position",
        "select_logit_rows",
        inserting("select_logit_rows", aten.index_select.default, given(2, positions)),
    ),
    PlantedBug(
        "short graphs write no index keys",
        "split_short_long",
        afterwards(
            SplitShortLong, "_layer", of_kind("moe", erased(dsa.write_index_cache.default))
        ),
    ),
    PlantedBug(
        "rows of another block size",
        "split_short_long",
        inserting("split_short_long", dsa.dense_slots.default, given(4, 8)),
    ),
)  # fmt: skip

FP8 = (
    PlantedBug(
        "dropped scale of a quantised weight",
        "quantize_projections",
        afterwards(
            QuantizeProjections, "rewrite",
            replanned(
                "moe", "self_attn.o_proj.weight_scale_inv",
                lambda _: Constant("float32", (1, 1), (1.0,)),
            ),
        ),
        "fp8",
    ),
    PlantedBug(
        "scales of the next expert",
        "quantize_experts",
        afterwards(
            QuantizeExperts, "rewrite", replanned("moe", f"{BOTH}_scale_inv", backwards)
        ),
        "fp8",
    ),
    PlantedBug(
        "latent rows rotated in the other layout",
        "quantize_latent_cache",
        inserting(
            "quantize_latent_cache", dsa.norm_rope_write_latent_cache_fp8.default, given(5, False),
            region="dense",
        ),
        "fp8",
    ),
    PlantedBug(
        "quantised keys rotated in the other layout",
        "quantize_indexer",
        inserting(
            "quantize_indexer", dsa.write_index_key_fp8.default, given(6, True), region="moe"
        ),
        "fp8",
    ),
    PlantedBug(
        "eps of a norm that quantises",
        "fuse_norm_quantize",
        inserting(
            "fuse_norm_quantize", dsa.rms_norm_quantize.default, scaled(2, 1e2), region="moe"
        ),
        "fp8",
    ),
    PlantedBug(
        "wrong residual of a norm that quantises",
        "fuse_add_norm_quantize",
        inserting(
            "fuse_add_norm_quantize", dsa.add_rms_norm_quantize.default, same_twice, region="dense"
        ),
        "fp8",
    ),
    PlantedBug(
        "layouts of key and row exchanged",
        "fuse_attention_inputs",
        inserting(
            "fuse_attention_inputs", dsa.attention_inputs_fp8.default, swapped(10, 11), region="moe"
        ),
        "fp8",
    ),
    PlantedBug(
        "dropped scale of the experts with padding",
        "skip_padding",
        inserting("skip_padding", dsa.router.default, given(7, 1.0)),
        "fp8",
    ),
)  # fmt: skip

OVERLAPPED = (1, 2, 3, 4)  # long and long prompt regions of both kinds of layers
STREAMS = (
    PlantedBug(
        "missing wait of a stream",
        "overlap_streams",
        replacing(overlap_streams, "waits", few_waits, *OVERLAPPED),
        "fp8",
    ),
    PlantedBug(
        "memory given back while another stream reads it",
        "overlap_streams",
        replacing(overlap_streams, "_hold", lambda edit: None, *OVERLAPPED),
        "fp8",
    ),
    PlantedBug(
        "waits for another event",
        "overlap_streams",
        inserting("overlap_streams", dsa.wait_event.default, given(0, 0), region="moe"),
        "fp8",
    ),
    PlantedBug(
        "wait and record exchanged",
        "overlap_streams",
        inserting(
            "overlap_streams", dsa.wait_event.default, called(dsa.record_event.default),
            region="dense",
        ),
        "fp8",
    ),
)  # fmt: skip
