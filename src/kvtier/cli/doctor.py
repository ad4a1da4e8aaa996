"""`kvtier doctor`: is this machine, and this configuration, fit for kvtier?

Looks and changes nothing: what it probes has no name in any file system. A finding is `ok`, a `note`
(true, and perhaps surprising) or a `problem`, which always comes with its remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvtier.cli import exits
from kvtier.cli.probes import Finding, Status, disk_tier, installed, kernel, leftovers, memory
from kvtier.config import Config, load_config
from kvtier.tiers.registry import tier_options

_STYLES = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "red"}


def doctor_command(
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration to check too, .toml or .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check a configuration and this machine; name each problem with its remedy."""
    findings = list(examine(load_config(config, tier_options=tier_options()) if config else None))
    problems = sum(finding.status is Status.PROBLEM for finding in findings)
    if as_json:
        plain = msgspec.to_builtins({"ok": not problems, "findings": findings})
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(plain)) + b"\n")
    else:
        _print_table(findings, problems)
    if problems:
        raise typer.Exit(exits.PROBLEM)


def examine(config: Config | None) -> Iterator[Finding]:
    """All findings; without a configuration only those of the machine."""
    yield from installed()
    yield from kernel()
    yield from memory(config.host.size if config else None)
    yield from leftovers()
    if config is not None:
        yield from configuration(config)


def configuration(config: Config) -> Iterator[Finding]:
    """What a valid configuration still does not tell, and whether its tiers can be opened here."""
    tiers = ", ".join(f"{tier.name} ({tier.type})" for tier in config.tiers) or "none"
    yield Finding("config", "valid", Status.OK, f"host {config.host.size!s}, lower tiers: {tiers}")
    if config.weights_version is None:
        yield Finding(
            "config",
            "weights",
            Status.NOTE,
            "identified by their files; weights changed in a running engine without a cache reset cannot be seen",
            "reset the engine's prefix cache with every weight update",
        )
    for tier in config.tiers:
        if tier.type == "disk":
            yield from disk_tier(tier)
        if not tier.process:
            yield Finding(
                "config",
                tier.name,
                Status.PROBLEM,
                "process = false: the tier would run in a thread, which the vLLM connector refuses",
                "remove `process`, or set it to true",
            )


def _print_table(findings: list[Finding], problems: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("what", "", "found", box=None, pad_edge=False)
    for finding in findings:
        found = Text(finding.found)
        if finding.remedy:
            found.append(f"\n-> {finding.remedy}", style="bold" if finding.status is Status.PROBLEM else "dim")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(Text(f"{finding.area}: {finding.what}"), status, found)
    console = Console()
    console.print(table)
    console.print(f"{problems} problem{'s' if problems != 1 else ''} found" if problems else "no problems found")
