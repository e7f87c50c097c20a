"""Text files to train.npy and held.npy of tokens, uint16, by a byte-pair encoding that is learned from the first 20 MB.

python tokens.py OUT TRAIN.txt.gz ... --held HELD.txt.gz          files of gzip or xz
"""

import argparse
import gzip
import lzma
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out", type=Path)
parser.add_argument("train", nargs="+")
parser.add_argument("--held", required=True)
parser.add_argument("--vocabulary", type=int, default=16384)
options = parser.parse_args()


def read(path: str) -> str:
    """The text of a compressed file."""
    with (lzma if path.endswith(".xz") else gzip).open(path, "rt", errors="replace") as file:
        return file.read()


def pieces(text: str, size: int = 4000) -> list[str]:
    """The text in pieces that are encoded side by side."""
    return [text[at : at + size] for at in range(0, len(text), size)]


train = "\n".join(map(read, options.train))
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=options.vocabulary, show_progress=False, initial_alphabet=alphabet)
tokenizer.train_from_iterator(pieces(train[:20_000_000]), trainer)
options.out.mkdir(parents=True, exist_ok=True)
for name, text in (("train", train), ("held", read(options.held))):
    ids = [np.array(each.ids, np.uint16) for each in tokenizer.encode_batch(pieces(text))]
    np.save(options.out / f"{name}.npy", np.concatenate(ids))
