"""The command as a whole: help, exit codes, configuration files, speed of its start."""

from __future__ import annotations

import builtins
import dataclasses
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Shell

from ramet.cli.common import ENGINE_FIELDS, SAMPLING_FIELDS
from ramet.cli.main import COMMANDS
from ramet.cli.options import Parser, field_docs
from ramet.config import EngineConfig
from ramet.errors import Closed, ModelError, OutOfMemory
from ramet.sampling_params import SamplingParams


@pytest.fixture
def shell() -> Shell:
    return Shell()


def test_help_lists_every_command(shell: Shell) -> None:
    assert shell.run("--help") == 0
    assert all(name in shell.out for name in COMMANDS)
    assert shell.run() == 2
    assert "usage: ramet COMMAND" in shell.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_every_default(shell: Shell, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run(*command.split(), "--help") == 0
    assert "Logging and configuration:" in capsys.readouterr().out
    module = import_module(COMMANDS[command][0])
    parser = Parser()
    module.add_options(parser)
    options = [a for a in parser._actions if a.option_strings and a.dest != "help"]
    assert all("(default: " in (action.help or "") for action in options)
    assert set(parser.defaults) >= {action.dest for action in options}


def test_help_of_generate_is_grouped(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run("generate", "--help") == 0
    text = capsys.readouterr().out
    titles = ["Prompts:", "Output:", "Sampling:", "Model and engine:", "Logging and configuration:"]
    assert [text.index(f"\n{title}\n") for title in titles] == sorted(text.index(f"\n{title}\n") for title in titles)


def test_every_field_of_the_engine_and_of_sampling_has_a_flag(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run("generate", "--help") == 0
    text = capsys.readouterr().out
    for name in (*ENGINE_FIELDS, *SAMPLING_FIELDS, "seed"):
        assert "--" + name.replace("_", "-") in text
    left_out = {f.name for f in dataclasses.fields(SamplingParams)} - set(SAMPLING_FIELDS)
    assert left_out == {"seed", "structured_outputs", "output_kind"}


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_the_docstring_explains_every_field(cls: type) -> None:
    docs = field_docs(cls)
    assert {f.name for f in dataclasses.fields(cls)} <= set(docs)


def test_version(shell: Shell) -> None:
    assert shell.run("--version") == 0
    assert shell.out.startswith("ramet ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generat"], "did you mean 'generate'"),
        (["bench"], "it has: throughput"),
        (["bench", "latency"], "no command 'latency'"),
        (["generate", "m", "extra", "--prompt", "x"], "unrecognized argument 'extra'"),
    ],
)
def test_an_unknown_command_names_the_nearest(shell: Shell, argv: list[str], message: str) -> None:
    assert shell.run(*argv) == 2
    assert message in shell.err


@pytest.mark.parametrize(
    ("error", "code"), [(ModelError("no\n  such model"), 2), (OutOfMemory("small"), 1), (Closed("closed"), 1)]
)
def test_our_errors_are_one_line_and_an_exit_code(error: Exception, code: int, capsys: Any) -> None:
    import io

    from ramet.cli.common import Context
    from ramet.cli.main import main

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    context = Context(make_llm=fail, stdin=io.StringIO("x"), stdout=io.StringIO(), stderr=io.StringIO())
    assert main(["generate", "m"], context) == code
    assert context.stderr.getvalue() == f"ramet: error: {' '.join(str(error).split())}\n"  # type: ignore[attr-defined]


def test_ctrl_c_while_the_model_loads_is_a_message_and_130() -> None:
    import io

    from ramet.cli.common import Context
    from ramet.cli.main import main

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    context = Context(make_llm=interrupt, stdin=io.StringIO("x"), stdout=io.StringIO(), stderr=io.StringIO())
    assert main(["generate", "m"], context) == 130
    assert context.stderr.getvalue() == "ramet: interrupted\n"  # type: ignore[attr-defined]


# --- configuration files ----------------------------------------------------------------------------------------------


def write(tmp_path: Path, name: str, content: Any) -> str:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_flags_override_the_file_and_the_file_the_defaults(shell: Shell, tmp_path: Path) -> None:
    settings = {
        "model": "m",
        "top-k": 5,
        "top_p": 0.5,
        "stop": ["a", "b"],
        "enable-prefix-caching": False,
        "page-size": 4,
    }
    settings |= {
        "stop_token_ids": [3, 4],
        "logit-bias": {"3": 1.5},
        "max_tokens": None,
        "ignore-eos": True,
        "chat": True,
    }
    config = write(tmp_path, "c.json", settings)
    assert shell.run("generate", "--config", config, "--prompt", "x", "--top-k", "7") == 0
    assert shell.llm is not None
    (params,) = shell.llm.calls[0][1]
    assert (params.top_k, params.top_p, params.stop, params.stop_token_ids) == (7, 0.5, ("a", "b"), (3, 4))
    assert (params.logit_bias, params.max_tokens, params.ignore_eos) == ({3: 1.5}, None, True)
    assert (shell.llm.config.enable_prefix_caching, shell.llm.config.page_size) == (False, 4)
    assert shell.out.startswith("<user>x")


def test_a_list_in_a_flag_replaces_the_files(shell: Shell, tmp_path: Path) -> None:
    config = write(tmp_path, "c.json", {"stop": ["a"], "prompt": ["p"]})
    assert shell.run("generate", "m", "--config", config, "--stop", "b") == 0
    assert shell.llm is not None
    assert shell.llm.calls[0][1][0].stop == ("b",)


def test_the_source_config_file_is_shown(shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, "c.json", {"top-k": 5})
    assert shell.run("generate", "m", "--prompt", "x", "--config", config) == 0
    assert "top_k=5 (config file)" in capsys.readouterr().err


def test_yaml_is_read_where_pyyaml_is_installed(shell: Shell, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = write(tmp_path, "c.yaml", "top-k: 5\nstop:\n  - a\n")
    assert shell.run("generate", "m", "--prompt", "x", "--config", config) == 0
    assert shell.llm is not None
    assert shell.llm.calls[0][1][0].top_k == 5


def test_yaml_without_pyyaml_says_what_to_do(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_yaml(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "yaml":
            raise ImportError
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    config = write(tmp_path, "c.yaml", "top-k: 5\n")
    assert shell.run("generate", "m", "--prompt", "x", "--config", config) == 2
    assert "pip install pyyaml, or use JSON" in shell.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"top-kk": 1}, "there is no setting 'top-kk'; did you mean 'top_k'"),
        ({"top-k": "many"}, "invalid int value"),
        ({"top-k": None}, "invalid int value: 'None'"),
        ({"ignore-eos": "yes"}, "ignore-eos is 'yes'; allowed: true or false"),
        ({"dtype": "int4"}, "invalid choice"),
        ([1], "holds a list"),
        ("{", "not valid JSON"),
    ],
)
def test_a_bad_configuration_file_is_named_with_the_reason(
    shell: Shell, tmp_path: Path, content: Any, message: str
) -> None:
    config = write(tmp_path, "c.json", content)
    assert shell.run("generate", "m", "--prompt", "x", "--config", config) == 2
    assert message in shell.err
    assert "c.json" in shell.err


def test_a_missing_configuration_file_is_named(shell: Shell) -> None:
    assert shell.run("generate", "m", "--prompt", "x", "--config", "none.json") == 2
    assert "none.json cannot be read: No such file" in shell.err


# --- start ------------------------------------------------------------------------------------------------------------


def test_help_loads_no_torch_and_starts_at_once() -> None:
    code = (
        "import sys, time; t = time.process_time(); from ramet.cli.main import main; main(['--help']);"
        "main(['generate', '--help']); s = time.process_time() - t;"
        "bad = {'torch', 'tokenizers', 'transformers', 'jinja2', 'huggingface_hub'} & set(sys.modules);"
        "print(f'{s:.3f}', sorted(bad), file=sys.stderr)"
    )
    best = 10.0  # of the processor, since other tests may run beside this one
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, modules = done.stderr.split(maxsplit=1)
        assert modules.strip() == "[]"
        best = min(best, float(seconds))
    assert best < 0.6, "torch alone takes more than a second; ours takes 0.2 to 0.36, the last on a busy old core"


def test_python_m_ramet_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ramet", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ramet ")
    wrong = subprocess.run([sys.executable, "-m", "ramet", "generat"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr == "ramet: error: there is no command 'generat'; did you mean 'generate'? (see ramet --help)\n"
