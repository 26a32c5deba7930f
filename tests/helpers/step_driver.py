"""Builds step plans as a scheduler would, and drives a model runner with them, any number of steps ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stepahead.config import EngineConfig, ResolvedConfig
from stepahead.worker.async_output import AsyncOutput
from stepahead.worker.attention import AttentionMetadata
from stepahead.worker.device_cpu import CpuDevice
from stepahead.worker.messages import GrammarMasks, NewRequest, SamplingOptions, StepOutput, StepPlan
from stepahead.worker.model_config import ModelConfig
from stepahead.worker.models.base import Model
from stepahead.worker.models.hash_lm import HashLM
from stepahead.worker.parallel import ParallelGroup
from stepahead.worker.sync_check import make_runner

VOCAB_SIZE = 97
BLOCK_SIZE = 4
MAX_LEN = 64
NUM_SLOTS = 8
CPU = torch.device("cpu")
GREEDY = SamplingOptions(seed=0, temperature=0.0)


def int32(values: Sequence[int] | range) -> np.ndarray:
    return np.array(values, np.int32)


def make_config(step_ms: float = 0.0, *, in_flight: int = 2, **settings: object) -> ResolvedConfig:
    model = ModelConfig(architecture="HashLM", vocab_size=VOCAB_SIZE, max_position=MAX_LEN, step_ms=step_ms)
    given = {"block_size": BLOCK_SIZE, "max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": 64, "device": "cpu"}
    return ResolvedConfig(
        settings=EngineConfig(model="hash", **{**given, **settings}),
        model=model,
        dtype="float32",
        max_model_len=MAX_LEN,
        max_model_len_asked=False,
        async_scheduling=in_flight == 2,
        async_reason="test",
    )


def hash_model(step_ms: float = 0.0) -> HashLM:
    return HashLM(make_config(step_ms).model, torch.float32, CPU, ParallelGroup())


def context_logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Logits for every position of `tokens`, computed at once in one block. float32 [len, vocab]."""
    n = len(tokens)
    attention = AttentionMetadata(
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        slot_mapping=torch.arange(n),
        max_query_len=n,
        max_seq_len=n,
    )
    cache = model.allocate_kv_cache(1, n)
    hidden = model.forward(torch.tensor(tokens, dtype=torch.int32), torch.arange(n), cache, attention)
    return model.compute_logits(hidden)


def greedy_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What HashLM says after `prompt`, one forward over the whole context for each token."""
    tokens, model = list(prompt), hash_model()
    for _ in range(count):
        tokens.append(int(context_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@dataclass
class Row:
    """A request in a slot. num_tokens: known and in flight. tokens: sampled tokens that came back."""

    slot: int
    name: str
    num_tokens: int
    num_computed: int
    blocks: list[int]
    tokens: list[int] = field(default_factory=list)


class StepDriver:
    """Plans are made from counts alone, never from tokens, so steps can be started before others return."""

    def __init__(
        self, config: ResolvedConfig | None = None, model: Model | None = None, device: CpuDevice | None = None
    ) -> None:
        self.config = config or make_config()
        self.device = device or CpuDevice()
        model = model or hash_model(self.config.model.step_ms)
        self.runner = make_runner(self.config, self.device, model, num_blocks=256, max_model_len=MAX_LEN)
        self.rows: dict[int, Row] = {}
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.outputs: list[StepOutput] = []
        self.in_flight: list[tuple[AsyncOutput, list[str]]] = []
        # Never in order, so that a block table that is not read shows.
        self.free_blocks = list(np.random.default_rng(0).permutation(256))
        self._new: list[NewRequest] = []
        self._appends: list[tuple[int, int, int]] = []
        self._next_step = 0

    def close(self) -> None:
        self.device.close()

    def admit(
        self,
        slot: int,
        name: str,
        tokens: Sequence[int],
        options: SamplingOptions = GREEDY,
        *,
        num_prompt: int | None = None,
        cached: Row | None = None,
        num_computed: int = 0,
    ) -> Row:
        """Puts a request into `slot` at the next step. cached: a row whose first blocks it shares, which hold its
        first num_computed tokens."""
        blocks = list(cached.blocks[: num_computed // BLOCK_SIZE]) if cached else []
        row = Row(slot, name, len(tokens), num_computed, blocks)
        while len(row.blocks) * BLOCK_SIZE < len(tokens):
            row.blocks.append(int(self.free_blocks.pop()))
        self.rows[slot] = row
        prompt = len(tokens) if num_prompt is None else num_prompt
        self._new.append(NewRequest(slot, int32(tokens), prompt, num_computed, int32(row.blocks), options))
        return row

    def free(self, slot: int) -> None:
        """The slot and its blocks may be given away at once, whatever is in flight."""
        self.free_blocks.extend(self.rows.pop(slot).blocks)

    def plan(self, queries: Mapping[int, int] | None = None) -> StepPlan:
        """queries: slot to number of tokens; None computes everything of every row."""
        chosen = {s: r.num_tokens - r.num_computed for s, r in self.rows.items()} if queries is None else queries
        samples = []
        for slot, count in chosen.items():
            row = self.rows[slot]
            row.num_computed += count
            while len(row.blocks) * BLOCK_SIZE < row.num_computed:
                block = int(self.free_blocks.pop())
                self._appends.append((slot, block, len(row.blocks)))
                row.blocks.append(block)
            samples.append(row.num_computed == row.num_tokens)
            row.num_tokens += samples[-1]
        columns = int32(self._appends).reshape(-1, 3).T if self._appends else np.zeros((3, 0), np.int32)
        plan = StepPlan(
            step_id=self._next_step,
            new_requests=self._new,
            append_slots=columns[0].copy(),
            append_blocks=columns[1].copy(),
            append_index=columns[2].copy(),
            slots=int32(list(chosen)),
            num_query=int32(list(chosen.values())),
            samples=np.array(samples, bool),
            num_drafts=int32([]),
            max_seq_len=max(self.rows[s].num_computed for s in chosen),
        )
        self._new, self._appends = [], []
        self._next_step += 1
        return plan

    def start(self, queries: Mapping[int, int] | None = None, grammar: GrammarMasks | None = None) -> AsyncOutput:
        """Starts a step, and does not wait for any."""
        plan = self.plan(queries)
        names = [self.rows[int(s)].name for s in plan.slots]
        self.runner.execute(plan)
        output = self.runner.sample(plan.step_id, grammar)
        self.in_flight.append((output, names))
        return output

    def finish(self) -> StepOutput:
        """Waits for the oldest step, and takes its tokens."""
        output, names = self.in_flight.pop(0)
        result = output.get_output(timeout=30)
        for name, sampled, count in zip(names, result.sampled, result.num_sampled, strict=True):
            self.tokens[name].extend(sampled[:count].tolist())
        self.outputs.append(result)
        return result

    def run(self, steps: int, depth: int = 2) -> None:
        """`steps` steps of every row, up to `depth` in flight; all have returned at the end."""
        for _ in range(steps):
            self.start()
            if len(self.in_flight) >= depth:
                self.finish()
        self.drain()

    def drain(self) -> None:
        while self.in_flight:
            self.finish()
