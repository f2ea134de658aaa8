"""Tiny causal language models with random weights, one per kind of head, for the tests of decoding and of heads.

Every function takes the transformers module, so that importing this file doesn't need transformers.
"""

import torch

VOCAB = 97
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# Wide enough a spread of weights that the largest logits are well apart.
SPECIAL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}
SPECIAL |= {"initializer_range": 0.3}


def llama(T):
    return T.LlamaForCausalLM(T.LlamaConfig(**GROUPED, **SPECIAL))


def qwen2(T):
    return T.Qwen2ForCausalLM(T.Qwen2Config(**GROUPED, **SPECIAL))


def gpt2(T):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    special = {k: v for k, v in SPECIAL.items() if k != "max_position_embeddings"}
    return T.GPT2LMHeadModel(T.GPT2Config(**sizes, **special))


def phi(T):
    """A head with a bias."""
    model = T.PhiForCausalLM(T.PhiConfig(**SIZES, **SPECIAL))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def opt(T):
    """Learned positions that start at 2, and a projection after the decoder."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2}
    return T.OPTForCausalLM(T.OPTConfig(**sizes, num_attention_heads=4, do_layer_norm_before=True, **SPECIAL))


def gemma2(T):
    """A softcap, and a sliding window shorter than the prompts."""
    return T.Gemma2ForCausalLM(
        T.Gemma2Config(**GROUPED, **SPECIAL, head_dim=8, sliding_window=8, final_logit_softcapping=5.0)
    )


def cohere(T):
    """Logits multiplied by a scale."""
    return T.CohereForCausalLM(T.CohereConfig(**GROUPED, **SPECIAL, logit_scale=0.25))


def granite(T):
    """Logits divided by a scale."""
    return T.GraniteForCausalLM(T.GraniteConfig(**GROUPED, **SPECIAL, logits_scaling=3.0))


ARCHITECTURES = {f.__name__: f for f in (llama, qwen2, gpt2, phi, opt, gemma2, cohere, granite)}


def build(name, transformers, seed=4):
    """The named model in eval mode, its weights drawn from `seed`.

    With seed 4 and `prompts((0, 3, 7, 9))` the two largest logits of every greedy step lie 9e-4 or more apart, far
    beyond the rounding of float32.
    """
    torch.manual_seed(seed)
    return ARCHITECTURES[name](transformers).eval()


def prompts(padding=(0,), length=10, seed=1):
    """Random prompts and their mask, row r with `padding[r]` pad tokens on the left: int64 `[B, length]` each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(padding), length), generator=generator)
    mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).to(torch.int64)
    return ids * mask, mask
