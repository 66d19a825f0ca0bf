"""Tests of the tiny MLA checkpoint and of the script that trains it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHECKPOINT = EXAMPLES / "tiny-mla"
MAX_BYTES = 4_000_000


def load_script() -> ModuleType:
    """Imports the training script from its path."""
    spec = importlib.util.spec_from_file_location("train_tiny_mla", EXAMPLES / "train_tiny_mla.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(autouse=True)
def restored_torch_settings():
    """Puts back the process-wide settings that a training run changes."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(min(2, threads))
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def record() -> dict:
    """Reads the measurements stored beside the checkpoint."""
    return json.loads((CHECKPOINT / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    """Loads the checkpoint in float32."""
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)


@pytest.fixture(scope="module")
def corpus():
    """Makes a small text with a pattern that is quick to learn."""
    lines = [f"The {word} statement is a statement." for word in ("if", "for", "del", "with", "pass", "try")]
    return script.Corpus(
        topics=["\n".join(lines * 3)],
        docstrings=["\n".join(reversed(lines * 3))],
        held_out="The import statement is a statement.\n" * 3,
    )


@pytest.fixture
def tiny_config():
    """Builds a configuration that trains in an instant."""
    return script.build_config(
        hidden_size=28, intermediate_size=44, num_hidden_layers=2, num_attention_heads=3, q_lora_rank=18
    )


@pytest.fixture
def tiny_settings():
    """Builds settings of a training run that takes about a second."""
    return script.TrainSettings(
        steps=30,
        step_tokens=256,
        stages=((0.5, 32), (0.5, 64)),
        peak_learning_rate=1e-2,
        warmup_steps=3,
        bfloat16=False,
    )


# --- the checkpoint -------------------------------------------------------------------------------------


def test_checkpoint_is_small_and_complete():
    sizes = {path.name: path.stat().st_size for path in CHECKPOINT.iterdir()}
    assert sum(sizes.values()) <= MAX_BYTES
    assert sizes["held_out.txt"] <= script.HELD_OUT_MAX_BYTES
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "held_out.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }


def test_checkpoint_is_dense_mla_with_yarn(model):
    config = model.config
    assert config.model_type == "deepseek_v3"
    assert config.first_k_dense_replace == config.num_hidden_layers
    assert config.num_mtp_layers == 0
    assert not config.tie_word_embeddings
    assert config.rope_interleave
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 256)
    assert rope["mscale"] == rope["mscale_all_dim"] == 1.0
    assert config.max_position_embeddings == 1024
    attention = model.model.layers[0].self_attn
    correction = (0.1 * math.log(4.0) + 1.0) ** 2
    assert attention.scaling == pytest.approx(correction / math.sqrt(attention.qk_head_dim))
    assert not any("experts" in name for name, _ in model.named_parameters())


def test_weights_are_finite_bfloat16(record):
    count = 0
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - the handle is not iterable
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert bool(tensor.isfinite().all()), name
            count += tensor.numel()
    assert count == record["parameters"]


def test_configuration_is_the_script_s(model):
    ours = script.build_config().to_dict()
    saved = model.config.to_dict()
    ignored = {"architectures", "dtype", "transformers_version", "_name_or_path"}
    assert {key: saved[key] for key in ours.keys() - ignored} == {key: ours[key] for key in ours.keys() - ignored}


def test_generation_config(model):
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id) == (script.BOS_ID, script.EOS_ID)


# --- the tokenizer --------------------------------------------------------------------------------------


def unicode_samples() -> list[str]:
    """Lists texts that tokenizers tend to damage, and random ones from all of Unicode."""
    choose = random.Random(7)  # noqa: S311 - test data
    scalars = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    noise = ["".join(map(chr, choose.choices(scalars, k=60))) for _ in range(40)]
    plain = [
        "",
        " ",
        "  two  spaces ",
        "\r\n\t\0",
        "Hello , world ! don 't .",
        "naïve café",
        "日本語",
        "👩‍👩‍👧 ok",
        "\ufeffmark",
    ]
    return plain + noise + [bytes(range(128)).decode()]


@pytest.mark.parametrize("kind", ["transformers", "tokenizers"])
def test_tokenizer_round_trips_unicode(kind):
    if kind == "transformers":
        tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        encode = tokenizer.encode
    else:
        tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))

        def encode(text):
            return tokenizer.encode(text).ids

    for text in unicode_samples():
        ids = encode(text)
        assert ids == [script.BOS_ID, *text.encode()]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_knows_its_special_tokens():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert len(tokenizer) == script.VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (script.BOS_ID, script.EOS_ID)
    assert tokenizer.model_max_length == 1024


# --- the quality ----------------------------------------------------------------------------------------


def test_held_out_perplexity_is_the_recorded_one(model, record):
    data = (CHECKPOINT / "held_out.txt").read_bytes()
    assert hashlib.sha256(data).hexdigest() == record["text"]["held_out_sha256"]
    perplexity = math.exp(script.byte_loss(model, data.decode(), record["held_out_window"]))
    assert perplexity == pytest.approx(record["held_out_perplexity_per_byte"], rel=0.02)
    assert perplexity < 6.0 < 100.0 < record["untrained_perplexity_per_byte"]


def test_cached_generation_writes_words(model):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    prompt = tokenizer("The import statement", return_tensors="pt")
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=60)
    text = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert text.startswith("The import statement")
    words = set(text.removeprefix("The import statement").split())
    known = set((CHECKPOINT / "held_out.txt").read_text(encoding="utf-8").split())
    assert len(words & known) >= 4, text


# --- the script -----------------------------------------------------------------------------------------


def test_training_reduces_the_loss_and_writes_a_checkpoint(tmp_path, corpus, tiny_config, tiny_settings):
    output = tmp_path / "deep" / "model"
    losses: list[float] = []
    summary = script.create_checkpoint(
        output, tiny_config, corpus, tiny_settings, report=lambda step, loss: losses.append(loss)
    )
    assert len(losses) == tiny_settings.steps
    assert losses[-1] < 0.8 * losses[0]
    assert summary["held_out_perplexity_per_byte"] < 0.5 * summary["untrained_perplexity_per_byte"]
    assert json.loads((output / "training.json").read_text()) == json.loads(json.dumps(summary))
    assert [path.name for path in output.parent.iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    assert (output / "held_out.txt").read_text() == corpus.held_out


def test_same_seed_gives_the_same_weights(tmp_path, corpus, tiny_config, tiny_settings):
    files = []
    for name in ("one", "two"):
        script.create_checkpoint(tmp_path / name, tiny_config, corpus, tiny_settings)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_nothing_is_left_when_training_raises(tmp_path, corpus, tiny_config, tiny_settings, error):
    def fail(step, loss):
        raise error

    with pytest.raises(type(error)):
        script.create_checkpoint(tmp_path / "model", tiny_config, corpus, tiny_settings, report=fail)
    assert list(tmp_path.iterdir()) == []


def test_training_attention_agrees_with_the_eager_one(tiny_config):
    torch.manual_seed(3)
    model = DeepseekV3ForCausalLM._from_config(tiny_config, attn_implementation=script.TRAINING_ATTENTION)
    ids = torch.randint(script.VOCAB_SIZE, (2, 70))
    ours = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(ours, model(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_corpus_keeps_the_held_out_text_apart():
    corpus = script.load_corpus()
    held_out = {" ".join(paragraph.split()) for paragraph in corpus.held_out.split("\n\n")}
    trained = {
        " ".join(paragraph.split())
        for document in (*corpus.topics, *corpus.docstrings)
        for paragraph in document.split("\n\n")
    }
    assert held_out.isdisjoint(trained)
    assert 15_000 < len(corpus.held_out.encode()) <= script.HELD_OUT_MAX_BYTES


def test_byte_loss_counts_every_byte_once(tiny_config):
    torch.manual_seed(5)
    model = DeepseekV3ForCausalLM(tiny_config)
    text = "assert statements: café"
    ids = torch.tensor([[script.BOS_ID, *text.encode()]])
    logits = model(input_ids=ids).logits.detach()
    losses = -logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    assert script.byte_loss(model, text, 64) == pytest.approx(float(losses.mean()), rel=1e-5)
    assert script.byte_loss(model, text, 5) == pytest.approx(float(losses.mean()), rel=0.2)


def test_stages_and_learning_rate_cover_the_steps(tiny_settings):
    windows = [tiny_settings.window_at(step) for step in range(tiny_settings.steps)]
    assert windows == [32] * 15 + [64] * 15
    rates = [script.learning_rate(step, tiny_settings) for step in range(tiny_settings.steps)]
    assert max(rates) == rates[tiny_settings.warmup_steps] == tiny_settings.peak_learning_rate
    assert 0.0 < rates[-1] < 0.05 * max(rates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "at least 1"),
        ({"stages": ((1.0, 0),)}, "at least 1"),
        ({"stages": ((0.5, 16),)}, "add up to 1"),
        ({"topics_share": 1.5}, "between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        script.TrainSettings(**changes)


def test_command_line_reports_mistakes(tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("x")
    assert script.main(["--output", str(tmp_path / "model"), "--steps", "0"]) == 2
    assert script.main(["--output", str(tmp_path), "--steps", "5", "--overwrite"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    assert capsys.readouterr().err.count("Error:") == 2


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0
    assert "python examples/train_tiny_mla.py --output" in capsys.readouterr().out
