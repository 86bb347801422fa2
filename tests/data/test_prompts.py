"""Rows to token ids: strings and messages, one BOS, the length limit, and which row is to blame."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.config import Data
from rlflow.data.encode import Encoder, load_tokenizer
from rlflow.data.prompts import PromptSet, load_prompts
from rlflow.errors import UserError
from tests.data.tokenizers import ASSISTANT, BOS, END, SYSTEM, USER, make_tokenizer, word

HI = [BOS, USER, word(7), END, ASSISTANT]
MESSAGES = [{"role": "user", "content": "w7"}]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(make_tokenizer())


@pytest.mark.parametrize("prompt", ["w7", MESSAGES, json.dumps(MESSAGES)])
def test_text_messages_and_json_messages_are_the_same_prompt(encoder: Encoder, prompt: Any) -> None:
    """cases.md D05."""
    assert encoder.encode([prompt]) == [HI]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "a prompt must be text or a list of messages, not []"),
        (None, "a prompt must be text or a list of messages, not None"),
        ([{"content": "w7"}], "message 0 has no role"),
        (json.dumps([{"content": "w7"}]), "message 0 has no role"),
        ([{"role": "user", "content": None}], "message 0 has no text as its content"),
        ([*MESSAGES, "w7"], "message 1 has no role"),
    ],
)
def test_prompts_that_are_none_name_their_row(encoder: Encoder, prompt: Any, message: str) -> None:
    """cases.md D05."""
    with pytest.raises(UserError) as raised:
        encoder.encode(["w7", prompt], ["row 40", "row 41"])
    assert raised.value.where == "row 41"
    assert raised.value.message.startswith(message)


def test_a_string_may_begin_with_a_bracket(encoder: Encoder) -> None:
    assert encoder.encode(["[w7", "[1, 2]", "[]"]) == [[BOS, USER, *ids, END, ASSISTANT] for ids in ([5], [5, 5], [5])]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("printed", ["{{ bos_token }}", "{{ bos_token }}{{ bos_token }}", ""])
def test_exactly_one_bos_where_template_or_tokenizer_has_one(adds_bos: bool, printed: str) -> None:
    """cases.md C06."""
    template = printed + "<user> {{ messages[0]['content'] }}"
    encoder = Encoder(make_tokenizer(adds_bos=adds_bos, template=template))
    expected = [USER, word(7)] if not adds_bos and not printed else [BOS, USER, word(7)]
    assert encoder.encode(["w7"]) == [expected]


def test_plain_text_has_the_bos_that_the_tokenizer_adds() -> None:
    """cases.md C06: a raw string prompt."""
    for adds_bos, expected in ((True, [BOS, word(1), word(2)]), (False, [word(1), word(2)])):
        encoder = Encoder(make_tokenizer(adds_bos=adds_bos), chat_template=False)
        assert encoder.encode(["w1 w2"]) == [expected]
    assert Encoder(make_tokenizer(), chat_template=False).encode(["<bos> w1"]) == [[BOS, word(1)]]
    no_bos = Encoder(make_tokenizer(adds_bos=False, bos=False), chat_template=False)
    assert no_bos.encode(["w1"]) == [[word(1)]]


def test_the_system_prompt_stands_before_prompts_that_have_none() -> None:
    encoder = Encoder(make_tokenizer(), system_prompt="w9")
    own = [{"role": "system", "content": "w8"}, *MESSAGES]
    assert encoder.encode(["w7", own]) == [[BOS, SYSTEM, word(i), END, *HI[1:]] for i in (9, 8)]


def test_messages_and_templates_need_each_other() -> None:
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        Encoder(make_tokenizer(template=None))
    with pytest.raises(UserError, match=r"needs data\.chat_template = true"):
        Encoder(make_tokenizer(), chat_template=False).encode([MESSAGES])
    refusing = Encoder(make_tokenizer(template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(UserError, match="row 0: the chat template refuses these messages: roles must alternate"):
        refusing.encode(["w7"])


def test_empty_prompts_are_refused() -> None:
    with pytest.raises(UserError, match="row 1: the prompt is empty"):
        Encoder(make_tokenizer(adds_bos=False), chat_template=False).encode(["w1", " "])


def test_no_tokenizer(tmp_path: Path) -> None:
    """One line that names the key, whatever transformers says at length."""
    said = rf"^model\.tokenizer: {tmp_path} holds no usable tokenizer[^\n]*$"
    with pytest.raises(UserError, match=said):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # from which transformers makes an empty one
    with pytest.raises(UserError, match=said):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=said):
        load_tokenizer(tmp_path)


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(
    path: str, *, overlong: Any = "error", max_length: int = 512, limit: int | None = None, **data: Any
) -> PromptSet:
    settings = Data(train=path, chat_template=False, overlong=overlong, **data)
    return load_prompts(path, make_tokenizer(), settings, max_length=max_length, name="train", limit=limit)


def test_prompts_carry_row_answer_and_id(tmp_path: Path) -> None:
    rows = [{"q": f"w{i}", "a": i, "level": "easy"} for i in range(3)]
    prompts = read(write(tmp_path, rows), prompt_key="q", answer_key="a")
    assert [prompt.id for prompt in prompts] == ["train/0", "train/1", "train/2"]
    assert (prompts[-1].token_ids, prompts[2].answer, prompts[2].row) == ([BOS, word(2)], 2, rows[2])
    assert [prompt.answer for prompt in prompts[1:]] == [1, 2]
    with pytest.raises(IndexError):
        prompts[3]


def test_many_blocks_keep_rows_and_ids_together(tmp_path: Path) -> None:
    rows = [{"prompt": " ".join(["w1"] * (1 + i % 3) + [f"w{i % 1000}"]), "answer": i} for i in range(2300)]
    prompts = read(write(tmp_path, rows))
    assert len(prompts) == prompts.rows_read == 2300
    assert all(prompt.answer == i and prompt.token_ids[-1] == word(i % 1000) for i, prompt in enumerate(prompts))


LONG = [BOS, *(word(i) for i in range(557))]


@pytest.mark.parametrize(
    ("overlong", "kept", "counts"),
    [("left", LONG[-512:], (0, 1)), ("right", LONG[:512], (0, 1)), ("filter", None, (1, 0))],
)
def test_overlong_prompts(tmp_path: Path, overlong: str, kept: list[int] | None, counts: tuple[int, int]) -> None:
    """cases.md C04: 558 tokens, limit 512."""
    rows = [{"prompt": "w1", "answer": 0}, {"prompt": " ".join(f"w{i}" for i in range(557)), "answer": 1}]
    prompts = read(write(tmp_path, rows), overlong=overlong)
    assert [prompt.token_ids for prompt in prompts] == [[BOS, word(1)]] + ([kept] if kept else [])
    assert (prompts.dropped, prompts.truncated, prompts.rows_read) == (*counts, 2)


@pytest.mark.parametrize("turns", [1, 3])
def test_overlong_prompts_are_an_error_before_the_first_step(tmp_path: Path, turns: int) -> None:
    """cases.md C04, single- and multi-turn: one path."""
    text = " ".join(["w1"] * 558)
    long = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "w2"},
        {"role": "user", "content": "w3"},
    ]
    path = write(tmp_path, [{"prompt": "w1", "answer": 0}, {"prompt": long[:turns], "answer": 0}])
    with pytest.raises(UserError) as raised:
        load_prompts(path, make_tokenizer(), Data(train=path), max_length=512, name="train")
    assert raised.value.where == path
    assert "1 of 2 prompts are longer than rollout.max_prompt_length = 512 (line 2; the longest" in str(raised.value)


def test_only_the_first_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "w1 w2" if i == 1 else "w1", "answer": i} for i in range(9)])
    prompts = read(path, limit=3, max_length=2, overlong="filter")
    assert [prompt.answer for prompt in prompts] == [0, 2, 3]


def test_rows_without_a_column_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "w1", "answer": 1}, {"prompt": "w1", "label": 1}])
    with pytest.raises(UserError) as raised:
        read(path)
    assert str(raised.value) == f"{path}, line 2: no column answer (data.answer_key); there is prompt, label"


def test_rows_need_no_answer_where_nothing_compares_with_one(tmp_path: Path) -> None:
    (prompt,) = read(write(tmp_path, [{"prompt": "w1"}]), answer_key=None)
    assert (prompt.answer, prompt.row) == (None, {"prompt": "w1"})
