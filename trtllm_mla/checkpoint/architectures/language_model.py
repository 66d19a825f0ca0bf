"""Language models of models that also see: their config is a table in that of the whole, and all else is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, create_model

from trtllm_mla.checkpoint.architectures.base import Architecture, Flag, HfConfig
from trtllm_mla.checkpoint.fp8 import QuantizationConfig
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.errors import UserError

_TABLE = "text_config"
# What the table may leave to the whole.
_OF_EITHER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")


class _WholeConfig(StrictModel):
    """What is said for the whole; transformers takes the first two from there only."""

    model_config = ConfigDict(extra="ignore")

    architectures: list[str] | None = None
    tie_word_embeddings: Flag = True
    quantization_config: QuantizationConfig | None = None


@dataclass(frozen=True)
class LanguageModelArchitecture(Architecture):
    """An MLA decoder whose config is ``text_config``; ``hf_architectures`` are classes of the whole.

    Attributes:
        text_model_types: What ``model_type`` in ``text_config`` may be.
    """

    text_model_types: tuple[str, ...] = ()

    def read_config(self, config: Mapping[str, Any], *, source: str) -> HfConfig:
        """Reads the keys that decide what is computed; see ``Architecture.read_config``."""
        table = config.get(_TABLE)
        if not isinstance(table, dict):
            raise UserError(
                f"{source}: {_TABLE}: found {'none' if table is None else type(table).__name__}, expected a table: "
                f"the config of the language model of {self.model_type}."
            )
        found = table.get("model_type")
        if found not in self.text_model_types:
            expected = " or ".join(map(repr, self.text_model_types))
            raise UserError(
                f"{source}: {_TABLE}.model_type: found {found!r:.80}, expected {expected}: no other language model of "
                f"{self.model_type} has latent attention that is supported."
            )
        values = {name: config[name] for name in _OF_EITHER if config.get(name) is not None}
        values |= {name: value for name, value in table.items() if name not in values or value is not None}
        # Both at once, so that messages name keys as the file does.
        model: Any = create_model("WholeConfig", __base__=_WholeConfig, text_config=(self.config_class, ...))
        whole = parse_config({**config, _TABLE: values}, model, source=source)
        text: HfConfig = whole.text_config
        update = {"architectures": whole.architectures, "tie_word_embeddings": whole.tie_word_embeddings}
        if whole.quantization_config is not None:
            update["quantization_config"] = whole.quantization_config
        return text.model_copy(update=update)

    def transformers_config(self, spec: ModelSpec) -> dict[str, Any]:
        """What transformers' config must say for the first ``spec.num_hidden_layers`` layers of a checkpoint."""
        return {_TABLE: super().transformers_config(spec)}
