"""The ``dsa::`` ops: what a compiled model is made of.

Importing this package registers every op. Each has a schema, declared types that every call is
checked against (:mod:`dsa_compile.ops.signature`), and a plain function, also found in
:data:`REFERENCE`, which is its CPU implementation and the meaning every other implementation is
tested against. What else is known of an op, such as its family and its cost, stands beside its
schema and is found in :data:`FACTS`.

Logical ops take any leading dimensions and appear before tokens are flattened; kernel ops take flat
tokens ``[T, ...]`` and know the paged caches.
"""

from dsa_compile.ops.attention import (
    ABSORB_QUERY,
    EXPAND_OUTPUT,
    LATENT_ATTENTION,
    PAGED_LATENT_ATTENTION,
    SPARSE_ATTENTION,
)
from dsa_compile.ops.attention_expand import (
    PAGED_LATENT_ATTENTION_FP8_EXPAND,
    PAGED_LATENT_ATTENTION_FP8_TENSOR_EXPAND,
)
from dsa_compile.ops.attention_fp8 import (
    PAGED_LATENT_ATTENTION_FP8,
    PAGED_LATENT_ATTENTION_FP8_TENSOR,
)
from dsa_compile.ops.attention_inputs import ATTENTION_INPUTS_FP8
from dsa_compile.ops.cache import DENSE_SLOTS, WRITE_INDEX_CACHE, WRITE_LATENT_CACHE
from dsa_compile.ops.collectives import (
    ALL_GATHER,
    ALL_GATHER_MANY,
    ALL_REDUCE,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE,
    COMBINE,
    LOCAL,
    REDUCE_SCATTER,
)
from dsa_compile.ops.experts_fp8 import EXPERTS_FP8
from dsa_compile.ops.facts import FACTS, CostFacts, Family, Form, OpFacts, names_of, ops_of
from dsa_compile.ops.fused_cache import (
    NORM_ROPE_WRITE_LATENT_CACHE_FP8,
    NORM_ROPE_WRITE_LATENT_CACHE_FP8_TENSOR,
)
from dsa_compile.ops.head_products import ABSORB_ROPE_QUERY, EXPAND_OUTPUT_QUANTIZE
from dsa_compile.ops.head_weights import INDEX_HEAD_WEIGHTS
from dsa_compile.ops.index_fp8 import PAGED_INDEX_TOPK_FP8
from dsa_compile.ops.index_fused import INDEX_QUERY_QUANTIZE, WRITE_INDEX_KEY_FP8
from dsa_compile.ops.indexer import INDEX_TOPK, PAGED_INDEX_TOPK
from dsa_compile.ops.library import REFERENCE
from dsa_compile.ops.linear_fp8 import LINEAR_FP8
from dsa_compile.ops.mlp import EMBEDDING, LINEAR, SWIGLU, SWIGLU_PACKED
from dsa_compile.ops.moe import EXPERTS, PLACE_EXPERTS, ROUTER
from dsa_compile.ops.norm import ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from dsa_compile.ops.pointwise import POINTWISE
from dsa_compile.ops.prompt_attention import (
    PAGED_PROMPT_ATTENTION,
    PAGED_PROMPT_ATTENTION_FP8,
    PAGED_PROMPT_ATTENTION_FP8_TENSOR,
)
from dsa_compile.ops.quantize import (
    ADD_RMS_NORM_QUANTIZE,
    QUANTIZE_BLOCKS,
    RMS_NORM_QUANTIZE,
    RMS_NORM_QUANTIZE_KEEP,
    SWIGLU_PACKED_QUANTIZE,
)
from dsa_compile.ops.query_scale import SCALE_BY_POSITION
from dsa_compile.ops.rope import ROPE_HALF, ROPE_INTERLEAVED, ROPE_TABLES
from dsa_compile.ops.streams import KEEP_ALIVE, ON_STREAM, RECORD_EVENT, STREAM_OPS, WAIT_EVENT

__all__ = [
    "ABSORB_QUERY",
    "ABSORB_ROPE_QUERY",
    "ADD_RMS_NORM",
    "ADD_RMS_NORM_QUANTIZE",
    "ALL_GATHER",
    "ALL_GATHER_MANY",
    "ALL_REDUCE",
    "ALL_REDUCE_ADD_RMS_NORM_QUANTIZE",
    "ATTENTION_INPUTS_FP8",
    "COMBINE",
    "DENSE_SLOTS",
    "EMBEDDING",
    "EXPAND_OUTPUT",
    "EXPAND_OUTPUT_QUANTIZE",
    "EXPERTS",
    "EXPERTS_FP8",
    "FACTS",
    "INDEX_HEAD_WEIGHTS",
    "INDEX_QUERY_QUANTIZE",
    "INDEX_TOPK",
    "KEEP_ALIVE",
    "LATENT_ATTENTION",
    "LAYER_NORM",
    "LINEAR",
    "LINEAR_FP8",
    "LOCAL",
    "NORM_ROPE_WRITE_LATENT_CACHE_FP8",
    "NORM_ROPE_WRITE_LATENT_CACHE_FP8_TENSOR",
    "ON_STREAM",
    "PAGED_INDEX_TOPK",
    "PAGED_INDEX_TOPK_FP8",
    "PAGED_LATENT_ATTENTION",
    "PAGED_LATENT_ATTENTION_FP8",
    "PAGED_LATENT_ATTENTION_FP8_EXPAND",
    "PAGED_LATENT_ATTENTION_FP8_TENSOR",
    "PAGED_LATENT_ATTENTION_FP8_TENSOR_EXPAND",
    "PAGED_PROMPT_ATTENTION",
    "PAGED_PROMPT_ATTENTION_FP8",
    "PAGED_PROMPT_ATTENTION_FP8_TENSOR",
    "PLACE_EXPERTS",
    "POINTWISE",
    "QUANTIZE_BLOCKS",
    "RECORD_EVENT",
    "REDUCE_SCATTER",
    "REFERENCE",
    "RMS_NORM",
    "RMS_NORM_QUANTIZE",
    "RMS_NORM_QUANTIZE_KEEP",
    "ROPE_HALF",
    "ROPE_INTERLEAVED",
    "ROPE_TABLES",
    "ROUTER",
    "SCALE_BY_POSITION",
    "SPARSE_ATTENTION",
    "STREAM_OPS",
    "SWIGLU",
    "SWIGLU_PACKED",
    "SWIGLU_PACKED_QUANTIZE",
    "WAIT_EVENT",
    "WRITE_INDEX_CACHE",
    "WRITE_INDEX_KEY_FP8",
    "WRITE_LATENT_CACHE",
    "CostFacts",
    "Family",
    "Form",
    "OpFacts",
    "names_of",
    "ops_of",
]
