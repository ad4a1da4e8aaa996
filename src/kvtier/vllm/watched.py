"""The connector of runs that are looked at: as kvtier's own, and each side writes down how it closed.

vLLM runs the two sides in processes of its own and hands nothing back from a close, so the reports go to a file.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from kvtier.runtime.report import CloseReport
from kvtier.vllm.connector import KVTierConnector
from kvtier.vllm.workload import SideClosed

REPORTS_KEY = "close_reports"
"""beside kvtier's own key in `kv_connector_extra_config`: the file, one JSON object a line"""


class WatchedConnector(KVTierConnector):
    def shutdown(self) -> None:
        super().shutdown()
        path = self._kv_transfer_config.kv_connector_extra_config[REPORTS_KEY]
        # A second close returns the report of the first.
        if self._worker is not None and (report := self._worker.close()) is not None:
            _append(path, "worker", report)
        if self._opened is not None:
            _append(path, "scheduler", self._opened.close())


def _append(path: str, side: str, report: CloseReport) -> None:
    tree: dict[str, Any] = msgspec.to_builtins(report, enc_hook=repr)
    line = msgspec.json.encode(SideClosed(side=side, clean=report.clean, text=str(report), tree=tree)) + b"\n"
    # One write, so that the two processes' lines stay whole.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)
