"""Text to token ids and back, with the tokenizer that lies in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_mla.errors import UserError
from trtllm_mla.files import check_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME = "tokenizer.json"
MAX_TEXT_BYTES = 1 << 26


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
                f"{path}: no such file; text needs the checkpoint's tokenizer. Copy {FILE_NAME} there, or give token "
                "ids instead."
            )
        try:
            return cls(Tokenizer.from_file(str(path)))
        # The library raises bare exceptions for every kind of malformed file.
        except Exception as error:
            raise UserError(f"{path}: not a tokenizer that the tokenizers library can read: {error}.") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer itself adds.

        Raises:
            UserError: The text holds half of a character, as bytes that are not UTF-8 become on a command line.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"The text holds {text[error.start]!r} at position {error.start}, which is no character. Pass text in "
                "UTF-8."
            ) from None
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


class TextStream:
    """Turns tokens into text as they come.

    A token may end in the middle of a character, and its text may depend on the tokens before it. So the newest tokens
    are decoded together, and what is new is handed out as soon as it ends with a whole character.

    Args:
        codec: Whose tokens they are.
    """

    # Decoded again with each token; more than any character or any merging of neighbours spans.
    _WINDOW = 32

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._recent: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """Takes the next token.

        Returns:
            The text that is new, which may be empty.
        """
        self._recent.append(token)
        text = self._codec.decode(self._recent)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        if len(self._recent) > 2 * self._WINDOW:
            self._recent = self._recent[-self._WINDOW :]
            self._shown = self._codec.decode(self._recent)
        return new

    def end(self) -> str:
        """The rest: what an unfinished character decodes to."""
        return self._codec.decode(self._recent)[len(self._shown) :]


def read_text(path: Path, checkpoint: Path) -> list[int]:
    """Token ids of a text file, with the tokenizer of a checkpoint.

    Raises:
        UserError: The file is missing, larger than 64 MiB, not UTF-8 or shorter than two tokens, or the checkpoint
            has no tokenizer.
    """
    check_file(path, "Expected a text.")
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise UserError(f"{path}: found {size} bytes, expected a text of at most {MAX_TEXT_BYTES}. Cut it.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}. Expected plain text.") from None
    token_ids = TextCodec.load(checkpoint).encode(text)
    if len(token_ids) < 2:
        raise UserError(f"{path}: found {len(token_ids)} tokens, expected at least 2: the first predicts the second.")
    return token_ids
