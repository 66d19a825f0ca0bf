"""Architectures that have latent attention, or look like it, and are refused: the reason, and what they would need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INDEXER = "an operation that scores and chooses keys, a cache for its own keys, and attention over the chosen ones"
_LINEAR_ATTENTION = "operations for Kimi Delta Attention and a cache of its states beside that of latents"

# For each model_type: why it is not computed, and what it would take.
REFUSED: dict[str, tuple[str, str]] = {
    "axk2": (
        "an indexer chooses the keys that are attended to (DSA), and queries and norms are gated",
        f"{_INDEXER}; gates on queries and norms",
    ),
    "bailing_hybrid": (
        "most layers have linear attention (KDA), and the others a gate on each head's output",
        f"{_LINEAR_ATTENTION}; the gate",
    ),
    "deepseek_v32": ("an indexer chooses the keys that are attended to (DSA)", _INDEXER),
    "deepseek_v4": (
        "it has no latent attention (no kv_lora_rank): keys are compressed over tokens",
        "other attention operations and caches",
    ),
    "dots3_note": (
        "an indexer chooses the keys that are attended to (DSA), some layers attend to a window, and heads are gated; "
        "its language model is the text_config",
        f"{_INDEXER}; windows; the gate; a reader of models that also see and hear",
    ),
    "glm5_next": (
        "most layers have linear attention (KDA), an indexer chooses keys for the others, which have no rotary part, "
        "and there are several residual streams; its language model is the text_config",
        f"{_LINEAR_ATTENTION}; {_INDEXER}; rows without a rotary key; hyper-connections",
    ),
    "glm_moe_dsa": ("an indexer, shared by layers, chooses the keys that are attended to (DSA)", _INDEXER),
    "hy_v4": (
        "an indexer chooses the keys that are attended to (DSA), with sinks and gated outputs, and there are several "
        "residual streams",
        f"{_INDEXER}; sinks in the softmax; the gate; hyper-connections",
    ),
    "kimi_linear": (
        "most layers have linear attention (KDA), and the others no rotary part",
        f"{_LINEAR_ATTENTION}; rows without a rotary key",
    ),
    "mistral_large4": (
        "an indexer chooses the keys that are attended to (DSA), some layers have no rotary part or read another "
        "layer's latents; its language model is the text_config",
        f"{_INDEXER}; rows without a rotary key; caches that layers share",
    ),
}
# Names of language models inside the models above, and of models that add an encoder to them.
_SAME_AS = {
    "dots3_note_text": "dots3_note",
    "glm5_next_text": "glm5_next",
    "hy_v4_vl": "hy_v4",
    "hy_v4_vl_text": "hy_v4",
    "mistral_large4_text": "mistral_large4",
}


def refusal(model_type: object, config: Mapping[str, Any]) -> str | None:
    """Why a config's architecture is refused, and what it would take; None if nothing is known of it.

    Args:
        model_type: Its ``model_type``, which is not a supported one.
        config: What ``config.json`` holds.
    """
    if isinstance(model_type, str):
        known = REFUSED.get(_SAME_AS.get(model_type, model_type))
        if known is not None:
            return f"{known[0]}. It would take {known[1]}."
    for name, part in config.items():
        if name.endswith("_config") and isinstance(part, dict) and "kv_lora_rank" in part:
            return (
                f"its language model is the {name!r:.80}, whose model_type is {part.get('model_type')!r:.80}. It "
                "would take a module that says how its tensors are named, such as that of kimi_k25; or a checkpoint "
                "of the language model alone: that table as config.json, and tensor names that start with 'model.' "
                "and 'lm_head.'."
            )
    if "kv_lora_rank" in config:
        return (
            "it has latent attention (kv_lora_rank), but what else it does is not known here. It would take a module "
            "of its own: docs/adding_an_architecture.md."
        )
    return None
