"""Write a data set into the one HDF5 layout that training reads.

python -m data.prepare cifar10 SOURCE -o cifar10.h5   the .tar.gz of the binary version, or its folder
python -m data.prepare an4 SOURCE -o an4.h5           directory with etc/ and wav/, of WAV or raw files
python -m data.prepare text SOURCE -o text.h5         folder of plain text; a blank line ends a document
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data import DataError
from data.command import command_parser, show
from data.images import cifar10
from data.images.file import ImageSet, open_image_file, write_image_file
from data.speech import an4
from data.speech.file import RATE, SpeechSet, open_speech_file, write_speech_file
from data.text.file import MOST_WORDS, SPECIAL, open_text_file
from data.text.prepare import Recipe, prepare_text
from data.text.prepare import description as text_description


def prepare_cifar10(source: Path, output: Path) -> None:
    """Write CIFAR-10 from its official binary layout.

    Args:
        source: archive of the binary version, or its folder.
        output: HDF5 file to write, in place of one that is there.

    Raises:
        DataError: a source that is missing, incomplete or damaged.
    """
    counts = {"train": len(cifar10.TRAIN_FILES) * cifar10.BATCH_RECORDS, "test": cifar10.BATCH_RECORDS}
    # disable=None: no bar where the output is not a terminal.
    with tqdm(total=sum(counts.values()), unit="image", desc="cifar10", disable=None) as bar:

        def parts() -> Iterator[tuple[str, int, NDArray[np.uint8], NDArray[np.uint8]]]:
            for part in cifar10.read_batches(source):
                yield part
                bar.update(len(part[-1]))

        write_image_file(
            output,
            parts(),
            name="cifar10",
            source=f"CIFAR-10 binary version, {source.name}",
            classes=cifar10.CLASSES,
            shape=cifar10.SHAPE,
            counts=counts,
        )


def description(train: ImageSet, test: ImageSet) -> str:
    """A prepared data set in words."""
    channels, height, width = train.shape
    return f"{train.name!r} of {len(train)} training and {len(test)} test images, {channels}x{height}x{width}"


def prepare_an4(source: Path, output: Path, *, partial: bool = False) -> None:
    """Write AN4 from its published layout.

    Args:
        source: directory with etc/ and wav/.
        partial: accept fewer utterances than 948 + 130.
        output: as prepare_cifar10; errors too.
    """
    utterances = an4.find_utterances(source)
    for split, count in an4.COUNTS.items():
        if len(utterances[split]) != count and not partial:
            raise DataError(
                f"{source}: {len(utterances[split])} utterances in split {split!r} are not AN4's {count}; "
                "--partial accepts fewer"
            )
    counts = " + ".join(str(len(utterances[split])) for split in an4.COUNTS)
    total = sum(each.length for of_split in utterances.values() for each in of_split)
    content = f"{counts} utterances of {total} samples"
    write_speech_file(
        output,
        name="an4",
        source=f"CMU AN4, {source.name}, {content}, not compared with the published archive",
        names={split: [each.name for each in utterances[split]] for split in utterances},
        lengths={split: [each.length for each in utterances[split]] for split in utterances},
        labels={split: [each.labels for each in utterances[split]] for split in utterances},
        samples=lambda split: an4.read_utterances(utterances[split]),
    )


def speech_description(train: SpeechSet, test: SpeechSet) -> str:
    """A prepared speech set in words."""
    hours = " and ".join(f"{len(each.samples) / RATE / 3600:.2f}" for each in (train, test))
    return f"{train.name!r} of {len(train)} training and {len(test)} test utterances, {hours} hours"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    title = "Write a data set into the HDF5 layout that training reads."
    top = command_parser(
        "data.prepare", title, "cifar10 cifar-10-binary.tar.gz -o cifar10.h5", "text articles -o text.h5"
    )
    sets = top.add_subparsers(dest="set", required=True)

    def data_set(name: str, description: str, *examples: str) -> argparse.ArgumentParser:
        like = command_parser("data.prepare", description, *examples)
        parser = sets.add_parser(name, help=description, description=description, epilog=like.epilog)
        parser.formatter_class = like.formatter_class
        parser.add_argument(
            "-o", "--output", type=Path, required=True, metavar="FILE.h5", help="HDF5 file to write"
        )
        parser.add_argument("--force", action="store_true", help="Replace the output file if it exists")
        return parser

    text = "CIFAR-10, from its official binary version."
    add = data_set("cifar10", text, "cifar10 cifar-10-binary.tar.gz -o cifar10.h5").add_argument
    add("source", type=Path, help=f"Archive of the binary version, which is at {cifar10.URL}, or its folder")

    add = data_set("an4", "CMU AN4, from its published layout.", "an4 an4 -o an4.h5").add_argument
    add("source", type=Path, help="Folder with etc/ and wav/, the recordings as WAV or raw files")
    add("--partial", action="store_true", help="Accept fewer than 948 training and 130 test utterances")

    text = "Plain text, packed for BERT, or for models of the next token."
    for_gpt = "text articles -o gpt.h5 --contiguous --length 512 --vocabulary-size 16384"
    add = data_set("text", text, "text articles -o text.h5", for_gpt).add_argument
    add("source", type=Path, help="Folder or file of UTF-8 text; a blank line ends a document")
    text = "Tokens per sequence, at least 8; default: %(default)s"
    add("--length", type=int, default=Recipe.length, help=text)
    text = "File with one word per line; default: a vocabulary trained on the text"
    add("--vocabulary", type=Path, metavar="FILE", help=text)
    text = (
        f"Most words of a trained vocabulary, from {len(SPECIAL) + 1} to {MOST_WORDS}; default: %(default)s"
    )
    add("--vocabulary-size", type=int, default=Recipe.vocabulary_size, help=text)
    text = "Share of the documents that is held out, in (0, 1); default: %(default)s"
    add("--held-out", type=float, default=Recipe.held_out, help=text)
    text = "Pattern of the names of files to hold out, instead of a share; default: none"
    add("--held-out-files", metavar="PATTERN", default="", help=text)
    text = "Seed of the random sentence pairs; default: %(default)s"
    add("--seed", type=int, default=Recipe.seed, help=text)
    text = "Keep the words of the text in their order, for models of the next token; default: pairs of segments for BERT"
    add("--contiguous", action="store_true", help=text)
    return top.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = parse(arguments)
    source, output = options.source, options.output
    try:
        if output.exists() and not options.force:
            raise DataError(f"{output} exists; --force replaces it")
        if options.set == "cifar10":
            prepare_cifar10(source, output)
            line = description(*open_image_file(output))
        elif options.set == "an4":
            prepare_an4(source, output, partial=options.partial)
            line = speech_description(*open_speech_file(output))
        else:
            prepare_text(
                source, output, Recipe(**{key.name: getattr(options, key.name) for key in fields(Recipe)})
            )
            line = text_description(*open_text_file(output))
    except (ValueError, OSError) as error:
        show(f"error: {error}", file=sys.stderr)
        return 1
    show(f"{output}: wrote {line}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        show("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
