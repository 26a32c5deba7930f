"""The model's tokenizer and chat template. transformers is imported here only, and late: it takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, InvalidRequestError

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "tekken.json")

Message = Mapping[str, Any]


def check_tokenizer_files(folder: str) -> None:
    """Raises: ConfigError when `folder` surely holds no tokenizer; quick."""
    if not any(os.path.isfile(os.path.join(folder, name)) for name in _FILES):
        raise ConfigError(
            f"{folder} has no tokenizer (none of {', '.join(_FILES)}); "
            "give one with tokenizer=…, or skip_tokenizer_init=True and prompts as token ids"
        )


def load_tokenizer(folder: str) -> Any:
    """Raises: ConfigError."""
    check_tokenizer_files(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a broken file makes transformers raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"cannot load the tokenizer in {folder}: {reason}") from None
    # it would warn of "indexing errors" before we refuse a prompt that is too long
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def conversations_of(messages: Any) -> list[Sequence[Message]]:
    """One conversation, or many, as a list of them. Raises: InvalidRequestError."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(
            f"messages={messages!r}: must be a list of messages {{'role': …, 'content': …}}, or a list of such lists"
        )
    if not messages:
        raise InvalidRequestError("messages is empty: a conversation must hold at least one message")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt that the tokenizer's chat template makes of a conversation, special tokens included.

    Raises: InvalidRequestError when there is no template, or it refuses the messages.
    """
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError(
            "the model's tokenizer has no chat template; give one with chat_template=…, or use generate()"
        )
    plain = [_with_plain_content(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            plain,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
    except Exception as error:  # templates are programs: they raise what they like
        raise InvalidRequestError(f"the chat template refused the messages: {' '.join(str(error).split())}") from None


def _with_plain_content(message: Any) -> dict[str, Any]:
    """The message with its content as one string, if that is a list of parts: not every template takes parts."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidRequestError(f"chat message {message!r}: must be a dict with 'role' and 'content'")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return {**message, "content": "\n".join(map(_text_of_part, content))}
    if content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"chat message: content={content!r} must be a string or a list of text parts")
    return dict(message)


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise InvalidRequestError(
        f"chat message: content part {part!r:.80} is not text; only {{'type': 'text', 'text': …}} is taken"
    )
