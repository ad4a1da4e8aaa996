"""Starts and ends `vllm_child.py`, and reads what the probe wrote down."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import kvtier

HELPERS = Path(__file__).parent
START_S = 240.0
ANSWER_S = 120.0


class Engine:
    """A real vLLM engine with the probe connector (or another), in a session of its own.

    `settings` are kvtier's; None: an engine without any connector.
    """

    def __init__(self, directory: Path, model: Path, settings: Any, **options: Any) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        transfer = options.pop("kv_transfer_config", None) or {
            "kv_connector": "ProbeConnector",
            "kv_connector_module_path": "vllm_probe",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvtier": settings},
        }
        options = {"model": str(model), "block_size": 32, **options}
        if settings is not None:
            options["kv_transfer_config"] = transfer
        self._temp = tempfile.mkdtemp(prefix="vllm-")
        environment = {
            **os.environ,
            "KVT_PROBE": str(directory),
            "PYTHONPATH": f"{HELPERS}:{Path(kvtier.__file__).parent.parent}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(directory / "cache"),
            # A killed engine leaves its own sockets behind, which need short names.
            "TMPDIR": self._temp,
            # What vLLM and torch compile for themselves is the same in every test.
            "VLLM_CACHE_ROOT": os.path.expanduser("~/.cache/vllm"),
            "TORCHINDUCTOR_CACHE_DIR": f"/tmp/torchinductor_{os.getuid()}",
        }
        answers, theirs = os.pipe()
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HELPERS / "vllm_child.py"), str(theirs), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        os.close(theirs)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._buffer = b""
        self.started = self._read(START_S)

    def ask(self, do: str, **command: Any) -> Any:
        self.begin(do, **command)
        return self.answer()

    def begin(self, do: str, **command: Any) -> None:
        """Send a command; its answer is for `answer` to take."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, seconds: float = ANSWER_S) -> Any:
        """Raises RuntimeError if the engine ends or says nothing for `seconds`."""
        return self._read(seconds)["answer"]

    def run(self, *prompts: tuple[int, ...], max_tokens: int = 8) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.ask("generate", prompts=prompts, max_tokens=max_tokens)
        return answer

    def forget(self, *, connector: bool = False) -> bool:
        """Reset the device's prefix cache, and the connector's too if asked."""
        return bool(self.ask("reset", connector=connector))

    def want(self, fault: str) -> None:
        (self.directory / fault).touch()

    def processes(self) -> dict[str, list[int]]:
        """Living processes of this engine's session, by what they are: core, worker, tier, other."""
        found: dict[str, list[int]] = {"core": [], "worker": [], "tier": [], "other": []}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if os.getsid(int(entry.name)) != self._process.pid:
                    continue
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (ProcessLookupError, FileNotFoundError):
                continue
            kinds = {"VLLM::EngineCore": "core", "VLLM::Worker": "worker", "kvtier.engine.tier_host": "tier"}
            kind = next((kind for mark, kind in kinds.items() if mark in words), "other")
            if words:  # a zombie has none
                found[kind].append(int(entry.name))
        return found

    def close(self) -> None:
        """Ask, wait, then kill the whole session, by its id."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(b'{"do": "stop"}\n')
                self._process.stdin.close()
            self._process.wait(30)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._answers.close()
        shutil.rmtree(self._temp, ignore_errors=True)

    def _read(self, seconds: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            part = os.read(self._answers.fileno(), 1 << 20) if ready else b""
            if not part:
                raise RuntimeError(f"the engine ended or hung:\n{self.log.read_text(errors='replace')[-4000:]}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    # What the probe saw.

    def notes(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def moved(self, way: str) -> list[tuple[str, str]]:
        """(key, digest of its device block) of all blocks moved so far, in the order of their starts."""
        keys = {note["id"]: note["keys"] for note in self.notes("scheduler.jsonl") if note["way"] == way}
        found = []
        for note in self.notes("worker.jsonl"):
            if note["way"] == way and note["ok"]:
                found.extend(zip(keys[note["id"]], note["digests"], strict=True))
        return found


def wrong_loads(stored: list[tuple[str, str]], loaded: list[tuple[str, str]]) -> list[str]:
    """Keys whose bytes after a load are those of no store of them."""
    digests: dict[str, set[str]] = defaultdict(set)
    for key, digest in stored:
        digests[key].add(digest)
    return [key for key, digest in loaded if digest not in digests[key]]


def difference(a: dict[str, float], b: dict[str, float]) -> float:
    """Largest difference of the first token's 20 log probabilities; infinite for other tokens."""
    return max(abs(a[token] - b[token]) for token in a) if a.keys() == b.keys() else float("inf")
