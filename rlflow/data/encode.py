"""Prompts as they stand in a data file to token ids: strings or messages, the chat template, exactly one BOS.

Training, rollout and evaluation all take their prompt ids from here. Lengths are left to `prompts`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rlflow.errors import UserError

Message = dict[str, Any]


def load_tokenizer(folder: str | Path) -> Any:
    """The Hugging Face tokenizer in `folder`; raises UserError where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        # What transformers says of missing files are several lines on other ways to have a tokenizer.
        raise _no_tokenizer(folder, "" if "\n" in str(error) else f" ({error})") from error
    if not tokenizer("a", add_special_tokens=False).input_ids:  # transformers makes one without a vocabulary up
        raise _no_tokenizer(folder)
    return tokenizer


def _no_tokenizer(folder: str | Path, reason: str = "") -> UserError:
    advice = "are tokenizer.json and tokenizer_config.json there?"
    return UserError("model.tokenizer", f"{folder} holds no usable tokenizer{reason}: {advice}")


class Encoder:
    """Turns prompts into token ids the same way for every use of them."""

    def __init__(self, tokenizer: Any, *, chat_template: bool = True, system_prompt: str | None = None) -> None:
        if chat_template and not tokenizer.chat_template:
            raise UserError("data.chat_template", "the tokenizer has no chat template; set it to false for plain text")
        self.tokenizer, self.chat_template, self.system_prompt = tokenizer, chat_template, system_prompt
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and tokenizer("a").input_ids[:1] == [bos]

    def encode(self, prompts: Sequence[Any], places: Sequence[str] | None = None) -> list[list[int]]:
        """Token ids of each prompt; raises UserError with the place, `row 0` and so on, of one that cannot be used."""
        places = [f"row {number}" for number in range(len(prompts))] if places is None else places
        texts = [self._text(prompt, place) for prompt, place in zip(prompts, places, strict=True)]
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids if texts else []
        for ids, place in zip(encoded, places, strict=True):
            if not ids:
                raise UserError(place, "the prompt is empty")
        return [self._with_one_bos(ids) for ids in encoded]

    def _text(self, prompt: Any, where: str) -> str:
        messages = read_messages(prompt, where)
        if not self.chat_template:
            if messages is not None:
                raise UserError(where, "a list of messages needs data.chat_template = true")
            return prompt
        messages = [{"role": "user", "content": prompt}] if messages is None else messages
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise UserError(where, f"the chat template refuses these messages: {error}") from error

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Templates may print BOS, tokenizers may add it: one where either does."""
        bos, start = self.tokenizer.bos_token_id, 0
        while bos is not None and ids[start : start + 2] == [bos, bos]:
            start += 1
        missing = self._adds_bos and ids[start] != bos
        return [bos, *ids] if missing else ids[start:]


def read_messages(prompt: Any, where: str) -> list[Message] | None:
    """The messages that `prompt` is, or holds as JSON text; None for a plain string. UserError names `where`."""
    value = _json_list(prompt) if isinstance(prompt, str) else prompt
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not value:
        raise UserError(where, f"a prompt must be text or a list of messages, not {prompt!r}")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(where, f"message {number} has no role: {message!r}")
        if not isinstance(message.get("content"), str):
            raise UserError(where, f"message {number} has no text as its content: {message!r}")
    return value


def _json_list(text: str) -> Any:
    """The list of objects that `text` is in JSON, else `text`: a prompt may begin with a bracket by itself."""
    if not text.lstrip().startswith("["):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value and all(isinstance(item, dict) for item in value) else text
