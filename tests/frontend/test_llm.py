"""LLM answers in order, refuses before it sends, and stays usable after an interruption."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
import weakref

import numpy as np
import pytest

from fake_engine import FakeLLM
from small_tokenizers import byte_level
from stepahead.errors import ConfigError, EngineDeadError, InvalidRequestError
from stepahead.frontend.llm import LLM
from stepahead.frontend.sampling_params import SamplingParams
from stepahead.frontend.tokenizer import load_tokenizer

TOKENIZER = byte_level()


def echo(request):
    """The prompt over and over."""
    return itertools.cycle(request.prompt.tolist())


@pytest.fixture
def llm():
    with FakeLLM(TOKENIZER, echo) as made:
        yield made


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["sea", [7, 8], {"prompt": "ship"}, {"prompt_token_ids": [9]}]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["sea", None, "ship", None]
    for output in outputs:
        assert output.finished
        assert output.outputs[0].token_ids == list(itertools.islice(itertools.cycle(output.prompt_token_ids), 4))
        assert output.outputs[0].finish_reason == "length"


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate([[5], [6], [7]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 1, 3]


@pytest.mark.parametrize("prompt", ["sea", [5, 6], np.array([5, 6]), {"prompt": "sea"}])
def test_one_prompt_needs_no_list(llm, prompt):
    assert len(llm.generate(prompt, use_tqdm=False)) == 1


@pytest.mark.parametrize("prompts", [None, 5, b"sea"])
def test_what_is_no_list_of_prompts_is_refused(llm, prompts):
    with pytest.raises(InvalidRequestError, match="must be a prompt or a list of prompts"):
        llm.generate(prompts, use_tqdm=False)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_one_bad_prompt_stops_the_batch_before_anything_is_sent(llm):
    with pytest.raises(InvalidRequestError, match="600"):
        llm.generate(["sea", [600]], use_tqdm=False)
    assert llm.client.sent == []
    assert llm.generate("sea", use_tqdm=False)[0].finished


@pytest.mark.parametrize("name", ["sampling_params", "priority"])
def test_a_list_of_the_wrong_length_is_refused(llm, name):
    value = {"sampling_params": [SamplingParams()], "priority": [1]}[name]
    with pytest.raises(InvalidRequestError, match=f"{name} has 1 entries for 2 prompts"):
        llm.generate(["sea", "ship"], use_tqdm=False, **{name: value})


def test_priorities_travel(llm):
    llm.generate(["sea", "ship"], priority=[2, 1], use_tqdm=False)
    assert [request.priority for request in llm.client.added] == [2, 1]


def test_a_stop_string_aborts_the_request_in_the_engine(llm):
    (output,) = llm.generate("sea and ship", SamplingParams(max_tokens=90, stop="ship"), use_tqdm=False)
    assert output.outputs[0].text == "sea and "
    assert llm.client.aborted == [llm.client.added[0].request_id]


def test_n_sequences_are_n_engine_requests(llm):
    (output,) = llm.generate("sea", SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [sequence.index for sequence in output.outputs] == [0, 1, 2]
    assert len(llm.client.added) == 3


def test_an_interruption_aborts_the_requests_and_the_engine_stays_usable(llm):
    def interrupt():
        while len(llm.client.added) < 2:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    forever = SamplingParams(max_tokens=None)
    llm._engine.requests._max_model_len = 10**6
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5], [6]], forever, use_tqdm=False)
    llm.client.wait_idle()
    assert llm.generate([7], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids == [7, 7]


def test_threads_may_share_it(llm):
    results = {}

    def work(token):
        results[token] = llm.generate([token], SamplingParams(max_tokens=5), use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(token,)) for token in range(10, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == {token: [token] * 5 for token in range(10, 16)}


def test_the_death_of_the_engine_is_raised_now_and_ever_after(llm):
    threading.Timer(0.05, llm.client.die).start()
    llm._engine.requests._max_model_len = 10**6
    with pytest.raises(EngineDeadError, match="a worker fell over"):
        llm.generate([5], SamplingParams(max_tokens=None), use_tqdm=False)
    with pytest.raises(EngineDeadError, match="a worker fell over"):
        llm.generate([5], use_tqdm=False)


def test_closing_ends_a_running_generate_and_refuses_later_ones(llm):
    threading.Timer(0.05, llm.close).start()
    llm._engine.requests._max_model_len = 10**6
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([5], SamplingParams(max_tokens=None), use_tqdm=False)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([5], use_tqdm=False)
    llm.close()


def test_a_forgotten_llm_lets_go_of_its_client():
    """EngineClient ends its engine when nothing refers to it any more."""
    llm = FakeLLM(TOKENIZER, echo)
    llm.generate([5], use_tqdm=False)
    client = llm.client
    client.close()
    client._thread.join(5)
    watcher = weakref.ref(client)
    del llm, client
    gc.collect()
    assert watcher() is None


def test_chat_goes_through_the_template(llm, monkeypatch):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    one = [{"role": "user", "content": "sea"}]
    (output,) = llm.chat(one, use_tqdm=False)
    assert output.prompt == "<user>sea>"
    outputs = llm.chat(
        [one, [*one, {"role": "assistant", "content": "ship"}]], use_tqdm=False, add_generation_prompt=False
    )
    assert [output.prompt for output in outputs] == ["<user>sea", "<user>sea<assistant>ship"]


def test_the_text_parts_of_a_chat_message_are_joined(llm, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ messages[0].content }}")
    parts = [{"type": "text", "text": "sea"}, {"type": "text", "text": "ship"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], use_tqdm=False)
    assert output.prompt == "sea\nship"


def test_chat_without_a_template_says_so(llm):
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "sea"}], use_tqdm=False)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"content": "no role"}],
        "hello",
        {"role": "user", "content": "sea"},
        None,
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_bad_messages_are_refused(llm, messages, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "x")
    with pytest.raises(InvalidRequestError, match="message"):
        llm.chat(messages, use_tqdm=False)


def test_a_template_that_refuses_is_an_invalid_request(llm, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        llm.chat([{"role": "user", "content": "sea"}], use_tqdm=False)


def test_the_progress_bar_counts_prompts_and_shows_rates(llm, capsys):
    llm.generate(["sea", "ship"], SamplingParams(max_tokens=2))
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "output:" in shown
    assert "tokens/s" in shown


def test_it_says_how_steps_are_scheduled(llm):
    assert llm.async_scheduling is True
    assert "supports it" in llm.async_reason
    assert llm.engine_info.device == "cpu"
    assert llm.stats().device_busy == 0.5
    assert llm.get_tokenizer() is TOKENIZER


def test_an_unknown_setting_is_refused_with_a_hint(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'max_num_seqs'"):
        LLM(str(tmp_path), max_num_seq=3)


def test_a_model_that_is_no_name_is_refused():
    with pytest.raises(ConfigError, match="model=None: must be a local folder or a hub id"):
        LLM(None)


def test_a_missing_tokenizer_folder_is_called_one(tmp_path):
    with pytest.raises(ConfigError, match=r"^tokenizer folder '/no/such' does not exist"):
        LLM(str(tmp_path), tokenizer="/no/such")


def test_a_text_longer_than_its_tokenizer_says_is_not_warned_of(tmp_path, caplog):
    made = byte_level()
    made.model_max_length = 4
    made.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.model_max_length == 4
    assert len(loaded.encode("a long text, and no warning")) > 4
    assert "indexing errors" not in caplog.text


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(str(tmp_path))


def test_a_missing_tokenizer_is_refused_before_any_process_is_started(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["HashLM"], "vocab_size": 50, "max_position_embeddings": 64, "model_type": "hash_lm"}'
    )
    monkeypatch.setattr("stepahead.frontend.engine_setup.EngineClient", None)
    with pytest.raises(ValueError, match="has no tokenizer"):
        LLM(str(tmp_path))


def test_a_broken_tokenizer_leaves_no_engine_behind(tmp_path, monkeypatch):
    closed = []

    class Client:
        def __init__(self, config, on_message):
            pass

        def close(self):
            closed.append(True)

    (tmp_path / "config.json").write_text(
        '{"architectures": ["HashLM"], "vocab_size": 50, "max_position_embeddings": 64, "model_type": "hash_lm"}'
    )
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr("stepahead.frontend.engine_setup.EngineClient", Client)
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        LLM(str(tmp_path))
    assert closed
