"""A device on paper: runs plans in order with a KV pool that stores token ids, in plain numpy.

Its next token is a hash of the whole context read back through the block table, and it asserts that
the context is what the request's tokens say: one wrong block, position or placeholder shows at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from stepahead.config import EngineConfig, ResolvedConfig, resolve
from stepahead.executor.base import Executor
from stepahead.worker.messages import GrammarMasks, StepOutput, StepPlan, WorkerInfo
from stepahead.worker.model_config import ModelConfig

VOCAB = 50


def next_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB


def generate_alone(prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], max_model_len: int) -> list[int]:
    """What a request yields when nothing else is there."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_model_len):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Row:
    tokens: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)


@dataclass
class Done:
    value: object

    def result(self) -> object:
        return self.value

    def done(self) -> bool:
        return True


class PaperExecutor(Executor):
    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config)
        self.size = config.settings.block_size
        self.rows: dict[int, Row] = {}
        self.plans: list[StepPlan] = []

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def worker_infos(self) -> list[WorkerInfo]:
        return [WorkerInfo(rank=0, device="paper", kv_blocks=self.config.settings.num_kv_blocks or 64, pid=0)]

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        self.kv = np.full(num_blocks * self.size, -1, np.int64)

    def execute_model(self, plan: StepPlan) -> Done:
        assert plan.num_query.sum() <= self.config.settings.max_num_batched_tokens
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert plan.num_query.min() > 0, "a row without a token to compute has no logits"
        self.plans.append(plan)
        for new in plan.new_requests:
            self.rows[new.slot] = Row(new.token_ids.tolist(), new.num_computed, new.blocks.tolist())
        for slot, block, index in zip(plan.append_slots, plan.append_blocks, plan.append_index, strict=True):
            assert index == len(self.rows[slot].blocks)
            self.rows[slot].blocks.append(int(block))
        for slot, count in zip(plan.slots.tolist(), plan.num_query.tolist(), strict=True):
            row = self.rows[slot]
            for position in range(row.num_computed, row.num_computed + count):
                self.kv[self._place(row, position)] = row.tokens[position]
        return Done(None)

    def sample_tokens(self, grammar: GrammarMasks | None) -> Done:
        plan = self.plans[-1]
        sampled = np.full((len(plan.slots), 1), -1, np.int32)
        masks = dict(zip(grammar.rows.tolist(), grammar.bits, strict=True)) if grammar else {}
        for i, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_query.tolist(), strict=True)):
            row = self.rows[slot]
            row.num_computed += count
            assert row.num_computed <= plan.max_seq_len
            context = [int(self.kv[self._place(row, p)]) for p in range(row.num_computed)]
            assert context == row.tokens[: row.num_computed], "the KV pool does not hold this request's context"
            assert bool(plan.samples[i]) == (row.num_computed == len(row.tokens))
            if plan.samples[i]:
                sampled[i, 0] = self._allowed(next_token(context), masks.get(i))
                row.tokens.append(int(sampled[i, 0]))
        return Done(StepOutput(plan.step_id, sampled, plan.samples.astype(np.int32)))

    @staticmethod
    def _allowed(token: int, bits: np.ndarray | None) -> int:
        while bits is not None and not bits[token // 32] >> (token % 32) & 1:
            token = (token + 1) % VOCAB
        return token

    def _place(self, row: Row, position: int) -> int:
        return row.blocks[position // self.size] * self.size + position % self.size

    def collective_rpc(self, method: object, args: Sequence[object] = (), timeout: float | None = None) -> list[object]:
        return [method]

    def check_health(self) -> None:
        return None

    def shutdown(self) -> None:
        return None


def paper_config(model_positions: int = 512, **settings: object) -> ResolvedConfig:
    config = msgspec.convert({"model": "paper", "max_num_seqs": 8, "num_kv_blocks": 64, **settings}, EngineConfig)
    model = ModelConfig(architecture="HashLM", vocab_size=VOCAB, max_position=model_positions)
    return resolve(config, model, executor_supports_async=True)
