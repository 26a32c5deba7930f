"""How each slot is sampled: parameters on the device, and on the host which features a slot uses.

The host side is what the plan and the requests' options say, never what was sampled: it decides which rows
each part of the sampler touches, so that a row without a feature costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .host_ring import Field, HostBuffer, HostUpload
from .messages import NewRequest, SamplingOptions

RANDOM, TRUNCATE, PENALTIES, BAD_WORDS, MIN_TOKENS, LOGIT_BIAS, ALLOWED = (1 << i for i in range(7))
"""Features of a slot, bits of `SamplingState.features`. TRUNCATE: top-k, top-p or min-p."""

TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
"""Columns of `SamplingState.floats`."""

TOP_K, MIN_COUNT = range(2)
"""Columns of `SamplingState.ints`."""

_GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: dividing by them overflows, and the most likely token wins anyway."""


@dataclass(frozen=True)
class StagedRows:
    """slots: int64 [m]. values: [m, *shape]."""

    slots: Field
    values: Field
    shape: tuple[int, ...]


class PaddedTable:
    """A row for each slot that has a list, all filled up to the longest with `pad`.

    The first list that is longer makes the table wider, on the device and in the order of the plans.
    """

    def __init__(self, device: torch.device, num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, pad: int):
        self._host_dtype = np.float32 if dtype == torch.float32 else np.int32
        self._host_shape = shape
        self._pad = pad
        self._tensor = torch.empty((num_slots, *(0 for _ in shape)), dtype=dtype, device=device)

    def stage(self, slots: Sequence[int], rows: Sequence[np.ndarray], buffer: HostBuffer) -> StagedRows:
        """rows: arrays of as many dimensions as the table's rows."""
        for row in rows:
            wider = (max(h, 1 << (n - 1).bit_length()) for h, n in zip(self._host_shape, row.shape, strict=True))
            self._host_shape = tuple(wider)
        values = np.full((len(rows), *self._host_shape), self._pad, self._host_dtype)
        for filled, row in zip(values, rows, strict=True):
            filled[tuple(slice(n) for n in row.shape)] = row
        return StagedRows(buffer.add(np.array(slots, np.int64)), buffer.add(values), self._host_shape)

    def write(self, staged: StagedRows, upload: HostUpload) -> None:
        """Launched work."""
        old = self._tensor
        if old.shape[1:] != staged.shape:
            self._tensor = old.new_full((old.shape[0], *staged.shape), self._pad)
            self._tensor[(slice(None), *(slice(n) for n in old.shape[1:]))] = old
        self._tensor.index_copy_(0, upload[staged.slots], upload[staged.values])

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Launched work. slots: int64 [m]. Returns [m, *shape]."""
        return self._tensor[slots]


@dataclass(frozen=True)
class StagedOptions:
    slots: Field
    floats: Field
    ints: Field
    seeds: Field
    tables: list[tuple[PaddedTable, StagedRows]]


class SamplingState:
    """Device side, by slot: floats float32 [slots, 6], ints int32 [slots, 2], seeds int64 [slots], and tables
    of the lists some requests bring. Host side: features uint8 [slots], and num_logprobs, num_prompt_logprobs
    int32 [slots], -1 for none."""

    def __init__(self, device: torch.device, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.features = np.zeros(num_slots, np.uint8)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.num_prompt_logprobs = np.full(num_slots, -1, np.int32)
        self.floats = torch.zeros((num_slots, 6), device=device)
        self.ints = torch.zeros((num_slots, 2), dtype=torch.int32, device=device)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)

        def table(shape: tuple[int, ...], dtype: torch.dtype = torch.int32, pad: int = -1) -> PaddedTable:
            return PaddedTable(device, num_slots, shape, dtype, pad)

        self.stop_ids = table((1,))
        self.bias_ids = table((1,), pad=0)
        self.bias_values = table((1,), torch.float32, pad=0)
        self.bad_prefixes = table((1, 1))
        self.bad_last = table((1,))
        self.allowed_bits = table((-(-vocab_size // 32),), pad=0)

    def stage(self, requests: Sequence[NewRequest], buffer: HostBuffer) -> StagedOptions:
        """Main thread: records which features the slots use from this step on, and packs the parameters."""
        slots = np.array([r.slot for r in requests], np.int64)
        options = [r.options for r in requests]
        temperature = [0.0 if o.temperature < _GREEDY_BELOW else o.temperature for o in options]
        floats = [
            (t, o.top_p, o.min_p, o.repetition_penalty, o.presence_penalty, o.frequency_penalty)
            for t, o in zip(temperature, options, strict=True)
        ]
        top_k = [o.top_k if 0 < o.top_k < self._vocab_size else 0 for o in options]
        self.features[slots] = [features_of(o) for o in options]
        self.num_logprobs[slots] = [self._top_count(o.logprobs) for o in options]
        self.num_prompt_logprobs[slots] = [self._top_count(o.prompt_logprobs) for o in options]
        return StagedOptions(
            slots=buffer.add(slots),
            floats=buffer.add(np.array(floats, np.float32)),
            ints=buffer.add(np.array([top_k, [o.min_tokens for o in options]], np.int32).T),
            seeds=buffer.add(np.array([_as_int64(o.seed) for o in options], np.int64)),
            tables=self._stage_tables(requests, buffer),
        )

    def admit(self, staged: StagedOptions, upload: HostUpload) -> None:
        """Launched work."""
        slots = upload[staged.slots]
        self.floats.index_copy_(0, slots, upload[staged.floats])
        self.ints.index_copy_(0, slots, upload[staged.ints])
        self.seeds.index_copy_(0, slots, upload[staged.seeds])
        for table, rows in staged.tables:
            table.write(rows, upload)

    def _stage_tables(self, requests: Sequence[NewRequest], buffer: HostBuffer) -> list[tuple[PaddedTable, StagedRows]]:
        packers = (
            (MIN_TOKENS, self.stop_ids, lambda o: self._existing(o.stop_token_ids)),
            (LOGIT_BIAS, self.bias_ids, lambda o: self._existing(o.logit_bias)),
            (LOGIT_BIAS, self.bias_values, self._bias_values),
            (BAD_WORDS, self.bad_prefixes, self._bad_prefixes),
            (BAD_WORDS, self.bad_last, self._bad_last),
            (ALLOWED, self.allowed_bits, self._allowed_bits),
        )
        staged = []
        for feature, table, pack in packers:
            chosen = [r for r in requests if self.features[r.slot] & feature]
            if chosen:
                rows = [pack(r.options) for r in chosen]
                staged.append((table, table.stage([r.slot for r in chosen], rows, buffer)))
        return staged

    def _top_count(self, asked: int | None) -> int:
        return -1 if asked is None else min(asked, self._vocab_size)

    def _existing(self, ids: Sequence[int] | dict[int, float]) -> np.ndarray:
        """Ids outside the vocabulary can never be sampled: leaving them out changes nothing."""
        return np.array([i for i in ids if 0 <= i < self._vocab_size], np.int32)

    def _bias_values(self, options: SamplingOptions) -> np.ndarray:
        return np.array([options.logit_bias[int(i)] for i in self._existing(options.logit_bias)], np.float32)

    def _bad_words(self, options: SamplingOptions) -> list[list[int]]:
        return [word for word in options.bad_words if word and all(0 <= i < self._vocab_size for i in word)]

    def _bad_prefixes(self, options: SamplingOptions) -> np.ndarray:
        """int32 [words, longest - 1]: each word without its last token, latest token first, then -1."""
        words = self._bad_words(options)
        prefixes = np.full((len(words), max((len(w) - 1 for w in words), default=0)), -1, np.int32)
        for row, word in zip(prefixes, words, strict=True):
            row[: len(word) - 1] = word[-2::-1] if len(word) > 1 else []
        return prefixes

    def _bad_last(self, options: SamplingOptions) -> np.ndarray:
        return np.array([word[-1] for word in self._bad_words(options)], np.int32)

    def _allowed_bits(self, options: SamplingOptions) -> np.ndarray:
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, bool)
        allowed[self._existing(options.allowed_token_ids or [])] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)


def features_of(options: SamplingOptions) -> int:
    random = options.temperature >= _GREEDY_BELOW
    truncated = options.top_k > 0 or options.top_p < 1 or options.min_p > 0
    penalized = options.repetition_penalty != 1 or options.presence_penalty != 0 or options.frequency_penalty != 0
    return (
        RANDOM * random
        | TRUNCATE * (random and truncated)
        | PENALTIES * penalized
        | BAD_WORDS * bool(options.bad_words)
        | MIN_TOKENS * bool(options.min_tokens > 0 and options.stop_token_ids)
        | LOGIT_BIAS * bool(options.logit_bias)
        | ALLOWED * (options.allowed_token_ids is not None)
    )


def _as_int64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
