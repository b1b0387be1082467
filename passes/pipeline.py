"""The pipeline: every pass, in order, and the levels between them."""

from dsa_compile.ir.passes import Pass
from dsa_compile.ir.program import Level
from dsa_compile.passes.absorb_mla import AbsorbMla
from dsa_compile.passes.broadcast_outer_product import BroadcastOuterProduct
from dsa_compile.passes.compile_pointwise import CompilePointwise
from dsa_compile.passes.expand_prompt_attention import ExpandPromptAttention
from dsa_compile.passes.flatten_tokens import FlattenTokens
from dsa_compile.passes.functionalize import Functionalize
from dsa_compile.passes.fuse_add_norm import FuseAddNorm
from dsa_compile.passes.fuse_add_norm_across_layers import FuseAddNormAcrossLayers
from dsa_compile.passes.fuse_add_norm_quantize import FuseAddNormQuantize
from dsa_compile.passes.fuse_all_reduce_norm import FuseAllReduceNorm
from dsa_compile.passes.fuse_attention_expand import FuseAttentionExpand
from dsa_compile.passes.fuse_attention_inputs import FuseAttentionInputs
from dsa_compile.passes.fuse_expand_quantize import FuseExpandQuantize
from dsa_compile.passes.fuse_index_weights import FuseIndexWeights
from dsa_compile.passes.fuse_norm_quantize import FuseNormQuantize
from dsa_compile.passes.fuse_norm_quantize_across_layers import FuseNormQuantizeAcrossLayers
from dsa_compile.passes.fuse_rope_absorb import FuseRopeAbsorb
from dsa_compile.passes.fuse_swiglu_quantize import FuseSwigluQuantize
from dsa_compile.passes.gather_quantized import GatherQuantized
from dsa_compile.passes.hoist_query_scale import HoistQueryScale
from dsa_compile.passes.insert_paged_caches import InsertPagedCaches
from dsa_compile.passes.merge_projections import MergeProjections
from dsa_compile.passes.merge_shared_expert import MergeSharedExpert
from dsa_compile.passes.overlap_streams import OverlapStreams
from dsa_compile.passes.pack_swiglu import PackSwiglu
from dsa_compile.passes.place import Place
from dsa_compile.passes.quantize_experts import QuantizeExperts
from dsa_compile.passes.quantize_indexer import QuantizeIndexer
from dsa_compile.passes.quantize_latent_cache import QuantizeLatentCache
from dsa_compile.passes.quantize_latent_cache_tensor import QuantizeLatentCacheTensor
from dsa_compile.passes.quantize_projections import QuantizeProjections
from dsa_compile.passes.recognize_embedding import RecognizeEmbedding
from dsa_compile.passes.recognize_experts import RecognizeExperts
from dsa_compile.passes.recognize_layer_norm import RecognizeLayerNorm
from dsa_compile.passes.recognize_linear import RecognizeLinear
from dsa_compile.passes.recognize_query_scale import RecognizeQueryScale
from dsa_compile.passes.recognize_rms_norm import RecognizeRmsNorm
from dsa_compile.passes.recognize_rope_half import RecognizeRopeHalf
from dsa_compile.passes.recognize_rope_interleaved import RecognizeRopeInterleaved
from dsa_compile.passes.recognize_rope_tables import RecognizeRopeTables
from dsa_compile.passes.recognize_router import RecognizeRouter
from dsa_compile.passes.recognize_sparse_attention import RecognizeSparseAttention
from dsa_compile.passes.recognize_swiglu import RecognizeSwiglu
from dsa_compile.passes.select_logit_rows import SelectLogitRows
from dsa_compile.passes.skip_padding import SkipPadding
from dsa_compile.passes.split_prompts import SplitPrompts
from dsa_compile.passes.split_short_long import SplitShortLong
from dsa_compile.passes.strip_expert_sentinels import StripExpertSentinels
from dsa_compile.passes.strip_noise import StripNoise
from dsa_compile.passes.token_major import TokenMajor

PIPELINE: tuple[Pass | Level, ...] = (
    # clean: what export adds and the reference does in place
    StripNoise(),
    Functionalize(),
    StripExpertSentinels(),
    BroadcastOuterProduct(),
    # recognise: the only passes that look at aten arithmetic
    RecognizeEmbedding(),
    RecognizeRmsNorm(),
    RecognizeLayerNorm(),
    RecognizeRopeTables(),
    RecognizeRopeInterleaved(),
    RecognizeRopeHalf(),
    RecognizeQueryScale(),
    RecognizeRouter(),
    RecognizeExperts(),
    RecognizeSwiglu(),
    RecognizeLinear(),
    RecognizeSparseAttention(),
    Level.LOGICAL,
    # restructure: the shapes and the state that serving needs
    TokenMajor(),
    HoistQueryScale(),
    AbsorbMla(),
    FlattenTokens(),
    InsertPagedCaches(),
    # place: on the ranks of a layout, before weights are merged and quantised
    Place(),
    # fuse
    MergeProjections(),
    PackSwiglu(),
    MergeSharedExpert(),
    FuseRopeAbsorb(),
    FuseIndexWeights(),
    FuseAddNorm(),
    FuseAddNormAcrossLayers(),
    # quantise: recipes fp8 and fp8-kv-tensor
    QuantizeProjections(),
    QuantizeExperts(),
    GatherQuantized(),
    QuantizeLatentCache(),
    QuantizeLatentCacheTensor(),
    QuantizeIndexer(),
    FuseNormQuantize(),
    FuseAddNormQuantize(),
    FuseSwigluQuantize(),
    FuseNormQuantizeAcrossLayers(),
    FuseAllReduceNorm(),
    FuseAttentionInputs(),
    FuseExpandQuantize(),
    FuseAttentionExpand(),
    # specialise
    SkipPadding(),
    SelectLogitRows(),
    SplitShortLong(),
    SplitPrompts(),
    ExpandPromptAttention(),
    CompilePointwise(),
    # overlap: last, when all calls are what will run
    OverlapStreams(),
    Level.KERNEL,
)
