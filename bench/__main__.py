"""Every measurement, one after the other: `python -m bench`, or `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    worst = 0
    for script in sorted(HERE.glob("[!_]*.py")):
        print(f"\n== bench/{script.name}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, str(script)], check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
