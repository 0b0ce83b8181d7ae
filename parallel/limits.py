"""Limits of what a file may ask for, whoever made it: one place for all limits, each with its reason. No torch.

A description of kilobytes can ask for gigabytes: numbers that claim sizes, texts that unpack, aliases that double.
Each limit lies far above what sound files have, and keeps one file below about a gigabyte of memory. What exceeds one
is an error that names it; whoever knows the file to be sound raises the number here.
"""

from __future__ import annotations

MIB = 1 << 20

RECIPE = MIB
"""Bytes of a recipe. Large ones, with hundreds of corpora, have a tenth of it, and YAML takes seconds for it."""
DEEPEST = 32
"""Levels of lists and mappings in a recipe: what composes them recurses."""
VALUES = 100_000
"""Values of a recipe: a line each, aliases can double them."""

JSON = 32 * MIB
"""Bytes of a JSON file or of a safetensors header. In memory, small objects take thirty times their text. The largest
that are known, indices and headers of tens of thousands of expert tensors, have less than 10 MiB."""
JSON_DEEPEST = 50
"""Levels of a JSON text; ours have a tenth of it. Whatever walks through more may end at Python's limit."""
DESCRIPTION = MIB
"""Bytes of the description of a tensor that torch.save wrote, or of the list of the members beside it: a thousand times
what these have."""
COMPANION = 64 * MIB
"""Bytes of a file that travels with a model. The largest tokenizers have half of it."""

DOCUMENT = 128 * MIB
"""Bytes of a text file, which is one document. Its characters take up to four times as much, and so do its tokens."""
LINE = 32 * MIB
"""Bytes of a line of .jsonl: of a JSON text, as above."""
UNPACKED = 100
"""Bytes that a byte of a compressed file may become: text becomes 3 to 20, and zeros a thousand."""
LAYERS = 1 << 16
"""Layers of a model. The largest have 126, and what describes them holds a number of each."""
VOCABULARY = 1 << 24
"""Tokens of a tokenizer. The largest have 300,000, and what counts tokens holds a number of each."""
ROWS = 64
"""Rows of a table that are in memory at once, as Python's objects."""

SECONDS = 60
"""Seconds of computing, for a tokenizer to load, or to encode some MiB of text: the slowest takes 20. See
`megacore.data.guard`."""
PATIENCE = 600
"""Seconds that are waited for that, whatever else the machine has to do."""
MEMORY = 3 << 30
"""Bytes for a tokenizer and what it does: a MiB of text takes a hundred, and the largest vocabularies a GiB."""

MESSAGE_LINES, MESSAGE_LINE = 100, 3000
"""Lines of an error, and characters of each. Names that files give to things stand in them, and all families."""


def cut(text: str) -> str:
    """Return a message without what is too long of it: the middle of a line, and the last lines."""
    lines = text.split("\n", MESSAGE_LINES)
    if len(lines) > MESSAGE_LINES:
        lines[MESSAGE_LINES] = "... and more"
    return "\n".join(map(_cut_line, lines))


def _cut_line(line: str) -> str:
    half = MESSAGE_LINE // 2
    return line if len(line) <= MESSAGE_LINE else f"{line[:half]} [...] {line[-half:]}"
