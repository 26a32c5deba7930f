"""What `stepahead generate` prints, and how it ends. The engine is a fake one here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

import stepahead
from fake_engine import FakeAsyncLLM
from small_tokenizers import byte_level
from stepahead.config import EngineConfig
from stepahead.frontend import cli

TOKENIZER = byte_level()


@pytest.fixture
def engines(monkeypatch):
    """Those that main() has made, with their settings."""
    made = []

    def make(model, **settings):
        engine = FakeAsyncLLM(TOKENIZER, lambda request: itertools.cycle(request.prompt.tolist()))
        made.append((model, settings, engine))
        return engine

    monkeypatch.setattr("stepahead.frontend.async_llm.AsyncLLM", make)
    monkeypatch.setattr(cli.signal, "signal", lambda *args: None)
    return made


def run(*arguments):
    return cli.main(["generate", "--model", "M", *arguments])


def test_one_prompt_is_streamed_and_the_mode_and_speed_told_on_stderr(engines, capsys):
    assert run("--prompt", "sea", "--max-tokens", "6") == 0
    out, err = capsys.readouterr()
    ids = TOKENIZER.encode("sea")
    assert out == TOKENIZER.decode(list(itertools.islice(itertools.cycle(ids), 6))) + "\n"
    first, last = err.splitlines()
    assert first == "async scheduling: on (default; executor 'fake' supports it)"
    assert last.startswith("TTFT ")
    assert "tokens/s" in last
    assert "busy 50% of the time" in last


def test_several_prompts_are_answered_in_order(engines, capsys):
    assert run("--prompt", "sea", "--prompt", "ship", "--max-tokens", "1") == 0
    out = capsys.readouterr().out
    assert out.index("> sea") < out.index("> ship")


def test_json_has_an_object_a_prompt_and_one_about_the_run(engines, capsys):
    assert run("--prompt", "sea", "--prompt", "ship", "--max-tokens", "2", "--json") == 0
    first, second, final = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("sea", "ship")
    assert set(first) == {"prompt", "text", "token_ids", "finish_reason"}
    assert len(first["token_ids"]) == 2
    assert first["finish_reason"] == "length"
    assert final["async_scheduling"] is True
    assert "supports it" in final["async_reason"]
    timings = final["timings"]
    assert timings["output_tokens"] == 4
    assert timings["device_busy"] == 0.5
    assert 0 < timings["ttft_s"] <= timings["total_s"]
    assert timings["tokens_per_s"] > 0


def test_chat_sends_the_template_and_reports_the_question(engines, capsys, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ messages[0].content }} ship")
    assert run("--prompt", "sea", "--chat", "--json", "--max-tokens", "1") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["prompt"] == "sea"
    (request,) = engines[0][2].client.added
    assert request.prompt.tolist() == TOKENIZER.encode("sea ship")


def test_sampling_options_reach_the_request(engines):
    numbers = ["--temperature=0.5", "--top-p=0.9", "--top-k=7", "--seed=5", "--min-tokens=1"]
    options = [*numbers, "--ignore-eos", "--stop=x"]
    assert run("--prompt", "sea", "--max-tokens", "2", *options) == 0
    (request,) = engines[0][2].client.added
    asked = request.options
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed) == (0.5, 0.9, 7, 5)
    assert (asked.stop_token_ids, asked.min_tokens, request.max_tokens) == ([], 1, 2)


def test_every_setting_of_the_engine_is_an_option_and_only_given_ones_are_passed(engines, capsys):
    words = ["--dtype=float32", "--executor=uni", "--no-async-scheduling"]
    options = [*words, "--max-num-seqs=4", "--gpu-memory-utilization=0.5"]
    assert run("--prompt", "sea", *options) == 0
    model, settings, _ = engines[0]
    assert model == "M"
    assert settings == {
        "max_num_seqs": 4,
        "dtype": "float32",
        "async_scheduling": False,
        "gpu_memory_utilization": 0.5,
        "executor": "uni",
    }
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = capsys.readouterr().out
    for name in EngineConfig.__struct_fields__:
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens=0"),
        (["--prompt", "a", "--top-p", "0"], "top_p=0"),
        (["--prompt", "a" * 500], "max_model_len=100"),
        (["--prompt", "a", "--chat"], "chat template"),
    ],
)
def test_an_error_is_one_line_and_status_2(engines, capsys, arguments, words):
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("async scheduling")]
    assert len(lines) == 1
    assert lines[0].startswith("stepahead: error: ")
    assert words in lines[0]
    assert all(engine.client.closed for _, _, engine in engines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to answer"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "sea", "--prompt", ""], "--prompt is empty"),
        (["--prompt", "\udcff"], "surrogate"),
        (["--prompt", "sea", "--top-p", "0"], "top_p=0"),
        (["--prompt", "sea", "--skip-tokenizer-init"], "--prompt-token-ids"),
        (["--prompt-token-ids", "1,x"], "'1,x': must be token ids"),
        (["--prompt-token-ids", "[1, 2.5]"], "must be token ids"),
        (["--prompt-token-ids", "-1"], "must be token ids"),
        (["--prompt-token-ids", ""], "is empty"),
        (["--prompt-token-ids", "1", "--chat"], "--chat"),
        (["--prompt", "sea", "--priority", "1"], "--scheduling-policy priority"),
        (
            ["--prompt=a", "--prompt=b", "--prompt=c", "--priority=1", "--priority=2", "--scheduling-policy=priority"],
            "2 times for 3 prompts",
        ),
    ],
)
def test_what_can_be_refused_at_once_starts_no_engine(engines, capsys, arguments, words):
    assert run(*arguments) == 2
    assert engines == []
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(("given", "expected"), [([3], [3, 3]), ([2, 1], [2, 1])])
def test_priorities_are_one_for_all_or_one_a_prompt(engines, given, expected):
    options = [f"--priority={number}" for number in given]
    assert run("--prompt=sea", "--prompt=ship", "--scheduling-policy=priority", *options) == 0
    assert [request.priority for request in engines[0][2].client.added] == expected


def test_prompts_may_be_token_ids(engines, capsys):
    assert run("--prompt-token-ids=5,6", "--prompt-token-ids=[7]", "--max-tokens=2", "--json") == 0
    first, second, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["prompt"], first["token_ids"]) == ([5, 6], [5, 6])
    assert (second["prompt"], second["token_ids"]) == ([7], [7, 7])


def test_without_a_tokenizer_token_ids_come_out(engines, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TOKENIZER", None)
    assert run("--prompt-token-ids=5,6", "--max-tokens=3", "--skip-tokenizer-init") == 0
    assert capsys.readouterr().out == "5 6 5 \n"


def test_an_executor_of_the_users_is_an_option_too(engines):
    assert run("--prompt=sea", "--executor=package.module:Class") == 0
    assert engines[0][1] == {"executor": "package.module:Class"}


def test_one_refused_prompt_ends_the_others_and_closes_the_engine(engines, capsys):
    assert run("--prompt", "sea", "--prompt", "a" * 500, "--max-tokens", "5") == 2
    assert engines[0][2].client.closed


def test_a_missing_model_is_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.setattr(cli.signal, "signal", lambda *args: None)
    assert cli.main(["generate", "--model", "/no/such/model", "--prompt", "a"]) == 2
    assert capsys.readouterr().err == "stepahead: error: model folder '/no/such/model' does not exist\n"


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"stepahead {stepahead.__version__}\n"


def test_help_loads_no_torch_and_no_transformers():
    program = (
        "import sys; from stepahead.frontend import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: print([name for name in ('torch', 'transformers', 'zmq') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
