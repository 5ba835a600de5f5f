"""Text as tokens 1 to V: byte pairs learned on the part that trains, or characters.

The training parts of WikiText-2 and Penn Treebank are not at hand, so their validation text trains and their test text
tests; of tiny Shakespeare the last tenth tests. ``<unk>`` in a text is one token.

Shapes: N tokens, V vocabulary, B windows, T tokens of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recbft.datasets.batches import Batch
from recbft.errors import UserError, did_you_mean

UNKNOWN = "<unk>"
HELD_OUT = 0.1  # of a text that has no test part


@dataclass(frozen=True)
class Source:
    """Where a text is, below ``text/``, and whether its tokens are characters."""

    train: str
    test: str | None
    characters: bool = False


SOURCES = {
    "wikitext2": Source("wikitext2_valid.txt", "wikitext2_test.txt"),
    "ptb": Source("ptb_valid.txt", "ptb_test.txt"),
    "shakespeare": Source("tinyshakespeare.txt", None, characters=True),
}


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens."""

    name: str
    train: Tensor  # (N,) int64, from 1 to ``vocabulary``
    test: Tensor  # (N',) likewise
    vocabulary: int  # V
    num_bytes: Tensor  # (V + 1,) length of each token in UTF-8; 0 at 0

    @property
    def hash(self) -> str:
        """SHA-256 of both parts as tokens."""
        return hashlib.sha256(torch.cat([self.train, -self.train.new_ones(1), self.test]).numpy().tobytes()).hexdigest()


class Windows:
    """Windows of a text, and their targets, of which a share may be wrong.

    The targets that are wrong at one share are wrong at every larger one, and wrong in the same way.
    """

    def __init__(self, tokens: Tensor, length: int, *, replaced: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)  # of the text, not of the training
        chance, other = torch.rand(len(tokens), generator=generator), torch.randperm(len(tokens), generator=generator)
        self.tokens, self.length = tokens, length
        self.targets = torch.where(chance < replaced, tokens[other], tokens)

    def batches(self, batch_size: int, *, start: int = 0, order: torch.Generator | None = None) -> Iterator[Batch]:
        """Windows side by side from token ``start`` on, in the text's order unless given another."""
        number = (len(self.tokens) - 1 - start) // self.length
        chosen = torch.arange(number) if order is None else torch.randperm(number, generator=order)
        for some in chosen.split(batch_size):
            place = start + some[:, None] * self.length + torch.arange(self.length)
            B, T = place.shape
            yield Batch(
                items=self.tokens[place],
                segment=torch.arange(B)[:, None].expand(B, T).contiguous(),
                position=torch.arange(T).expand(B, T).contiguous(),
                time=None,
                target=self.targets[place + 1],
                last=torch.arange(B) * T + T - 1,
            )


def load_corpus(name: str, root: Path, *, vocabulary: int) -> Corpus:
    """A corpus by name.

    Args:
        root: the folder that ``text/`` lies in.
        vocabulary: of byte pairs, at most; characters are as many as there are.

    Raises:
        UserError: an unknown name, or a file that is missing, empty or no UTF-8.
    """
    if name not in SOURCES:
        raise UserError(f"unknown text {name!r}; {did_you_mean(name, SOURCES)}")
    source = SOURCES[name]
    train = read_text(root / "text" / source.train)
    if source.test is not None:
        test = read_text(root / "text" / source.test)
    else:
        cut = round(len(train) * (1 - HELD_OUT))
        train, test = train[:cut], train[cut:]
    return by_characters(name, train, test) if source.characters else by_pairs(name, train, test, vocabulary)


def read_text(path: Path) -> str:
    """What a file says."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; --data-root names the folder that text/ lies in") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 at byte {error.start:,}; convert it, for example by iconv") from None
    if not text.strip():
        raise UserError(f"{path} holds no text; take another file")
    return text


def by_characters(name: str, train: str, test: str) -> Corpus:
    """Tokens by character; one that the training text lacks is an error."""
    known = sorted(set(train))
    number = {character: place for place, character in enumerate(known, start=1)}
    if strange := sorted(set(test) - set(known)):
        raise UserError(f"the test text has {strange[0]!r}, which the training text lacks; take byte pairs")
    parts = [torch.tensor([number[character] for character in text]) for text in (train, test)]
    lengths = torch.tensor([0, *(len(character.encode()) for character in known)])
    return Corpus(name, parts[0], parts[1], len(known), lengths)


def by_pairs(name: str, train: str, test: str, vocabulary: int) -> Corpus:
    """Byte pairs learned on ``train``; every text can be written with them."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("byte pairs need the package tokenizers; pip install tokenizers") from None

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary <= len(alphabet):
        raise UserError(f"a vocabulary of {vocabulary} has no pairs beside {len(alphabet)} bytes; take 2000 or more")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[UNKNOWN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(train.splitlines(keepends=True), trainer)
    parts = [torch.tensor(tokenizer.encode(text).ids) + 1 for text in (train, test)]
    # A character of a byte-level token stands for one byte.
    lengths = [0, *(len(tokenizer.id_to_token(number)) for number in range(tokenizer.get_vocab_size()))]
    return Corpus(name, parts[0], parts[1], len(lengths) - 1, torch.tensor(lengths))
