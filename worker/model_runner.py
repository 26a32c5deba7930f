"""Turns a step's plan into device work: prepares on the host, launches, and never waits.

Methods are of two kinds. The main thread's read plans and host arrays. Launched work (on CPU it runs in the
device thread) reads and writes device tensors, and what the main thread laid out before it launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..config import ResolvedConfig
from ..errors import StepaheadError
from ..kernels.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens
from ..kernels.post_update import post_update
from ..kernels.prepare_inputs import prepare_inputs
from .async_output import AsyncOutput, DeviceWork, LogprobFields, OutputLayout
from .attention import AttentionMetadata
from .batch_state import Admissions, Appends, BatchState
from .device import Device, TimedWork
from .host_ring import Field, HostBuffer, HostRing, HostUpload, RingEntry
from .logprobs import DeviceLogprobs, prompt_logprobs
from .messages import GrammarMasks, NewRequest, StepPlan
from .models.base import Model
from .parallel import ONLY_STAGE, PipelineStage
from .pipeline import Pipeline, SampledElsewhere, StagedTokens
from .prompt_layout import PromptLayout, PromptTracker
from .sampler import SampleLayout, Sampler, StagedGrammar
from .sampling_state import SamplingState, StagedOptions
from .trace import DEVICE, Lane


@dataclass(frozen=True)
class StagedRequests:
    batch: Admissions
    options: StagedOptions
    upload: HostUpload


@dataclass(frozen=True)
class StepLayout:
    """What the main thread laid out for a step of n rows and t tokens.

    slots: int32 [n]. query_start: int32 [n + 1]. num_sampled: int32 [n]. row_slots: int64 [n].
    upload: where the fields are.
    """

    num_tokens: int
    max_query_len: int
    max_seq_len: int
    slots: Field
    row_slots: Field
    query_start: Field
    num_sampled: Field
    appends: Appends | None
    sampling: SampleLayout
    prompt: PromptLayout | None
    requests: StagedRequests | None
    tokens: list[StagedTokens]
    upload: HostUpload


@dataclass
class DeviceStep:
    """What a step's launched work passes on to its later launched work; nobody else looks inside.

    received: the hidden states that the stage before has sent."""

    received: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    prompt: DeviceLogprobs | None = None


@dataclass(frozen=True)
class StartedStep:
    """A step between execute and sample."""

    plan: StepPlan
    layout: StepLayout
    entry: RingEntry
    forward: TimedWork
    device_step: DeviceStep


class ModelRunner:
    """Calls come from one thread, alternating: execute, sample, execute, ... lane: the trace's, for the device.

    stage: of a pipeline. On all stages but the last `sample` samples nothing: its output says only that the
    stage is through with the step.
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: ResolvedConfig,
        device: Device,
        model: Model,
        num_blocks: int,
        max_model_len: int,
        lane: Lane | None = None,
        stage: PipelineStage = ONLY_STAGE,
    ) -> None:
        settings = config.settings
        vocab_size = config.model.vocab_size
        self._device = device
        self._lane = lane or Lane(DEVICE)
        self._model = model
        self._vocab_size = vocab_size
        self._block_size = settings.block_size
        self._kv_cache = model.allocate_kv_cache(num_blocks, settings.block_size)
        self._batch = BatchState(device.torch_device, settings.max_num_seqs, max_model_len, settings.block_size)
        self._options = SamplingState(device.torch_device, settings.max_num_seqs, vocab_size)
        self._sampler = Sampler(self._batch, self._options, vocab_size)
        self._prompts = PromptTracker(settings.max_num_seqs)
        self._pipeline: Pipeline | None = None
        if stage.size > 1:
            self._pipeline = Pipeline(stage, model.hidden, device.torch_device, settings.max_num_seqs)
        self._samples = stage.last
        self._ring = HostRing(
            device,
            depth=config.max_in_flight + 1,
            input_bytes=_input_bytes(settings.max_num_seqs, settings.max_num_batched_tokens, settings.block_size),
            output_bytes=_output_bytes(settings.max_num_seqs, min(settings.max_logprobs, vocab_size)),
            patience=settings.step_timeout if settings.world_size > 1 else 0.0,
        )
        self._started: StartedStep | None = None

    def execute(self, plan: StepPlan) -> None:
        """Launches everything up to the logits. Raises: StepaheadError when called out of order."""
        if self._started is not None:
            raise StepaheadError(f"step {plan.step_id} was started before step {self._started.plan.step_id} sampled")
        if plan.num_drafts.any():
            raise StepaheadError(f"step {plan.step_id} has draft tokens: this version verifies none")
        entry = self._ring.acquire(plan.step_id)
        layout = self._lay_out(plan, entry)
        device_step = DeviceStep()
        if self._pipeline is not None:  # apart from the forward, whose time is the device's work
            self._device.launch(partial(self._receive, layout, device_step))
        forward = self._device.launch_timed(partial(self._forward, layout, device_step))
        self._started = StartedStep(plan, layout, entry, forward, device_step)

    def sample(self, step_id: int, grammar: GrammarMasks | None) -> AsyncOutput:
        """Launches sampling of the step that execute started, and the copy to the host."""
        started, self._started = self._started, None
        if started is None or started.plan.step_id != step_id:
            raise StepaheadError(f"step {step_id} was to be sampled, but it is not the step that was started last")
        layout, entry, device_step = started.layout, started.entry, started.device_step
        staged_grammar = None
        if grammar is not None:
            staged_grammar = self._sampler.stage_grammar(grammar, layout.sampling, entry.late)
        results: list[torch.Tensor] = []
        if self._samples:
            output, fields = _lay_out_output(started)
            work = partial(self._sample, layout, device_step, staged_grammar, entry.late.uploader(), results)
        else:
            assert self._pipeline is not None
            output, fields = OutputLayout(step_id, np.zeros(len(started.plan.slots), np.int32)), []
            work = partial(self._pass_on, layout, self._pipeline.await_tokens(started.plan))
        sample = self._device.launch_timed(work)
        copied = self._device.copy_to_host(lambda: results, [entry.outputs.tensor(f) for f in fields])
        device_work = DeviceWork(started.forward, sample, layout.num_tokens, self._lane)
        return AsyncOutput(entry, output, device_work, copied)

    def _lay_out(self, plan: StepPlan, entry: RingEntry) -> StepLayout:
        """Main thread. New requests first: what they ask is part of this step."""
        buffer = entry.inputs
        requests = self._stage_requests(plan.new_requests, entry.requests) if plan.new_requests else None
        query_start = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(plan.num_query, out=query_start[1:])
        return StepLayout(
            num_tokens=int(query_start[-1]),
            max_query_len=int(plan.num_query.max()),
            max_seq_len=plan.max_seq_len,
            slots=buffer.add(plan.slots),
            row_slots=buffer.add(plan.slots.astype(np.int64)),
            query_start=buffer.add(query_start),
            num_sampled=buffer.add(plan.samples.astype(np.int32)),
            appends=self._batch.stage_appends(plan, buffer) if len(plan.append_slots) else None,
            sampling=self._sampler.stage(plan, query_start, buffer),
            prompt=self._prompts.stage(plan, query_start, self._options.num_prompt_logprobs[plan.slots], buffer),
            requests=requests,
            tokens=self._pipeline.stage_tokens(plan, buffer) if self._pipeline is not None else [],
            upload=buffer.uploader(),
        )

    def _stage_requests(self, requests: Sequence[NewRequest], buffer: HostBuffer) -> StagedRequests:
        """Into a buffer of their own: they are as long as their prompts."""
        self._prompts.admit(requests)
        batch = self._batch.stage_admissions(requests, buffer)
        options = self._options.stage(requests, buffer)
        return StagedRequests(batch, options, buffer.uploader())

    def _receive(self, layout: StepLayout, step: DeviceStep) -> None:
        """Launched work of a pipeline's stage: what other stages have sent for this step."""
        assert self._pipeline is not None
        for staged in layout.tokens:
            self._pipeline.take(staged, self._batch, layout.upload)
        step.received = self._pipeline.receive_hidden(layout.num_tokens)

    def _forward(self, layout: StepLayout, step: DeviceStep) -> None:
        """Launched work: staged writes, then the model, then the logits of the rows that sample."""
        batch, upload = self._batch, layout.upload
        if layout.requests is not None:
            batch.admit(layout.requests.batch, layout.requests.upload)
            self._options.admit(layout.requests.options, layout.requests.upload)
        if layout.appends is not None:
            batch.append_blocks(layout.appends, upload)
        hidden = self._run_model(layout, step.received)
        step.received = None
        if not self._samples:
            assert self._pipeline is not None
            self._pipeline.send_hidden(hidden)
            return
        if layout.prompt is not None:
            index, slots, positions = (
                upload[f] for f in (layout.prompt.index, layout.prompt.slots, layout.prompt.positions)
            )
            targets = batch.all_token_ids[slots, positions]
            step.prompt = prompt_logprobs(
                self._model.compute_logits, hidden, index, targets, layout.prompt.k, self._vocab_size
            )
        if layout.sampling.num_sampling == layout.num_tokens:
            step.logits = self._model.compute_logits(hidden)
        elif layout.sampling.num_sampling:
            step.logits = self._model.compute_logits(hidden[upload[layout.sampling.last_token]])

    def _run_model(self, layout: StepLayout, received: torch.Tensor | None) -> torch.Tensor:
        """Launched work. received: hidden states, None where token ids go in. Returns hidden states [t, hidden]."""
        batch, upload = self._batch, layout.upload
        slots, query_start = upload[layout.slots], upload[layout.query_start]
        positions, seq_lens, slot_mapping = prepare_inputs(
            slots, query_start, batch.num_computed, batch.block_table,
            self._block_size, layout.num_tokens, layout.max_query_len,
        )  # fmt: skip
        inputs = received
        if inputs is None:
            inputs = combine_sampled_and_draft_tokens(
                slots, query_start, positions, batch.all_token_ids, batch.prefill_len, batch.num_tokens,
                batch.last_sampled, batch.draft_tokens, layout.max_query_len,
            )  # fmt: skip
        max_blocks = -(-layout.max_seq_len // self._block_size)
        attention = AttentionMetadata(
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=batch.block_table[:, :max_blocks][upload[layout.row_slots]],
            slot_mapping=slot_mapping,
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
        )
        return self._model.forward(inputs, positions, self._kv_cache, attention)

    def _sample(
        self,
        layout: StepLayout,
        step: DeviceStep,
        grammar: StagedGrammar | None,
        late: HostUpload,
        results: list[torch.Tensor],
    ) -> None:
        """Launched work: sampling, then the batch learns what was sampled. Fills `results` for the copy."""
        batch, upload, sampling = self._batch, layout.upload, layout.sampling
        num_rows = layout.slots.shape[0]
        sampled = torch.zeros((num_rows, 1), dtype=torch.int32, device=self._device.torch_device)
        if step.logits is not None:
            raw = self._sampler.raw_logprobs(step.logits, sampling, upload)
            logits, step.logits = step.logits, None
            if grammar is not None:
                logits = self._sampler.apply_grammar(logits, grammar, late)
            chosen = self._sampler.sample(logits, sampling, upload)
            if sampling.all_rows:
                sampled = chosen.unsqueeze(1)
            else:
                sampled.index_copy_(0, upload[sampling.rows], chosen.unsqueeze(1))
            results.append(sampled)
            if self._pipeline is not None:
                self._pipeline.send_tokens(sampled)
            if raw is not None:
                results.extend(_tensors(self._sampler.gather(raw, chosen, sampling, upload)))
        if step.prompt is not None:
            results.extend(_tensors(step.prompt))
        post_update(
            upload[layout.slots], upload[layout.query_start], sampled, upload[layout.num_sampled], None,
            batch.num_computed, batch.num_tokens, batch.all_token_ids, batch.last_sampled,
        )  # fmt: skip

    def _pass_on(self, layout: StepLayout, awaited: SampledElsewhere | None) -> None:
        """Launched work of a stage that does not sample: its KV is computed, tokens come later."""
        assert self._pipeline is not None
        upload, num_rows = layout.upload, layout.slots.shape[0]
        nothing = torch.zeros((num_rows, 1), dtype=torch.int32, device=self._device.torch_device)
        batch = self._batch
        post_update(
            upload[layout.slots], upload[layout.query_start], nothing, nothing[:, 0], None,
            batch.num_computed, batch.num_tokens, batch.all_token_ids, batch.last_sampled,
        )  # fmt: skip
        if awaited is not None:
            self._pipeline.receive_tokens(awaited)


def _lay_out_output(started: StartedStep) -> tuple[OutputLayout, list[Field]]:
    """The output and its host fields, in the order in which `_sample` fills its results."""
    sampling, prompt, buffer = started.layout.sampling, started.layout.prompt, started.entry.outputs
    fields: list[Field] = []
    sampled = logprobs = prompt_fields = None
    if sampling.num_sampling:
        sampled = buffer.reserve((len(started.plan.slots), 1), np.int32)
        fields.append(sampled)
    if sampling.logprobs is not None:
        logprobs = LogprobFields.reserve(len(sampling.logprob_rows), sampling.num_logprobs, buffer)
        fields += [logprobs.token_ids, logprobs.logprobs, logprobs.ranks]
    if prompt is not None:
        prompt_fields = LogprobFields.reserve(prompt.num_scored, prompt.k, buffer)
        fields += [prompt_fields.token_ids, prompt_fields.logprobs, prompt_fields.ranks]
    output = OutputLayout(
        step_id=started.plan.step_id,
        num_sampled=started.plan.samples.astype(np.int32),
        sampled=sampled,
        logprobs=logprobs,
        logprob_rows=sampling.logprob_rows,
        prompt=prompt_fields,
        prompt_parts=[] if prompt is None else prompt.parts,
    )
    return output, fields


def _tensors(logprobs: DeviceLogprobs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return logprobs.token_ids, logprobs.logprobs, logprobs.ranks


def _input_bytes(max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> int:
    """Enough for every index array of a full step in which each row uses each feature of the sampler."""
    appends = max_num_seqs + max_num_batched_tokens // block_size + 1
    return 256 * max_num_seqs + 20 * appends + 24 * max_num_batched_tokens + 4096


def _output_bytes(max_num_seqs: int, max_logprobs: int) -> int:
    return max_num_seqs * (4 + 4 + 8 * (1 + max_logprobs)) + 1024
