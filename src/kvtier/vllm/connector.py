"""The connector that vLLM loads: every hook is handed to one of the two sides, behind a guard.

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": {"kvtier": {"host": {"size": "16GiB"}}}}'

Rules:
1. Pure delegation. A hook's second way, taken once kvtier is off, touches only books that cannot be broken.
2. A ConfigError refuses the start, with its one line. Whatever else goes wrong switches kvtier off.
3. No vLLM handshake metadata: beside other connectors it would take another child's place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.config import Config
from kvtier.core.prefix import namespace_digest
from kvtier.engine import open as engine
from kvtier.engine.work import StepWork
from kvtier.errors import ConfigError, CoreBug
from kvtier.runtime.deadline import Deadline
from kvtier.runtime.report import CloseReport
from kvtier.vllm.books import Books
from kvtier.vllm.groups import Plan, pages_of_groups, plan_groups
from kvtier.vllm.guard import Guard
from kvtier.vllm.keys import Keyring
from kvtier.vllm.ledger import Ledger
from kvtier.vllm.metadata import RankMeta, StepMeta
from kvtier.vllm.namespace import namespace_parts
from kvtier.vllm.plugin import check_vllm, log_as_vllm_does
from kvtier.vllm.scheduler_side import SchedulerSide
from kvtier.vllm.settings import check_role, parent_of, read_settings, recompute_failed_loads
from kvtier.vllm.stats import KVTierPromMetrics, KVTierStats, Sampler
from kvtier.vllm.worker_side import RankLike, WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("kvtier")


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps vLLM's KV cache in host memory and lower tiers."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log_as_vllm_does()
        check_vllm()
        check_role(vllm_config.kv_transfer_config)
        self._settings: Config = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._plan: Plan = plan_groups(vllm_config, kv_cache_config, self._settings)
        self._parent = parent_of(self)
        self._books = Books()
        self._ledger = Ledger()
        self._sampler = Sampler([tier.name for tier in self._settings.tiers])
        self._opened: engine.SchedulerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            recompute_failed_loads(vllm_config, self._parent)
            self._guard = Guard("scheduler side", self._turn_store_off)
            self._start(self._open_scheduler)
        else:
            self._guard = Guard("worker side", self._turn_worker_off)
            self._worker = WorkerSide(self._ledger, self._open_rank)

    # Opening.

    def _start(self, act: Callable[[], None]) -> None:
        """Rule 2."""
        try:
            act()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the engine starts without what is broken
            self._guard.turn_off(error)

    def _open_scheduler(self) -> None:
        namespace = b""

        def find_namespace(table: engine.RegionTable) -> bytes:
            nonlocal namespace
            parts = namespace_parts(self._vllm_config, self._kv_cache_config, self._settings, table.pages)
            namespace = namespace_digest(parts)
            return namespace

        self._opened = engine.open_scheduler_side(
            self._settings, engine_id=self._engine_id, groups=self._plan.groups, namespace=find_namespace
        )
        self._scheduler = SchedulerSide(
            self._opened.store,
            Keyring(namespace, self._plan.groups, self._plan.unit_tokens),
            self._books,
            engine_blocks_per_block=self._plan.engine_blocks_per_block,
        )

    def _open_rank(self, kv_caches: Mapping[str, Any]) -> tuple[RankLike, Callable[[Deadline | None], CloseReport]]:
        pages, layouts = pages_of_groups(self._plan, kv_caches)
        side = engine.open_rank_side(self._settings, engine_id=self._engine_id, pages=pages, page_layouts=layouts)
        return side.rank, side.close

    @property
    def _engine_id(self) -> str:
        return str(self._kv_transfer_config.engine_id)

    # Off.

    def _turn_store_off(self, error: Exception) -> bool:
        if self._opened is None:
            return False
        self._opened.store.turn_off(error)
        return True

    def _turn_worker_off(self, error: Exception) -> bool:
        self._ledger.turn_off(repr(error))
        return False

    @property
    def _s(self) -> SchedulerSide:
        if self._scheduler is None:
            raise CoreBug("a scheduler hook was called on the worker side")
        return self._scheduler

    @property
    def _w(self) -> WorkerSide:
        if self._worker is None:
            raise CoreBug("a worker hook was called on the scheduler side")
        return self._worker

    @property
    def _meta(self) -> StepMeta:
        meta = self._get_connector_metadata()
        if not isinstance(meta, StepMeta):
            raise CoreBug(f"step metadata of another connector: {type(meta).__name__}")
        return meta

    # Scheduler side.

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._guard(lambda: self._s.bind(kv_cache_manager), _nothing)

    def on_new_request(self, request: Any) -> None:
        self._guard(lambda: self._s.new_request(request), _nothing)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._guard(lambda: self._s.lookup(request, num_computed_tokens), lambda: (0, False))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        def lost() -> None:
            if num_external_tokens:
                self._books.load_begins(request.request_id)

        self._guard(lambda: self._s.allocated(request, blocks, num_external_tokens), lost)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        return self._guard(lambda: self._s.step(scheduler_output), lambda: self._books.meta(StepWork(off=True)))

    def update_connector_output(self, connector_output: Any) -> None:
        self._guard(lambda: self._take_output(connector_output), _nothing)
        self._books.received(connector_output.finished_recving or ())

    def _take_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, RankMeta):
            if meta.off:
                raise CoreBug(f"the worker side is off: {meta.off}")
            self._s.ranks_ended(meta.ends)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._guard(lambda: self._s.finished(request, block_ids), lambda: False), None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._guard(lambda: self._s.wants_steps(), lambda: False)

    def reset_cache(self) -> bool | None:
        self._guard(lambda: self._s.reset(), _nothing)
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._start(lambda: self._w.register(kv_caches))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._guard(
            lambda: self._w.handle_preemptions(kv_connector_metadata), lambda: self._w.go_off(kv_connector_metadata)
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._guard(lambda: self._w.start_loads(self._meta), _nothing)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores begin when the whole step is computed."""

    def wait_for_save(self) -> None:
        self._guard(lambda: self._w.submit_stores(self._meta), _nothing)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._guard(lambda: self._w.results(), lambda: self._w.results_when_off(self._meta))

    def build_connector_worker_meta(self) -> RankMeta | None:
        return self._guard(lambda: self._w.meta(), self._ledger.take_meta)

    # Both.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: no hook works inside the model. vLLM asks before it starts anything, so bad settings end here."""
        read_settings(extra_config)
        return False

    def get_kv_connector_stats(self) -> KVTierStats | None:
        """None on the worker side, and beside other connectors, where vLLM cannot read an unregistered class."""
        if self._parent is not None or self._worker is not None:
            return None
        return self._guard(lambda: self._sampler.take(self._counts), lambda: self._sampler.take(lambda: {"off": 1}))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierPromMetrics:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Bounded by `close_timeout_s`, idempotent; raises nothing."""
        try:
            if self._worker is not None:
                self._worker.close()
            if self._opened is not None:
                self._opened.close()
        except Exception:  # vLLM closes what is left only if this returns
            log.exception("kvtier could not be closed")

    def _counts(self) -> Mapping[str, int]:
        if self._opened is None:
            raise CoreBug("counts of a store that was never opened")
        return self._opened.store.counts()


def _nothing() -> None:
    """The way of hooks that have nothing to do once kvtier is off."""
