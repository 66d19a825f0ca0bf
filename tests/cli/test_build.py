import json

import pytest


@pytest.fixture(scope="module")
def build_config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "build.json"
    limits = {"max_batch_size": 2, "max_num_tokens": 64, "max_seq_len": 128, "targets": ["sm_89"]}
    path.write_text(json.dumps(limits))
    return path


def test_an_engine_runs_on_the_cpu_executors_too(command, network, checkpoint, build_config, tmp_path):
    engine = tmp_path / "engine"
    built = command("build", network, engine, "--config", build_config, "--json")
    assert built.status == 0, built.err
    assert built.json["num_plugin_layers"] == 8
    assert (engine / "rank0.engine").stat().st_size == built.json["engine_bytes"]
    prompt = ("--input-ids", "5,4,3,2,1", "--max-new-tokens", 3, "--json")
    from_engine = command("generate", engine, "-c", checkpoint[0], *prompt)
    from_network = command("generate", network, "-c", checkpoint[0], *prompt)
    assert from_engine.json["output_ids"] == from_network.json["output_ids"]
    interpreted = command("generate", engine, "-c", checkpoint[0], *prompt, "--executor", "interpreter")
    assert interpreted.json["output_ids"] == from_network.json["output_ids"]
    assert "Triton kernels for sm_89" in interpreted.json["executor"]
    too_long = command("generate", engine, "-c", checkpoint[0], "--input-ids", ",".join(["1"] * 128), "--json")
    assert too_long.status == 2
    assert "max_input_len = 127" in too_long.err
    own_limits = command("generate", engine, "-c", checkpoint[0], "--input-ids", "1", "--config", build_config)
    assert own_limits.status == 2
    assert "limits were set when it was built" in own_limits.err


def test_a_native_engine_has_no_plugins(command, network, build_config, tmp_path):
    built = command("build", network, tmp_path / "engine", "--config", build_config, "--native", "--json")
    assert built.status == 0, built.err
    assert built.json["num_plugin_layers"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--targets", "sm_90"], "sm_89"),
        (["--targets", "sm_1"], "Unknown target 'sm_1'"),
        (["--backend", "tensorflow"], "found 'tensorflow', expected tensorrt-rtx or tensorrt"),
        (["--backend", "tensorrt"], "'tensorrt'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(command, network, build_config, tmp_path, options, message):
    outcome = command("build", network, tmp_path / "engine", "--config", build_config, *options)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"tile_s": 128, "num_stages": 3}, "196608 bytes (192 KiB)"),
        ({"num_heads": 7}, "num_heads: the build config says 7"),
        ({"page_size": 48}, "page_size: found 48"),
    ],
)
def test_wrong_settings_are_refused_before_anything_compiles(command, network, tmp_path, plugin, message):
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"targets": ["sm_89"], "mla_plugin": plugin}))
    outcome = command("build", network, tmp_path / "engine", "--config", path)
    assert outcome.status == 2
    assert message in outcome.err
    assert not (tmp_path / "engine").exists()
