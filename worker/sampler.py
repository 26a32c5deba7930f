"""From logits to tokens, on the device.

The order is vLLM's: raw log-probabilities are taken first; then grammar masks, allowed ids, bad words, min
tokens, logit bias, penalties; then temperature, min-p, top-k and top-p, for rows that are not greedy.
What each part touches is laid out on the host, from the plan and the requests' options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.greedy_sample import greedy_sample
from ..kernels.gumbel_sample import gumbel_sample
from ..kernels.top_k_top_p import mask_top_k_top_p_min_p
from . import logits_processors as processors
from . import sampling_state as options
from .batch_state import BatchState
from .host_ring import Field, HostBuffer, HostUpload
from .logprobs import DeviceLogprobs, gather_logprobs
from .messages import GrammarMasks, StepPlan
from .sampling_state import SamplingState


@dataclass(frozen=True)
class Subset:
    """m of the s rows that sample. rows: int64 [m], None when it is all of them. slots: int64 [m]."""

    rows: Field | None
    slots: Field


@dataclass(frozen=True)
class StagedGrammar:
    """rows: int64 [m] of the s rows that sample. bits: int32 [m, ceil(vocab / 32)]."""

    rows: Field
    bits: Field


@dataclass(frozen=True)
class SampleLayout:
    """What sampling a step touches, s of its n rows.

    all_rows: whether s is n. rows: int64 [s], of the n rows. slots: int64 [s]. last_token: int64 [s], place of
    each row's last token among the step's t tokens. max_len: no row knows more tokens.
    subsets: by feature. logprob_rows: int64 [m], of the n rows; num_logprobs: the most any of them asks.
    """

    num_sampling: int
    all_rows: bool
    rows: Field
    slots: Field
    last_token: Field
    max_len: int
    row_index: np.ndarray
    subsets: dict[int, Subset]
    logprobs: Subset | None
    logprob_rows: np.ndarray
    num_logprobs: int

    def uses(self, feature: int) -> bool:
        return feature in self.subsets


class Sampler:
    def __init__(self, batch: BatchState, state: SamplingState, vocab_size: int) -> None:
        self._batch = batch
        self._state = state
        self._vocab_size = vocab_size

    def stage(self, plan: StepPlan, query_start: np.ndarray, buffer: HostBuffer) -> SampleLayout:
        """Main thread. query_start: int32 [n + 1]."""
        rows = np.flatnonzero(plan.samples)
        slots = plan.slots[rows].astype(np.int64)
        features = self._state.features[slots]
        present = int(np.bitwise_or.reduce(features, initial=0))
        wanted = self._state.num_logprobs[slots]
        asked = np.flatnonzero(wanted >= 0)
        slots_field = buffer.add(slots)

        def subset(chosen: np.ndarray) -> Subset:
            if len(chosen) == len(rows):
                return Subset(None, slots_field)
            return Subset(buffer.add(chosen), buffer.add(slots[chosen]))

        return SampleLayout(
            num_sampling=len(rows),
            all_rows=len(rows) == len(plan.slots),
            rows=buffer.add(rows),
            slots=slots_field,
            last_token=buffer.add(query_start[1:][rows].astype(np.int64) - 1),
            max_len=plan.max_seq_len,
            row_index=rows,
            subsets={f: subset(np.flatnonzero(features & f)) for f in _FEATURES if present & f},
            logprobs=subset(asked) if len(asked) else None,
            logprob_rows=rows[asked],
            num_logprobs=int(wanted.max(initial=0)),
        )

    def stage_grammar(self, grammar: GrammarMasks, layout: SampleLayout, buffer: HostBuffer) -> StagedGrammar:
        """Main thread. Rows that do not sample in this step are left out."""
        words = -(-self._vocab_size // 32)
        if grammar.bits.shape != (len(grammar.rows), words):
            raise ValueError(f"grammar masks have shape {grammar.bits.shape}, not {(len(grammar.rows), words)}")
        sampling = np.isin(grammar.rows, layout.row_index)
        rows = np.searchsorted(layout.row_index, grammar.rows[sampling])
        return StagedGrammar(buffer.add(rows.astype(np.int64)), buffer.add(grammar.bits[sampling]))

    def raw_logprobs(self, logits: torch.Tensor, layout: SampleLayout, upload: HostUpload) -> torch.Tensor | None:
        """Launched work, before anything changes the logits. Returns float32 [m, vocab] or None."""
        if layout.logprobs is None:
            return None
        chosen = logits if layout.logprobs.rows is None else logits[upload[layout.logprobs.rows]]
        return chosen.float().log_softmax(1)

    def gather(
        self, raw: torch.Tensor, sampled: torch.Tensor, layout: SampleLayout, upload: HostUpload
    ) -> DeviceLogprobs:
        """Launched work. raw: what raw_logprobs returned. sampled: int32 [s]."""
        assert layout.logprobs is not None
        rows = layout.logprobs.rows
        return gather_logprobs(raw, sampled if rows is None else sampled[upload[rows]], layout.num_logprobs)

    def apply_grammar(self, logits: torch.Tensor, staged: StagedGrammar, late: HostUpload) -> torch.Tensor:
        """Launched work."""
        rows = late[staged.rows]
        return logits.index_copy_(0, rows, processors.apply_token_bits(logits[rows], late[staged.bits]))

    def sample(self, logits: torch.Tensor, layout: SampleLayout, upload: HostUpload) -> torch.Tensor:
        """Launched work. logits: [s, vocab] as the model gives them, may be changed in place. Returns int32 [s]."""
        if layout.subsets:
            logits = logits.float()
        for feature, process in (
            (options.ALLOWED, self._allowed),
            (options.BAD_WORDS, self._bad_words),
            (options.MIN_TOKENS, self._min_tokens),
            (options.LOGIT_BIAS, self._logit_bias),
            (options.PENALTIES, self._penalties),
        ):
            if layout.uses(feature):
                logits = _on_rows(logits, layout.subsets[feature], upload, layout.max_len, process)
        if not layout.uses(options.RANDOM):
            return greedy_sample(logits)
        slots = upload[layout.slots]
        temperature = self._state.floats[slots, options.TEMPERATURE]
        if layout.uses(options.TRUNCATE):
            truncated = layout.subsets[options.TRUNCATE]
            logits = _on_rows(logits, truncated, upload, layout.max_len, self._truncate)
            # Those rows are divided by their temperature already.
            if truncated.rows is None:
                temperature = torch.ones_like(temperature)
            else:
                temperature = temperature.index_fill(0, upload[truncated.rows], 1.0)
        # The sampled token's place in its sequence: the same whenever and beside whomever it is sampled.
        positions = self._batch.num_tokens[slots].long()
        return gumbel_sample(logits, temperature, self._state.seeds[slots], positions)

    def _allowed(self, logits: torch.Tensor, slots: torch.Tensor, max_len: int) -> torch.Tensor:
        return processors.apply_token_bits(logits, self._state.allowed_bits.rows(slots))

    def _bad_words(self, logits: torch.Tensor, slots: torch.Tensor, max_len: int) -> torch.Tensor:
        state, batch = self._state, self._batch
        known = batch.all_token_ids[:, :max_len][slots]
        prefixes, last = state.bad_prefixes.rows(slots), state.bad_last.rows(slots)
        return processors.apply_bad_words(logits, prefixes, last, known, batch.num_tokens[slots])

    def _min_tokens(self, logits: torch.Tensor, slots: torch.Tensor, max_len: int) -> torch.Tensor:
        num_output = self._batch.num_tokens[slots] - self._batch.num_prompt[slots]
        min_tokens = self._state.ints[slots, options.MIN_COUNT]
        return processors.apply_min_tokens(logits, self._state.stop_ids.rows(slots), min_tokens, num_output)

    def _logit_bias(self, logits: torch.Tensor, slots: torch.Tensor, max_len: int) -> torch.Tensor:
        state = self._state
        return processors.apply_logit_bias(logits, state.bias_ids.rows(slots), state.bias_values.rows(slots))

    def _penalties(self, logits: torch.Tensor, slots: torch.Tensor, max_len: int) -> torch.Tensor:
        batch, floats = self._batch, self._state.floats[slots]
        return processors.apply_penalties(
            logits,
            batch.all_token_ids[:, :max_len][slots],
            batch.num_prompt[slots],
            batch.num_tokens[slots],
            repetition=floats[:, options.REPETITION],
            presence=floats[:, options.PRESENCE],
            frequency=floats[:, options.FREQUENCY],
        )

    def _truncate(self, logits: torch.Tensor, slots: torch.Tensor, max_len: int) -> torch.Tensor:
        floats = self._state.floats[slots]
        return mask_top_k_top_p_min_p(
            logits / floats[:, options.TEMPERATURE, None],
            self._state.ints[slots, options.TOP_K].contiguous(),
            floats[:, options.TOP_P].contiguous(),
            floats[:, options.MIN_P].contiguous(),
        )


_FEATURES = (
    options.RANDOM, options.TRUNCATE, options.PENALTIES, options.BAD_WORDS,
    options.MIN_TOKENS, options.LOGIT_BIAS, options.ALLOWED,
)  # fmt: skip


def _on_rows(
    logits: torch.Tensor,
    subset: Subset,
    upload: HostUpload,
    max_len: int,
    process: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    slots = upload[subset.slots]
    if subset.rows is None:
        return process(logits, slots, max_len)
    rows = upload[subset.rows]
    return logits.index_copy_(0, rows, process(logits[rows], slots, max_len))
