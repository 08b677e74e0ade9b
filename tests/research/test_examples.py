"""Every research example runs (here on four layers of the tiny model, which compile faster) and draws its plots."""

import importlib

import pytest

from loaders import synthetic

PLOTS = {
    "capture_patch": ("lens.png", "sinks.png", "ablations.png"),
    "router_statistics": ("load.png", "together.png", "entropy.png"),
    "layer_kl": ("kl.png",),
    "finetune_lora": ("loss.png", "adapters.safetensors", "merged/model-00001-of-00001.safetensors"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same weights in NVFP4 and BF16."""
    folder, config = tmp_path_factory.mktemp("models"), synthetic.preset("tiny", 4)
    synthetic.write_gguf(folder / "flint.gguf", config)
    synthetic.write_safetensors(folder / "flint", config)
    return folder / "flint.gguf", folder / "flint"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLOTS)
def test_example(tmp_path, name, capsys, models):
    packed, plain = map(str, models)
    which = ["--nvfp4", packed, "--bf16", plain] if name == "layer_kl" else ["--model", packed]
    assert importlib.import_module(f"examples.research.{name}").main(["--out", str(tmp_path), *which]) == 0
    for plot in PLOTS[name]:
        assert (tmp_path / plot).stat().st_size > 4000
    assert capsys.readouterr().out
