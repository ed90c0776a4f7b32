"""A shadow of exact K and V beside a running engine, against which every exact read is held."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from turboquant.kernels.interface import ExactWindow
from turboquant.vllm import backend

SAME_SEQUENCE = 0.1  # measured up to .018 between requests that share a prefix, about 1.4 between sequences


class Oracle:
    """Watches `store_kv` and `attend` of the engine in this process.

    Exact values are remembered by layer and packed slot, and by layer and position (vLLM copies packed blocks when a
    prefix hit ends inside one).

    Attributes:
        reads, bad: exact reads, and those of other values than were stored there.
        freed: reads of a window block that no sequence owns.
        preemptions: of the scheduler.
        moved_by_packed, moved_by_window: the largest change of an output when the packed copies of tokens that are
            read exactly turn to noise, and the smallest when the window does; with `corrupt`.
    """

    def __init__(self, monkeypatch, corrupt: bool = False) -> None:
        self.by_slot, self.by_position = {}, {}
        self.reads = self.bad = self.freed = self.preemptions = 0
        self.moved_by_packed, self.moved_by_window = 0.0, float("inf")
        self.corrupt, self.pool = corrupt, None
        self._store, self._attend, self._preempt = backend.store_kv, backend.attend, Scheduler._preempt_request
        monkeypatch.setattr(backend, "store_kv", self._watched_store)
        monkeypatch.setattr(backend, "attend", self._watched_attend)
        monkeypatch.setattr(Scheduler, "_preempt_request", _bound(self._watched_preempt))

    def watch_blocks(self, llm) -> None:
        """Also look at who owns the blocks that are read."""
        self.pool = block_pool(llm)

    def _watched_preempt(self, *args, **kwargs):
        self.preemptions += 1
        return self._preempt(*args, **kwargs)

    def _watched_store(self, key, value, pages, slot_mapping, positions, params):
        both = torch.cat((key, value), dim=-1)
        for slot, position, exact in zip(slot_mapping.tolist(), positions.tolist(), both, strict=True):
            self.by_slot[pages.data_ptr(), slot] = exact.clone()
            self.by_position.setdefault((pages.data_ptr(), position), []).append(exact.clone())
        self._store(key, value, pages, slot_mapping, positions, params)

    def _watched_attend(self, query, pages, block_table, seq_lens, query_start_loc, params, *, window, out, **kwargs):
        if window is not None:
            exact_slots = self._check(pages, block_table, seq_lens, query_start_loc, window)
        tables = (block_table, seq_lens, query_start_loc, params)
        result = self._attend(query, pages, *tables, window=window, out=out, **kwargs)
        # Only a decode step reads the same tokens exactly with all of its queries.
        if self.corrupt and window is not None and len(query) == len(seq_lens) and exact_slots:
            self._corrupt(query, pages, tables, window, exact_slots, result, kwargs)
        return result

    def _check(self, pages, block_table, seq_lens, query_start_loc, window: ExactWindow) -> list[int]:
        packed_size, block_size = pages.shape[2], window.pages.shape[2]
        slots = []
        for i, length in enumerate(seq_lens.tolist()):
            past = length - int(query_start_loc[i + 1] - query_start_loc[i])
            for at in {*range(min(window.first, past)), *range(max(0, past - window.size + 1), past)}:
                block = int(window.block_table[i, at // block_size])
                if block:
                    slots.append(int(block_table[i, at // packed_size]) * packed_size + at % packed_size)
                    self.reads += 1
                    held = window.pages[block, :, at % block_size]
                    self.bad += not self._is_right(pages.data_ptr(), slots[-1], at, held)
                    self.freed += self.pool is not None and self.pool.blocks[block].ref_cnt < 1
        return slots

    def _is_right(self, layer: int, slot: int, position: int, held: torch.Tensor) -> bool:
        """Bit for bit what this layer stored at this position, and of the sequence that owns the packed slot.

        Requests that share a packed block have each computed its last tokens themselves after a hit, so theirs may be
        apart by what reading packed copies in place of exact ones does; other sequences' are as far as random vectors.
        """
        last = self.by_slot.get((layer, slot))
        if last is not None and torch.equal(held, last):
            return True
        same_sequence = last is None or (held - last).norm() < SAME_SEQUENCE * last.norm()
        return bool(same_sequence) and any(torch.equal(held, exact) for exact in self.by_position[layer, position])

    def _corrupt(self, query, pages, tables, window, slots, result, kwargs) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = 10 * torch.randn(2, len(slots), *kwargs["fresh"][0].shape[1:], generator=generator)
        noisy, at = pages.clone(), torch.tensor(slots)
        self._store(*noise, noisy, at, torch.ones_like(at), tables[-1])
        again = self._attend(query, noisy, *tables, window=window, out=torch.empty_like(query), **kwargs)
        self.moved_by_packed = max(self.moved_by_packed, float((again - result).abs().max()))
        lost = replace(window, pages=torch.randn(window.pages.shape, generator=generator).to(window.pages.dtype))
        again = self._attend(query, pages, *tables, window=lost, out=torch.empty_like(query), **kwargs)
        self.moved_by_window = min(self.moved_by_window, float((again - result).abs().amax((1, 2)).min()))


def _bound(method):
    """A function to stand for a method of another class, which is passed on as the first argument."""
    return lambda *args, **kwargs: method(*args, **kwargs)


def block_pool(llm):
    """The scheduler's pool of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def assert_nothing_leaked(llm) -> None:
    """When no request runs, every block but the null block is free."""
    pool = block_pool(llm)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
