"""What one token keeps in one layer for the backward pass, counted as transformers runs it.

After "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4.1: s·b·h(34 + 5as/h)
for one layer of GPT), done anew for decoders with gated feed-forwards and grouped queries whose attention keeps no
scores; tests count autograd's saved tensors.
"""

from __future__ import annotations

from rollcli.devices.facts import ModelFacts


def activation_bytes(facts: ModelFacts, width: int, row: int, tensor: int = 1, sequence: bool = False) -> int:
    """Returns the bytes that one token keeps in one layer for the backward pass.

    Each norm keeps a float32 input and, in the forward precision, its normalized and its scaled output: h(4 + 2s).
    Attention keeps queries, its output, keys and values, the latter repeated to all heads where a mask is given, as in
    packed rows; a norm of queries and keys keeps both in float32 and normalized. Latent attention (arXiv 2405.04434)
    keeps what it compresses to, before and after the norm, and keys and values of all heads. The mask is one number per
    key. A gated feed-forward keeps 4 tables of its own width, a plain one 2; an expert keeps 4, its input and its
    output. Tensor parallelism splits what is inside attention and feed-forward (2205.05198, equation 2: 10 + 24/t);
    with sequence parallelism the rest too (equation 4: 34/t).

    Args:
        facts: the model's.
        width: bytes of a number (s).
        row: tokens of a packed row (the mask's width); 0 when rows are not packed.
        tensor: degree of tensor parallelism (t).
        sequence: Megatron's sequence parallelism.
    """
    latent = facts.latent
    keys = facts.query_width if row else facts.kv_width
    attention = 2 * facts.query_width + 2 * keys
    compressed = 0
    if latent is not None:
        # Values are a view of what is expanded together with the keys, which therefore stays as a whole.
        attention = 2 * facts.query_width + 2 * facts.value_width + facts.heads * latent.nope
        compressed = (latent.query_rank + latent.kv_rank) * (4 + 2 * width)
    dense = (4 if facts.gated else 2) * facts.intermediate
    experts = facts.active_experts * 4 * facts.expert_intermediate + 4 * facts.shared_intermediate
    routing = facts.active_experts * 2 * facts.hidden + 2 * facts.experts
    share = facts.sparse_layers / facts.layers
    wide = 4 if facts.model_type.startswith("gemma") else width  # Gemma's norms scale in float32
    norms = facts.norms * facts.hidden * (4 + wide + width) + compressed
    of_heads = facts.qk_norm * (facts.query_width + facts.kv_width) * (4 + wide)
    inside = (attention + share * experts + (1 - share) * dense) * width + of_heads
    outside = norms + share * routing * width
    return round(inside / tensor + outside / (tensor if sequence else 1) + row * width)
