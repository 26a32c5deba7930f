"""An engine whose workers are torchrun's own ranks: these very processes."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from oracle import token_ids
from stepahead import LLM, SamplingParams
from stepahead.worker.handshake import Listener, Place
from stepahead.worker.process import run_worker
from tiny_models import make_tiny_model

if TYPE_CHECKING:
    from conftest import Ranks

pytestmark = pytest.mark.timeout(100)

PROMPTS = [[5], [7, 8, 9], list(range(10, 40))]


def tokens(folder: str, **settings: Any) -> list[list[int]]:
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=12, ignore_eos=True) for n in range(len(PROMPTS))]
    with LLM(folder, device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=16, **settings) as llm:
        return [token_ids(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(("divided", "async_scheduling"), [("tensor", True), ("pipeline", False)])
def test_torchruns_ranks_as_workers_give_the_tokens_of_one_process(
    ranks: Ranks, divided: str, async_scheduling: bool
) -> None:
    folder = ranks.folder / divided
    address = f"ipc://{folder}.plans"
    if ranks.rank == 0:
        heads = {"num_attention_heads": 2 * ranks.size, "num_key_value_heads": ranks.size, "head_dim": 8}
        make_tiny_model("LlamaForCausalLM", folder, num_hidden_layers=ranks.size + 1, **heads)
    ranks.meet()
    place = Place(ranks.rank, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    codes: list[int] = []

    def work() -> None:
        codes.append(run_worker(address, place, None, Listener(address) if ranks.rank == 0 else None))

    if ranks.rank:
        work()
    else:
        worker = threading.Thread(target=work)
        worker.start()
        links = {"executor": "external", "executor_address": address, f"{divided}_parallel_size": ranks.size}
        seen = tokens(str(folder), async_scheduling=async_scheduling, **links)
        worker.join()
        assert seen == tokens(str(folder), executor="uni", async_scheduling=False)
    assert codes == [0]
    ranks.meet()
