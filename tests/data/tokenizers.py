"""A word-level tokenizer to test with: a token a word, so that expected ids can be written down."""

from typing import Any

BOS, USER, ASSISTANT, SYSTEM, END = 0, 1, 2, 3, 4
WORDS = ["<bos>", "<user>", "<assistant>", "<system>", "<end>", "<unk>", *(f"w{i}" for i in range(1000))]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def word(number: int) -> int:
    """The id of the word w{number}."""
    return 6 + number


def make_tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE, bos: bool = True) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({text: i for i, text in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        words.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    special = {"bos_token": "<bos>"} if bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<system>", "<end>"]})
    tokenizer.chat_template = template
    return tokenizer
