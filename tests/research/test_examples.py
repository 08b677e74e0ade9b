"""Every research example runs on the tiny model and draws its plots."""

import importlib

import pytest

PLOTS = {
    "capture_patch": ("lens.png", "sinks.png", "ablations.png"),
    "router_statistics": ("load.png", "together.png", "entropy.png"),
    "layer_kl": ("kl.png",),
    "finetune_lora": ("loss.png", "adapters.safetensors", "merged/model-00001-of-00001.safetensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLOTS)
def test_example(tmp_path, name, capsys):
    assert importlib.import_module(f"examples.research.{name}").main(["--out", str(tmp_path)]) == 0
    for plot in PLOTS[name]:
        assert (tmp_path / plot).stat().st_size > 4000
    assert capsys.readouterr().out
