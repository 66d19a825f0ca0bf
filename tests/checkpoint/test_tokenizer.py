from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trtllm_mla.checkpoint import tokenizer as tokenizer_module
from trtllm_mla.checkpoint.tokenizer import TextCodec, TextStream, read_text
from trtllm_mla.errors import UserError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={mark: index for index, mark in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 \N{SNOWMAN}\n\ttabs"])
def test_text_round_trips(checkpoint, text):
    codec = TextCodec.load(checkpoint)
    ids = codec.encode(text)
    assert len(ids) == len(text.encode())
    assert codec.decode(ids) == text


def test_special_tokens_are_not_shown(checkpoint):
    codec = TextCodec.load(checkpoint)
    assert codec.decode([*codec.encode("a"), 256]) == "a"


def test_a_missing_tokenizer_is_named(tmp_path):
    assert not TextCodec.exists(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file.*give token ids instead"):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xff", b'{"model": 3}'])
def test_a_malformed_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert TextCodec.exists(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        TextCodec.load(tmp_path)


def test_read_text(tmp_path, monkeypatch):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("a b b c")
    assert read_text(text, tmp_path) == [0, 1, 1, 2]

    with pytest.raises(UserError, match="no such file"):
        read_text(tmp_path / "absent", tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        read_text(text, tmp_path / "elsewhere")
    text.write_text("a")
    with pytest.raises(UserError, match="found 1 tokens, expected at least 2"):
        read_text(text, tmp_path)
    text.write_bytes(b"a \xff b")
    with pytest.raises(UserError, match="not UTF-8"):
        read_text(text, tmp_path)
    monkeypatch.setattr(tokenizer_module, "MAX_TEXT_BYTES", 3)
    with pytest.raises(UserError, match="found 5 bytes, expected a text of at most 3"):
        read_text(text, tmp_path)


class TestTextStream:
    @staticmethod
    def parts(codec, ids):
        stream = TextStream(codec)
        return [*(stream.push(token) for token in ids), stream.end()]

    @pytest.mark.parametrize(
        "text", ["plain " * 40, "Grüße, 世界 \N{SNOWMAN}\n\ttabs " * 12, "\N{GRINNING FACE}" * 30, ""]
    )
    def test_parts_make_the_text_and_no_part_holds_half_a_character(self, checkpoint, text):
        codec = TextCodec.load(checkpoint)
        parts = self.parts(codec, codec.encode(text))
        assert "".join(parts) == text
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)

    def test_text_comes_with_the_last_byte_of_its_character(self, checkpoint):
        codec = TextCodec.load(checkpoint)
        assert self.parts(codec, codec.encode("a世b")) == ["a", "", "", "世", "b", ""]

    def test_an_unfinished_character_comes_at_the_end(self, checkpoint):
        codec = TextCodec.load(checkpoint)
        assert self.parts(codec, codec.encode("a世")[:-1]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]

    def test_words_joined_by_a_decoder_that_looks_at_neighbours(self, checkpoint):
        # Metaspace drops the blank before a text's first word only.
        words = [f"\N{LOWER ONE EIGHTH BLOCK}w{index}" for index in range(200)]
        tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "w0"))
        tokenizer.decoder = decoders.Metaspace()
        codec = TextCodec(tokenizer)
        ids = list(range(200))
        assert "".join(self.parts(codec, ids)) == codec.decode(ids)
        assert codec.decode(ids).startswith("w0 w1 ")


def test_half_a_character_is_refused(checkpoint):
    with pytest.raises(UserError, match="position 2, which is no character"):
        TextCodec.load(checkpoint).encode("ab\udcff")
