"""The command ``flint``: versions, near misses, missing extras, generate; and ``./run`` around it."""

import importlib.resources
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flint_jax
from flint_jax import __main__ as command
from flint_jax.command_line import missing, near
from tests.model import golden

ROOT = Path(__file__).parents[2]
main = command.main


# -- the package -------------------------------------------------------------------------------------------------------


def test_the_console_script_is_the_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["flint"].partition(":")
    assert module == "flint_jax.__main__"
    assert callable(getattr(command, function))
    assert project["version"] == flint_jax.__version__


def test_the_package_is_typed_and_lists_its_names():
    assert (importlib.resources.files("flint_jax") / "py.typed").is_file()
    assert set(flint_jax.__all__) <= set(dir(flint_jax))


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"flint-jax {flint_jax.__version__} (jax ")


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("chta", "flint: error: there is no 'chta'; did you mean chat?"),
        ("xyz", "need one of serve, info, generate"),
        ("generate --temprature 0 x", "unknown flag --temprature; did you mean --temperature?"),
        ("info --modle=x", "unknown flag --modle; did you mean --model?"),
        ("score --imput a --output b --input c", "did you mean --input?"),
        ("generate --frobnicate x", "unknown flag --frobnicate; see --help"),
        ("generate one two", "unexpected argument 'two'"),
        ("generate --top-k x y", "--top-k"),
        ("bench lod", "flint bench: error: there is no 'lod'; did you mean load?"),
        ("bench serve --ulr x", "did you mean --url?"),
        ("convert --fromat bf16 a b", "did you mean --format?"),
        ("synthetic --laiers 3 a", "did you mean --layers?"),
        (
            "serve --gpu-memory-utilisation 0.5",
            "flint serve: error: unknown flag --gpu-memory-utilisation; did you mean",
        ),
        ("serve --tensor-parallel 2", "did you mean --tensor-parallel-size?"),
        ("serve --prefix-caching", "did you mean --enable-prefix-caching?"),
        ("serve no/such.gguf", "flint serve: error: no/such.gguf: no such file"),
        ("generate --raw --system x y", "--raw has no chat template"),
        ("chat --tools /no/such.json", "/no/such.json: No such file"),
        ("", "COMMAND"),
    ],
)
def test_one_line_says_what_is_wrong(line, match, capsys, monkeypatch):
    monkeypatch.setattr(command, "_load", lambda args: pytest.fail("the model was loaded"))
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert match in err
    assert err.count("\n") == 1


def test_near_is_one_word_or_none():
    assert near("--tensor-parallel", ["--tensor-parallel-size", "--seed"]) == "--tensor-parallel-size"
    assert near("--max", ["--max-model-len", "--max-num-seqs"]) is None
    assert near("--x", ["--yx-x", "--seed"]) is None


@pytest.mark.parametrize(
    ("module", "line", "extra"),
    [("uvicorn", "serve", "serve"), ("starlette", "serve --help", "serve"), ("huggingface_hub", "serve a/b", "hub")],
)
def test_a_missing_extra_is_one_line_with_the_cure(module, line, extra):
    run = f"from flint_jax.__main__ import main; sys.exit(main({line.split()}))"
    program = f"import sys; sys.modules[{module!r}] = None; {run}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'flint-jax[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_serve_py_without_its_extra(monkeypatch, capsys):
    for name in [n for n in sys.modules if n.startswith("flint_jax.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "serve.py"), run_name="__main__")
    assert left.value.code == 2
    assert capsys.readouterr().err == "serve.py: error: uvicorn is not installed: pip install 'flint-jax[serve]'\n"


def test_a_module_of_no_extra_is_not_explained_away(monkeypatch):
    assert missing(ModuleNotFoundError("x", name="flint_jax.nothing")) is None

    def broken(args):
        raise ModuleNotFoundError("No module named 'a_bug'", name="a_bug")

    monkeypatch.setattr(command, "_info", broken)
    with pytest.raises(ModuleNotFoundError, match="a_bug"):
        main(["info"])


# -- generate ----------------------------------------------------------------------------------------------------------


class Lm:
    """Takes the place of a loaded model; keeps what it was asked."""

    name, chat_template = "scripted", "x"

    def generate(self, prompt, params, *, stream, **options):
        from tests.command.test_terminal import Piece, _Stream

        self.prompt, self.params, self.options = prompt, params, options
        self.closed = 0
        return _Stream(self, [Piece("", "thought"), "an ", "answer"])


@pytest.fixture
def lm(monkeypatch):
    made = Lm()
    monkeypatch.setattr(command, "_load", lambda args: made)
    return made


def test_generate_uses_the_template(lm, capsys):
    assert main(["generate", "Hello", "--system", "Be kind", "--no-thinking", "--temperature", "0"]) == 0
    assert lm.prompt == [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    assert lm.options == {"enable_thinking": False}
    assert (lm.params.temperature, lm.params.max_tokens) == (0.0, 4096)
    assert capsys.readouterr().out == "an answer\n"


def test_generate_raw_continues_the_text(lm, capsys):
    assert main(["generate", "Hello", "--raw"]) == 0
    assert (lm.prompt, lm.options, lm.params.max_tokens) == ("Hello", {}, 256)


def test_generate_without_a_template_says_so(lm, capsys):
    lm.chat_template = None
    assert main(["generate", "Hello"]) == 0
    assert lm.prompt == "Hello"
    assert "has no chat template: the prompt is continued as text" in capsys.readouterr().err
    assert main(["generate", "Hello", "--system", "x"]) == 2


def test_loading_is_told_once_and_shortly(capsys):
    flint_jax.load(golden.FOLDER / "T1")
    err = capsys.readouterr().err
    assert err.count("loaded 0.0") == 1
    assert "not mapped" not in err


def test_serve_is_the_server_with_its_own_log(monkeypatch):
    from flint_jax.server import launch

    seen = []
    monkeypatch.setattr(launch, "main", lambda argv, program: seen.append((argv, program)) or 0)
    monkeypatch.setattr(command, "_show_log", lambda: pytest.fail("a log without levels"))
    assert main(["serve", "m.gguf", "--port", "0"]) == 0
    assert seen == [(["m.gguf", "--port", "0"], "flint serve")]


def test_libraries_keep_their_logs(capsys):
    import logging

    command._show_log()
    logging.getLogger("jax._src.xla_bridge").info("Unable to initialize backend 'tpu'")
    logging.getLogger("flint_jax").info("ours")
    assert not logging.getLogger("jax").isEnabledFor(logging.INFO)
    for name in ("flint_jax", "loaders"):
        log = logging.getLogger(name)
        log.handlers.clear()
        log.setLevel(logging.NOTSET)


# -- ./run -------------------------------------------------------------------------------------------------------------

PYTHON = """#!/bin/bash
if [ "$2" = pip ]; then
    printf 'Collecting numpy\\n  some noise\\n  Downloading numpy.whl (16 MB)\\n'
    [ -e "$(dirname "$0")/broken" ] && { echo 'ERROR: no such package'; exit 1; }
    echo 'Successfully installed numpy'
    exit 0
fi
printf '%s|' "$PWD" "$@"
"""


@pytest.fixture
def clone(tmp_path):
    """A folder with ``run`` and an environment whose interpreter tells how it was called."""
    made = tmp_path / "a clone"
    (made / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "run", made / "run")
    for name in ("pyproject.toml", "constraints.txt"):
        (made / name).write_text("")
    for name in ("python", "flint"):
        (made / ".venv" / "bin" / name).write_text(PYTHON)
        (made / ".venv" / "bin" / name).chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(made / "run")
    return made


def run(clone, *words, script=None):
    env = os.environ | {"PATH": "/usr/bin:/bin"}
    where = clone.parent / "elsewhere"
    command = ["bash", str(script or clone / "run"), *words]
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
class TestRun:
    def test_it_keeps_the_callers_folder(self, clone):
        here = str(clone.parent / "elsewhere")
        assert run(clone, "serve", "m.gguf").stdout == f"{here}|{clone}/serve.py|m.gguf|"
        assert run(clone, "python", "-c", "1").stdout == f"{here}|-c|1|"
        assert run(clone, "flint", "chat").stdout == f"{here}|chat|"
        assert run(clone, "flint", "chat", script=clone.parent / "linked").stdout == f"{here}|chat|"

    def test_it_shows_that_it_installs_and_does_so_once(self, clone):
        first = run(clone, "serve")
        for words in (
            "Installing flint-jax[serve]",
            "Collecting numpy",
            "Downloading numpy.whl (16 MB)",
            "Successfully",
        ):
            assert words in first.stderr
        assert "some noise" not in first.stderr
        assert "some noise" in (clone / ".venv" / "install.log").read_text()
        assert run(clone, "serve").stderr == ""

    def test_a_failed_install_is_no_install(self, clone):
        (clone / ".venv" / "bin" / "broken").touch()
        for _ in "12":
            done = run(clone, "serve")
            assert done.returncode == 1
            assert "ERROR: no such package" in done.stderr
            assert "install.log" in done.stderr
            assert done.stdout == ""

    def test_without_a_command_it_says_what_there_is(self, clone):
        done = run(clone)
        assert done.returncode == 2
        assert "./run serve" in done.stdout
