"""What the exit code of a `kvtier` command says, the same for every command."""

from __future__ import annotations

import sys

import typer

from kvtier.runtime.report import CloseReport

PROBLEM = 1
"""the command failed, or found problems"""
CONFIG = 2
"""the configuration or the command line cannot work as written"""
UNCLEAN = 3
"""the work was done, but something was not closed clean or memory was kept"""


def require_clean(report: CloseReport) -> None:
    """Print an unclean close report on stderr and exit with `UNCLEAN`; a clean one is passed over."""
    if not report.clean:
        print(f"kvtier: not closed clean:\n{report}", file=sys.stderr)
        raise typer.Exit(UNCLEAN)
