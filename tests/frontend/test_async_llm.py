"""AsyncLLM streams many requests at once, and aborts what nobody reads any more."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from fake_engine import FakeAsyncLLM
from small_tokenizers import byte_level
from stepahead.errors import EngineDeadError, InvalidRequestError, StepaheadError
from stepahead.frontend.sampling_params import RequestOutputKind, SamplingParams

TOKENIZER = byte_level()


def echo(request):
    return itertools.cycle(request.prompt.tolist())


@pytest.fixture
def engine():
    made = FakeAsyncLLM(TOKENIZER, echo)
    made._engine.requests._max_model_len = 10**6
    yield made
    made.close()


async def last(stream):
    outputs = [output async for output in stream]
    return outputs[-1]


async def test_outputs_grow_up_to_the_end(engine):
    lengths = []
    async for output in engine.generate("sea", SamplingParams(max_tokens=20)):
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 20
    assert output.finished


async def test_deltas_add_up(engine):
    text = ""
    async for output in engine.generate("sea", SamplingParams(max_tokens=9, output_kind=RequestOutputKind.DELTA)):
        text += output.outputs[0].text
    assert text == TOKENIZER.decode((TOKENIZER.encode("sea") * 9)[:9])


async def test_final_only_yields_once(engine):
    params = SamplingParams(max_tokens=9, output_kind=RequestOutputKind.FINAL_ONLY)
    outputs = [output async for output in engine.generate("sea", params)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9]


async def test_a_slow_reader_misses_nothing(engine):
    ids = []
    async for output in engine.generate([5, 6, 7], SamplingParams(max_tokens=30, output_kind=RequestOutputKind.DELTA)):
        ids += output.outputs[0].token_ids
        await asyncio.sleep(0.01)
    assert ids == [5, 6, 7] * 10


async def test_64_streams_of_which_a_third_is_cancelled(engine):
    async def read(index):
        output = await last(engine.generate([index], SamplingParams(max_tokens=40)))
        return output.outputs[0].token_ids

    async def leave(index):
        async for output in engine.generate([index], SamplingParams(max_tokens=None)):
            if len(output.outputs[0].token_ids) > 5:
                break

    tasks = [asyncio.create_task(leave(i) if i % 3 == 0 else read(i)) for i in range(10, 74)]
    results = await asyncio.gather(*tasks)
    assert all(result == [i] * 40 for i, result in enumerate(results, start=10) if i % 3)
    await asyncio.sleep(0.05)
    engine.client.wait_idle()
    assert sorted(engine.client.aborted) == sorted(
        request.request_id for request in engine.client.added if request.prompt[0] % 3 == 0
    )


async def test_a_cancelled_task_aborts_its_request(engine):
    started = asyncio.Event()

    async def read():
        async for _ in engine.generate([5], SamplingParams(max_tokens=None)):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.client.wait_idle()
    assert engine.client.aborted == [engine.client.added[0].request_id]
    assert not engine._hub._streams


async def test_a_stop_string_aborts_the_request(engine):
    output = await last(engine.generate("sea and ship", SamplingParams(max_tokens=None, stop="ship")))
    assert output.outputs[0].text == "sea and "
    assert engine.client.aborted == [engine.client.added[0].request_id]


async def test_death_is_raised_in_every_stream_and_for_new_ones(engine):
    streams = [asyncio.create_task(last(engine.generate([i], SamplingParams(max_tokens=None)))) for i in range(10, 15)]
    await asyncio.sleep(0.05)
    threading.Thread(target=engine.client.die).start()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) and "fell over" in str(result) for result in results)
    with pytest.raises(EngineDeadError, match="fell over"):
        await last(engine.generate([5]))


async def test_closing_ends_the_streams(engine):
    stream = asyncio.create_task(last(engine.generate([5], SamplingParams(max_tokens=None))))
    await asyncio.sleep(0.02)
    async with engine:
        pass
    with pytest.raises(EngineDeadError, match="closed"):
        await stream


async def test_a_bad_request_touches_no_other(engine):
    good = asyncio.create_task(last(engine.generate([5], SamplingParams(max_tokens=50))))
    await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequestError, match="empty"):
        await last(engine.generate(""))
    assert (await good).outputs[0].token_ids == [5] * 50


async def test_request_ids_are_the_users_and_unique_while_they_run(engine):
    stream = engine.generate([5], SamplingParams(max_tokens=None), request_id="mine")
    assert (await anext(stream)).request_id == "mine"
    with pytest.raises(InvalidRequestError, match="mine"):
        await last(engine.generate([5], request_id="mine"))
    await stream.aclose()
    assert (await last(engine.generate([5], request_id="mine"))).finished


def test_a_second_event_loop_may_follow_but_not_join(engine):
    def run(**params):
        return asyncio.run(last(engine.generate([5], SamplingParams(**params))))

    async def join():
        with pytest.raises(StepaheadError, match="another event loop"):
            await asyncio.to_thread(run, max_tokens=2)

    async def first():
        stream = engine.generate([5], SamplingParams(max_tokens=None))
        await anext(stream)
        await join()

    asyncio.run(first())
    assert run(max_tokens=3).outputs[0].token_ids == [5] * 3
    engine.client.wait_idle()


async def test_a_batch_crosses_into_the_loop_once(engine, monkeypatch):
    loop = asyncio.get_running_loop()
    crossings = []
    cross = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: crossings.append(args) or cross(*args))
    await asyncio.gather(*(last(engine.generate([i], SamplingParams(max_tokens=50))) for i in range(20)))
    assert len(crossings) < 150
