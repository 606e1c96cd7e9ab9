"""The bundled model's tokenizer: characters plus the words of `experiments.tasks.stories`.

The 512 tokens are four special tokens, newline, the 95 printable ASCII characters, and 412 words
with a space before them. Every token of more than one character begins with a space, so strings
without spaces (keys, values, arithmetic) have one token per character.
"""

import json
import re
from pathlib import Path

import numpy as np

from experiments.tasks import stories

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
# Words of more than 64 letters are split, because WordPiece takes cubic time in a word's length.
# Tokens do not change.
PATTERN = r" ?[A-Za-z]{1,64}|\s|."


def pieces() -> list[str]:
    """All tokens in the order of their ids."""
    characters = ["\n", *(chr(c) for c in range(32, 127))]
    return [*SPECIALS, *characters, *(" " + word for word in stories.words())]


class Vocabulary:
    """Encodes like the Hugging Face tokenizer, but without BOS, for the data generator."""

    def __init__(self):
        self.pieces = pieces()
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        longest = max(map(len, self.pieces))
        self._lengths = range(longest, 0, -1)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """The ids of printable ASCII text. Other characters become <unk>."""
        out = []
        for chunk in re.findall(PATTERN, text):
            if chunk in self.ids:
                out.append(self.ids[chunk])
            else:
                out += self._longest_match(chunk)
        return out

    def _longest_match(self, chunk: str) -> list[int]:
        out, start = [], 0
        while start < len(chunk):
            for length in self._lengths:
                if chunk[start : start + length] in self.ids:
                    break
            else:
                return [UNK]
            piece = chunk[start : start + length]
            out.append(self.ids[piece])
            start += len(piece)
        return out

    def decode(self, ids) -> str:
        return "".join(self.pieces[i] for i in ids if i >= len(SPECIALS))

    def story_tokens(self, num_characters: int, seed: int) -> np.ndarray:
        """Filler: the token ids of `stories.text`, int32 [about num_characters / 5]."""
        return np.array(self.encode(stories.text(num_characters, seed)), np.int32)


def build(folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json to `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {piece: i for i, piece in enumerate(pieces())}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocab, unk_token="<unk>", continuing_subword_prefix="", max_input_chars_per_word=100_000
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        **names,
    )
    for name, value in (("tokenizer_config", config), ("special_tokens_map", names)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
