"""The structs that cross executor and worker. Importing this loads no torch.

Arrays are numpy, little-endian; `codec.py` says how they travel. n is the number of rows in a step.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""What fits into the arrays that hold it: a message with another value is refused where it arrives."""


class SamplingOptions(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How one request is sampled, resolved to token ids: what the device reads.

    (`SamplingParams` in the front end is what the user says.)
    seed: always set, so that a request's tokens depend on (logits, seed, position) alone.
    top_k: 0 keeps all. stop_token_ids: every id that ends the request, EOS included unless ignored;
    masked until min_tokens were sampled. logprobs: how many top entries to return besides the
    sampled token, None for none; prompt_logprobs likewise for each prompt token.
    """

    seed: Int64
    temperature: float = 1.0
    top_k: Count = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: Count = 0
    stop_token_ids: list[TokenId] = []
    logit_bias: dict[TokenId, float] = {}
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[list[TokenId]] = []
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request entering slot `slot` (first admission, or again after a preemption).

    token_ids: int32 [prefill_len], prompt plus the tokens already sampled before a preemption.
    num_prompt: how many of token_ids are the user's prompt (penalties tell them apart).
    num_computed: leading tokens whose KV is already in `blocks` (prefix cache).
    blocks: int32 [num_blocks], every block the request holds so far, in order.
    """

    slot: int
    token_ids: np.ndarray
    num_prompt: int
    num_computed: int
    blocks: np.ndarray
    options: SamplingOptions


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step for every worker. Applied in the order of step_id, staged writes included.

    new_requests: written into their slots before anything else of this step.
    append_slots, append_blocks: int32 [m], block append_blocks[j] joins the table of append_slots[j].
    append_index: int32 [m], its place in that table.
    slots: int32 [n], the rows of this step.
    num_query: int32 [n], tokens each row computes, drafts included.
    samples: bool [n], whether the row samples: False for a chunk that does not finish its prefill.
    num_drafts: int32 [n], draft tokens among num_query; empty when nobody drafts.
    max_seq_len: upper bound of the context length over the rows, for launch grids.
    """

    step_id: int
    new_requests: list[NewRequest]
    append_slots: np.ndarray
    append_blocks: np.ndarray
    append_index: np.ndarray
    slots: np.ndarray
    num_query: np.ndarray
    samples: np.ndarray
    num_drafts: np.ndarray
    max_seq_len: int


class GrammarMasks(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens each structured row may sample.

    rows: int32 [m], indices into StepPlan.slots. bits: uint32 [m, ceil(vocab / 32)], bit t%32 of
    word t//32 set when token t is allowed.
    """

    rows: np.ndarray
    bits: np.ndarray


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """token_ids: int32 [n, 1 + k], the chosen token first, then the k most likely.
    logprobs: float32 [n, 1 + k], log-softmax of the raw logits. ranks: int32 [n], of the chosen
    token, 1 for the most likely."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens first .. first + n - 1 of row `row` (position 0 has none)."""

    row: int
    first: int
    values: Logprobs


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled; row i answers StepPlan.slots[i].

    sampled: int32 [n, k]; only the first num_sampled[i] entries of row i mean anything.
    num_sampled: int32 [n], 0 for rows that do not sample.
    device_start_ns, device_end_ns: CLOCK_MONOTONIC, when the device began and ended the step.
    device_idle_ns: how long of that it stood still, between forward and a sampling that was launched late.
    """

    step_id: int
    sampled: np.ndarray
    num_sampled: np.ndarray
    logprobs: Logprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    device_start_ns: int = 0
    device_end_ns: int = 0
    device_idle_ns: int = 0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says once its model is loaded.

    device: e.g. "cpu" or "cuda (NVIDIA H200)". kv_blocks: how many KV blocks it has memory for.
    """

    rank: int
    device: str
    kv_blocks: int
    pid: int


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of one model find each other, and how a rank shares its machine.

    address: torch.distributed's init_method, e.g. "file:///dir/ranks" on one machine, "tcp://host:port" on many.
    local_rank: which of this machine's GPUs. local_size: how many of the ranks are on this machine.
    listener: of the rank that serves a tcp:// rendezvous, the descriptor of the socket that listens there already.
    """

    address: str
    local_rank: int
    local_size: int
    listener: int | None = None


class ExecuteModel(msgspec.Struct, frozen=True, tag=1, array_like=True):
    plan: StepPlan


class SampleTokens(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """Sample the step that the last ExecuteModel launched."""

    step_id: int
    grammar: GrammarMasks | None = None


class Call(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Run method `method` of the Worker with plain arguments, or a cloudpickled callable(worker, ...).

    The reply is a CallReply from every rank."""

    call_id: int
    method: str
    args: list[Any] = []
    function: bytes | None = None


class Shutdown(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """is_failure: the engine ends because something has failed, here or elsewhere."""

    is_failure: bool = False


WorkerRpc = ExecuteModel | SampleTokens | Call | Shutdown


class Ready(msgspec.Struct, frozen=True, tag=1, array_like=True):
    info: WorkerInfo


class StepReply(msgspec.Struct, frozen=True, tag=2, array_like=True):
    output: StepOutput


class CallReply(msgspec.Struct, frozen=True, tag=3, array_like=True):
    call_id: int
    rank: int
    value: Any = None


class Failure(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """A rank raised. user_error: the message alone is enough for a user (a ConfigError). lost_peer: it could not
    reach another rank, whose own account says more."""

    rank: int
    message: str
    traceback: str
    call_id: int | None = None
    user_error: bool = False
    lost_peer: bool = False


WorkerReply = Ready | StepReply | CallReply | Failure
