"""Text to token ids and back, with the tokenizer that lies in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME = "tokenizer.json"


@dataclass(frozen=True)
class TextCodec:
    """A checkpoint's ``tokenizer.json``.

    Attributes:
        tokenizer: The loaded tokenizer.
    """

    tokenizer: Tokenizer

    @staticmethod
    def exists(checkpoint: Path) -> bool:
        """Whether a checkpoint directory has a tokenizer."""
        return (checkpoint / FILE_NAME).is_file()

    @classmethod
    def load(cls, checkpoint: Path) -> TextCodec:
        """Loads the tokenizer of a checkpoint directory.

        Raises:
            UserError: There is none, or it cannot be read.
        """
        from tokenizers import Tokenizer

        path = checkpoint / FILE_NAME
        if not cls.exists(checkpoint):
            raise UserError(
                f"{path}: no such file; text needs the checkpoint's tokenizer. Copy {FILE_NAME} there, or pass token "
                "ids with --input-ids."
            )
        try:
            return cls(Tokenizer.from_file(str(path)))
        # The library raises bare exceptions for every kind of malformed file.
        except Exception as error:
            raise UserError(f"{path}: not a tokenizer that the tokenizers library can read: {error}.") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer itself adds."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text
