"""A small engine around the real connector: vLLM's scheduler contract, played by hand.

The "device" is arrays; the KV of a token is a digest of all tokens before it, so that every read can be checked:
each step reads the KV of all tokens that it counts as computed, and fails on a wrong byte. The rules that would
end vLLM are assertions here as well: what is reported as sent or received must be waited for, once.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from vllm_fakes import BLOCK_TOKENS, HEAD_SIZE, HEADS, LAYERS, FakeRequest, fake_kv_cache_config, fake_vllm_config

from kvtier.vllm import KVTierConnector

TOKEN_BYTES = HEADS * 2 * HEAD_SIZE * 4
STEP_BUDGET = 16


def kv_of(tokens: Sequence[int], layer: int) -> bytes:
    """KV of the last of `tokens`."""
    return hashlib.shake_128(bytes([layer]) + repr(list(tokens)).encode()).digest(TOKEN_BYTES)


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.refs = 0
        self.prefix: tuple[int, ...] | None = None


class Blocks:
    """As KVCacheBlocks."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = (blocks,)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([block.block_id for block in self.blocks[0]],)


class FakeEngine:
    def __init__(
        self,
        settings: Any = None,
        *,
        num_blocks: int = 32,
        connector: type[KVTierConnector] = KVTierConnector,
        mutate: Callable[[KVTierConnector, KVTierConnector], None] | None = None,
    ) -> None:
        vllm_config = fake_vllm_config(settings or {"host": {"size": "1MiB"}})
        kv_cache_config = fake_kv_cache_config(num_blocks)
        self.device = {
            name: torch.zeros(num_blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE, dtype=torch.float32) for name in LAYERS
        }
        self.worker = connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self.worker.register_kv_caches(self.device)
        self.scheduler = connector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
        self.policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(get_blocks=self.get_blocks, block_pool=None))
        if mutate is not None:
            mutate(self.scheduler, self.worker)
        self.free = OrderedDict((i, Block(i)) for i in range(1, num_blocks))
        self.cached: dict[tuple[int, ...], Block] = {}
        self.requests: dict[str, FakeRequest] = {}
        self.tables: dict[str, list[Block]] = {}
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.loading: dict[str, str] = {}
        self.kept: set[str] = set()
        self.max_tokens: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.preempted: set[str] = set()
        self.external: dict[str, int] = {}
        self.loads_failed = 0
        self.loads = 0

    # What the connector is given.

    def get_blocks(self, request_id: str) -> Blocks:
        return Blocks(self.tables[request_id])

    # The user's side.

    def add(self, request: FakeRequest, max_tokens: int = 4) -> FakeRequest:
        self.requests[request.request_id] = request
        self.tables[request.request_id] = []
        self.max_tokens[request.request_id] = max_tokens
        self.waiting.append(request.request_id)
        self.scheduler.on_new_request(request)
        return request

    def abort(self, request_id: str) -> None:
        if request_id in self.requests and request_id not in self.kept:
            self._finish(request_id)

    def reset(self, *, preempt: bool = False) -> bool:
        if preempt:
            for request_id in list(self.running):
                self._preempt(request_id)
        if not any(self.tables.values()):
            self.cached.clear()
        return bool(self.scheduler.reset_cache())

    def drop_device_cache(self) -> None:
        """Everything that no request uses is forgotten by the device."""
        for prefix, block in list(self.cached.items()):
            if not block.refs:
                del self.cached[prefix]

    def run(self, seconds: float = 20.0) -> None:
        """Step until nothing is left to do."""
        until = time.monotonic() + seconds
        while self.requests or self.scheduler.has_pending_push_work():
            self.step()
            assert time.monotonic() < until, f"stuck: {self.requests.keys()}, loading {self.loading}, kept {self.kept}"

    # One step, in vLLM's order.

    def step(self) -> None:
        scheduled = self._schedule()
        meta = self.scheduler.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=self.preempted, finished_req_ids=set())
        )
        self.preempted = set()
        output = self._execute(pickle.loads(pickle.dumps(meta)), scheduled)
        self._update(output, scheduled)
        if not scheduled:
            time.sleep(0.0002)  # vLLM idles about as long while transfers are out

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        budget = STEP_BUDGET
        for request_id in list(self.running):
            request = self.requests[request_id]
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while request_id in self.running and not self._allocate(request, request.num_computed_tokens + tokens):
                victim = self.running[-1]
                budget += scheduled.pop(victim, 0)
                self._preempt(victim)
            if request_id in self.running and tokens:
                scheduled[request_id] = tokens
                budget -= tokens
        if not self.preempted:
            for request_id in list(self.waiting):
                budget = self._admit(self.requests[request_id], budget, scheduled)
        return scheduled

    def _admit(self, request: FakeRequest, budget: int, scheduled: dict[str, int]) -> int:
        request_id = request.request_id
        if request_id in self.loading:
            state = self.loading[request_id]
            if state == "out":
                return budget
            del self.loading[request_id]
            if state == "failed":
                self._release(request_id)
            else:
                self._cache(request, request.num_computed_tokens)
        external = 0
        if request.num_computed_tokens == 0:
            hit = self._device_hit(request)
            found, is_async = self.scheduler.get_num_new_matched_tokens(request, len(hit) * BLOCK_TOKENS)
            if request.skip_reading_prefix_cache:
                found, hit = 0, []
            if found is None:
                return budget
            assert is_async == (found > 0)
            external = found
            for block in hit:
                self._use(block)
            self.tables[request_id] = hit
            request.num_computed_tokens = len(hit) * BLOCK_TOKENS
            self._check(request, request.num_computed_tokens)
        tokens = 0 if external else min(request.num_tokens - request.num_computed_tokens, budget)
        if (not tokens and not external) or not self._allocate(
            request, request.num_computed_tokens + external + tokens
        ):
            self._release(request_id)
            return budget
        self.scheduler.update_state_after_alloc(request, self.get_blocks(request_id), external)
        if external:
            self.loads += 1
            self.external[request_id] = external
            request.num_computed_tokens += external
            self.loading[request_id] = "out"
            return budget
        self.waiting.remove(request_id)
        self.running.append(request_id)
        scheduled[request_id] = tokens
        return budget - tokens

    def _execute(self, meta: Any, scheduled: dict[str, int]) -> KVConnectorOutput:
        worker = self.worker
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        for request_id, tokens in scheduled.items():
            request = self.requests[request_id]
            self._check(request, request.num_computed_tokens)
            self._write(request, request.num_computed_tokens, request.num_computed_tokens + tokens)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return output

    def _update(self, output: KVConnectorOutput, scheduled: dict[str, int]) -> None:
        for request_id in output.failed_recving:
            if self.loading.get(request_id) == "out":
                self.loads_failed += 1
                self.requests[request_id].num_computed_tokens = 0
        done = []
        for request_id, tokens in scheduled.items():
            request = self.requests[request_id]
            request.num_computed_tokens += tokens
            self._cache(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(1 + hash(tuple(request.all_token_ids)) % 1000)
                made = self.outputs.setdefault(request_id, [])
                made.append(request.all_token_ids[-1])
                if len(made) >= self.max_tokens[request_id]:
                    done.append(request_id)
        for request_id in done:
            self._finish(request_id)
        self.scheduler.update_connector_output(output)
        for request_id in output.finished_recving or ():
            assert request_id in self.requests, "a load was reported of a request that nobody knows"
            if self.loading.get(request_id) == "out":
                self.loading[request_id] = "failed" if request_id in output.failed_recving else "received"
            else:
                assert request_id in self.kept, "a load was reported twice"
                self._forget(request_id)
        for request_id in output.finished_sending or ():
            assert request_id in self.kept, "a request was reported as sent that nobody keeps"
            self._forget(request_id)

    # Requests and blocks.

    def _finish(self, request_id: str) -> None:
        request = self.requests[request_id]
        keep = self.loading.pop(request_id, None) == "out"
        if request_id in self.running:
            self.running.remove(request_id)
        if request_id in self.waiting:
            self.waiting.remove(request_id)
        delay, _ = self.scheduler.request_finished_all_groups(request, self.get_blocks(request_id).get_block_ids())
        self.kept.add(request_id)
        if not keep and not delay:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._release(request_id)
        self.kept.discard(request_id)
        del self.requests[request_id], self.tables[request_id]

    def _preempt(self, request_id: str) -> None:
        self.running.remove(request_id)
        self._release(request_id)
        request = self.requests[request_id]
        request.num_preemptions += 1
        self.waiting.insert(0, request_id)
        self.preempted.add(request_id)

    def _release(self, request_id: str) -> None:
        for block in reversed(self.tables[request_id]):
            block.refs -= 1
            if not block.refs:
                self.free[block.block_id] = block
        self.tables[request_id] = []
        self.requests[request_id].num_computed_tokens = 0

    def _use(self, block: Block) -> None:
        block.refs += 1
        self.free.pop(block.block_id, None)

    def _allocate(self, request: FakeRequest, tokens: int) -> bool:
        table = self.tables[request.request_id]
        need = -(-tokens // BLOCK_TOKENS) - len(table)
        if need > len(self.free):
            return False
        for _ in range(need):
            _, block = self.free.popitem(last=False)
            if block.prefix is not None and self.cached.get(block.prefix) is block:
                del self.cached[block.prefix]
            block.prefix, block.refs = None, 1
            table.append(block)
        return True

    def _device_hit(self, request: FakeRequest) -> list[Block]:
        hit: list[Block] = []
        for end in range(BLOCK_TOKENS, request.num_tokens, BLOCK_TOKENS):
            block = self.cached.get(tuple(request.all_token_ids[:end]))
            if block is None:
                break
            hit.append(block)
        return hit

    def _cache(self, request: FakeRequest, computed: int) -> None:
        for i in range(computed // BLOCK_TOKENS):
            block = self.tables[request.request_id][i]
            if block.prefix is None:
                block.prefix = tuple(request.all_token_ids[: (i + 1) * BLOCK_TOKENS])
                self.cached.setdefault(block.prefix, block)

    def _write(self, request: FakeRequest, first: int, end: int) -> None:
        for position in range(first, end):
            block = self.tables[request.request_id][position // BLOCK_TOKENS].block_id
            for layer, name in enumerate(LAYERS):
                data = torch.frombuffer(
                    bytearray(kv_of(request.all_token_ids[: position + 1], layer)), dtype=torch.uint8
                )
                page = self.device[name][block, :, position % BLOCK_TOKENS]
                page.copy_(data.view(torch.float32).reshape(page.shape))

    def _check(self, request: FakeRequest, computed: int) -> None:
        """What attention would read."""
        for position in range(computed):
            block = self.tables[request.request_id][position // BLOCK_TOKENS].block_id
            for layer, name in enumerate(LAYERS):
                page = self.device[name][block, :, position % BLOCK_TOKENS].contiguous()
                found = page.view(torch.uint8).numpy().tobytes()
                assert found == kv_of(request.all_token_ids[: position + 1], layer), (
                    f"wrong KV of {request.request_id} at token {position} in block {block}"
                )

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
