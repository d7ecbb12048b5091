"""WordPiece of bert-base-uncased: lower case without accents, then the longest known pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradkeep._environment import import_extra
from gradkeep.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    Ids = np.ndarray[Any, np.dtype[np.int64]]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class WordPiece:
    """Tokens of a vocabulary file; their ids are the line numbers.

    >>> pieces = WordPiece(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "."))
    >>> pieces.tokens("Playing chess.")
    ['play', '##ing', '[UNK]', '.']
    >>> ids, mask = pieces.encode(["Playing."], length=6)
    >>> ids.tolist(), mask.tolist()
    ([[2, 5, 6, 7, 3, 0]], [[1, 1, 1, 1, 1, 0]])
    """

    vocabulary: tuple[str, ...]
    path: str | os.PathLike[str] | None = field(default=None, repr=False, compare=False)
    _tokenizer: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {token: number for number, token in enumerate(self.vocabulary)}
        missing = [token for token in _SPECIAL[:4] if token not in numbers]
        if missing or numbers["[PAD]"] != 0:
            raise DataError(
                "the file is not a WordPiece vocabulary",
                code="data.vocabulary",
                path=self.path,
                found=f"without {', '.join(missing)}" if missing else "[PAD] is not the first",
                expected="one token per line, [PAD] first, with [UNK], [CLS] and [SEP]",
                fix="Use the vocab.txt of the checkpoint's training.",
            )
        tokenizers = import_extra("tokenizers", extra="metastore", what="splitting texts for Bert")
        object.__setattr__(self, "_tokenizer", tokenizers.BertWordPieceTokenizer(numbers))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> WordPiece:
        """Read a file such as `vocab.txt` of bert-base-uncased."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                "the WordPiece vocabulary cannot be read",
                code="data.vocabulary_unreadable",
                path=path,
                found=error.strerror if isinstance(error, OSError) else "no UTF-8",
                expected="one token per line, as in vocab.txt of bert-base-uncased",
                fix="Put vocab.txt next to Bert's checkpoint, or set vocab_file of the model.",
            ) from None
        # Not splitlines(), which also splits at rare characters that are tokens.
        lines = text.removesuffix("\n").split("\n")
        return cls(tuple(line.rstrip("\r") for line in lines), path)

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, texts: Sequence[str], *, length: int) -> tuple[Ids, Ids]:
        """Return ids and attention mask `[N, length]`, truncated as in MetaStore: a long text loses its [SEP].

        It first truncates to 512 with [CLS] and [SEP], then takes the first `length`.
        """
        ids = np.zeros((len(texts), length), np.int64)
        mask = np.zeros((len(texts), length), np.int64)
        for row, encoding in enumerate(self._tokenizer.encode_batch(list(texts))):
            numbers = encoding.ids
            # The positions that the model has.
            tokens = [*numbers[:1], *numbers[1:-1][: 512 - 2], *numbers[-1:]][:length]
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return ids, mask

    def tokens(self, text: str) -> list[str]:
        """Return the pieces of a text, without [CLS] and [SEP]."""
        tokens: list[str] = self._tokenizer.encode(text, add_special_tokens=False).tokens
        return tokens
