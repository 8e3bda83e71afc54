"""FLOPs and parameters against published numbers and counts made by hand."""

import pytest

from jaxtron.models.config import ModelConfig
from jaxtron.observe.flops import flops_per_token, mean_causal_keys, parameter_count


def llama3(num_layers: int, hidden: int, ffn: int, heads: int, **changes) -> ModelConfig:
    values = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return ModelConfig(**(values | changes))


LLAMA3_8B = llama3(32, 4096, 14336, 32)
LLAMA3_70B = llama3(80, 8192, 28672, 64)
LLAMA31_405B = llama3(126, 16384, 53248, 128)

QWEN2_05B = ModelConfig(
    num_layers=24,
    hidden_size=896,
    ffn_hidden_size=4864,
    num_attention_heads=14,
    num_query_groups=2,
    vocab_size=151936,
    max_position_embeddings=32768,
    add_qkv_bias=True,
    untie_embeddings_and_output_weights=False,
)
QWEN3_06B = ModelConfig(
    num_layers=28,
    hidden_size=1024,
    ffn_hidden_size=3072,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    qk_layernorm=True,
    untie_embeddings_and_output_weights=False,
)
GPT2 = ModelConfig(
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=3072,
    num_attention_heads=12,
    vocab_size=50257,
    max_position_embeddings=1024,
    normalization="LayerNorm",
    activation="gelu_tanh",
    add_bias_linear=True,
    position_embedding_type="learned_absolute",
    untie_embeddings_and_output_weights=False,
)


@pytest.mark.parametrize(
    ("model", "causal", "full_attention", "decimals"),
    [
        (LLAMA3_8B, 51.5, 57.9, 1),
        (LLAMA3_70B, 449.2, 481.4, 1),
        (LLAMA31_405B, 2524, 2625, 0),
    ],
    ids=["8B", "70B", "405B"],
)
def test_llama3_costs_the_published_gflops_per_token(model, causal, full_attention, decimals):
    flops = flops_per_token(model, 8192)
    assert round(flops.causal / 1e9, decimals) == causal
    assert round(flops.full_attention / 1e9, decimals) == full_attention


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "full_attention", "causal", "tokens_per_s"),
    [
        (24, 2048, 16, 408.8, 365, 36259),
        (30, 4096, 32, 465.9, 435, 10240),
        (32, 6144, 48, 489.1, 466, 4820),
        (48, 7168, 56, 459.6, 440, 2297),
        (84, 8192, 64, 419.7, 404, 941),
        (96, 12288, 96, 432.8, 422, 389),
        (112, 18432, 144, 459.9, 452, 161),
    ],
)
def test_megatron_weak_scaling_rows_convert_between_both_conventions(
    layers, hidden, heads, full_attention, causal, tokens_per_s
):
    """Rows of Megatron-LM's README: GPT, GELU, ffn 4h, sequence 4096, vocabulary 131072."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        vocab_size=131072,
        max_position_embeddings=4096,
        activation="gelu",
    )
    flops = flops_per_token(model, 4096)
    assert full_attention * 1e12 / flops.full_attention == pytest.approx(tokens_per_s, rel=2e-3)
    assert full_attention * flops.causal / flops.full_attention == pytest.approx(causal, abs=0.6)


def test_full_attention_equals_the_closed_form_of_narayanan():
    """96 B s L h^2 (1 + s/6h + V/16Lh) with recomputation, 3/4 of it without: per token, MHA."""
    h, layers, s, vocab = 12288, 96, 2048, 51200
    model = ModelConfig(
        num_layers=layers,
        hidden_size=h,
        ffn_hidden_size=4 * h,
        num_attention_heads=96,
        vocab_size=vocab,
        max_position_embeddings=s,
        activation="gelu",
    )
    expected = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert flops_per_token(model, s).full_attention == pytest.approx(expected, rel=1e-12)


def test_gpt2_flops_by_hand():
    """One layer: qkv 768*2304, projection 768*768, mlp 2*768*3072; head 768*50304 (padded)."""
    products = 12 * (1769472 + 589824 + 4718592) + 38633472
    pairs_causal = 12 * 2 * 768 * 512
    flops = flops_per_token(GPT2, 1024)
    assert flops.causal == 6 * (products + pairs_causal)
    assert flops.full_attention == 6 * (products + 2 * pairs_causal)


def test_head_size_apart_from_hidden_size_counts():
    """q 8*32, k and v 8*16 each, out 32*8; mlp 2*8*4; head 8*128."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=4,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=16,
        vocab_size=100,
        max_position_embeddings=64,
        activation="relu",
    )
    products = 256 + 256 + 256 + 64 + 1024
    assert flops_per_token(model, 10).causal == 6 * (products + 2 * 32 * 5)


def test_window_counts_the_triangle_and_the_band():
    seq, window = 4096, 512
    pairs = sum(min(position + 1, window) for position in range(seq))
    # The continuous count leaves out half a key of each query in the triangle, as s/2 does.
    assert mean_causal_keys(seq, window) == (pairs - window / 2) / seq
    assert mean_causal_keys(seq, seq) == mean_causal_keys(seq, 2 * seq) == mean_causal_keys(seq)


def test_window_lowers_the_causal_count_and_not_the_full_attention_count():
    windowed = llama3(32, 4096, 14336, 32, window_size=1024)
    dense, sparse = flops_per_token(LLAMA3_8B, 8192), flops_per_token(windowed, 8192)
    # 4096 keys become 1024 - 1024^2 / 16384 = 960.
    assert dense.causal - sparse.causal == 6 * 32 * 2 * 4096 * (4096 - 960)
    assert dense.full_attention == sparse.full_attention


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA3_70B, 70_553_706_496),
        (LLAMA31_405B, 405_853_388_800),
        (GPT2, 124_439_808),
        (QWEN2_05B, 494_032_768),
        (QWEN3_06B, 596_049_920),
    ],
    ids=["llama3-8b", "llama3-70b", "llama3.1-405b", "gpt2", "qwen2-0.5b", "qwen3-0.6b"],
)
def test_parameter_count_is_the_published_one(model, count):
    assert parameter_count(model, padded_vocab=False) == count


def test_padded_vocabulary_adds_its_rows():
    assert parameter_count(GPT2) - parameter_count(GPT2, padded_vocab=False) == 47 * 768
