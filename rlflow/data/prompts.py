"""A data file as a sequence of tokenised prompts, each within the length limit.

Every over-long prompt is found here, before the first step. Formats are left to `readers`, order to `loader`.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

from rlflow.batch.sample import Prompt
from rlflow.config.schema import Data
from rlflow.data.encode import Encoder
from rlflow.data.readers import placed_rows
from rlflow.errors import UserError

ROWS_AT_ONCE = 1024


class PromptSet(Sequence[Prompt]):
    """Tokenised rows, with their ids in one flat array: a list of Python integers would be several times larger."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows_read = 0
        self.dropped = 0
        self.truncated = 0
        self._tokens = array("i")
        self._ends = array("q", [0])
        self._rows: list[tuple[int, dict[str, Any], Any]] = []

    def append(self, number: int, token_ids: Sequence[int], row: dict[str, Any], answer: Any) -> None:
        """Add row `number` of the file."""
        self._tokens.extend(token_ids)
        self._ends.append(len(self._tokens))
        self._rows.append((number, row, answer))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        number, row, answer = self._rows[index]
        token_ids = self._tokens[self._ends[index] : self._ends[index + 1]].tolist()
        return Prompt(f"{self.name}/{number}", token_ids, row, answer)


def load_prompts(
    path: str, tokenizer: Any, data: Data, *, max_length: int, name: str, limit: int | None = None,
    reads: Sequence[tuple[str, str]] = (),
) -> PromptSet:  # fmt: skip
    """The prompts of a file, at most `limit`, of at most `max_length` tokens; ids are `name`/row, counted from 0.

    Longer ones are treated as `data.overlong` says, and counted. `reads` are further columns that every row must have,
    not null, each with the key of the configuration that asks for it; `column.key` is a key of a mapping. Raises
    UserError with file and row.
    """
    encoder = Encoder(tokenizer, chat_template=data.chat_template, system_prompt=data.system_prompt)
    prompts, overlong = PromptSet(name), _Overlong(data.overlong, max_length)
    for number, (place, token_ids, row) in enumerate(_encoded(path, encoder, data, reads)):
        if limit is not None and len(prompts) == limit:
            break
        prompts.rows_read += 1
        kept = overlong.fit(place, token_ids)
        if kept is not None:
            answer = None if data.answer_key is None else row[data.answer_key]
            prompts.append(number, kept, row, answer)
    overlong.refuse(path, prompts.rows_read)
    cut = len(overlong.places)
    prompts.dropped, prompts.truncated = (cut, 0) if data.overlong == "filter" else (0, cut)
    return prompts


class _Overlong:
    """What happens to prompts over the limit, and which ones they were."""

    def __init__(self, mode: str, limit: int) -> None:
        self.mode, self.limit = mode, limit
        self.places: list[str] = []
        self.longest = 0

    def fit(self, place: str, token_ids: list[int]) -> list[int] | None:
        if len(token_ids) <= self.limit:
            return token_ids
        self.places.append(place)
        self.longest = max(self.longest, len(token_ids))
        cut = {"left": token_ids[-self.limit :], "right": token_ids[: self.limit]}
        return cut.get(self.mode)

    def refuse(self, path: str, rows_read: int) -> None:
        if self.places and self.mode == "error":
            shown = ", ".join(self.places[:5]) + (", …" if len(self.places) > 5 else "")
            raise UserError(
                path,
                f"{len(self.places)} of {rows_read} prompts are longer than rollout.max_prompt_length = {self.limit} "
                f"({shown}; the longest has {self.longest} tokens): raise it, or set data.overlong to filter, "
                "left or right",
            )


def _encoded(
    path: str, encoder: Encoder, data: Data, reads: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """Place in the file, token ids and row, tokenised in blocks, which is what fast tokenizers are fast at."""
    placed = placed_rows(path)
    while block := list(islice(placed, ROWS_AT_ONCE)):
        for place, row in block:
            for selector in ("prompt_key", "answer_key"):
                column = getattr(data, selector)
                if column is not None and column not in row:
                    what = f"no column {column} (data.{selector})"
                    raise UserError(f"{path}, {place}", f"{what}; there is {', '.join(row)}")
            for column, key in reads:
                if reason := _lack(row, column):
                    raise UserError(f"{path}, {place}", f"no value of {column} ({key}); {reason}")
        places, rows = zip(*block, strict=True)
        try:
            encoded = encoder.encode([row[data.prompt_key] for row in rows], places)
        except UserError as error:
            raise UserError(f"{path}, {error.where}", error.message) from error
        yield from zip(places, encoded, rows, strict=True)


def _lack(row: dict[str, Any], column: str) -> str | None:
    """Why a row has no value of `column`, whose `column.key` is a key of a mapping; None where it has one."""
    value: Any = row
    passed = ""
    for name in column.split("."):
        if not isinstance(value, dict):
            return f"{passed} is {value!r:.40}, which has no keys"
        if name not in value:
            has = f"{passed} has" if passed else "there is"
            return f"{has} {', '.join(value) or 'no keys'}"
        value, passed = value[name], f"{passed}.{name}".lstrip(".")
    return f"{passed} is null" if value is None else None
