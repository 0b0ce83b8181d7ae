"""Texts that are tokenized beside training: how fast one process is, whether a rank waits, and how long resuming takes.

    python benchmarks/text_streams.py TOKENIZER FILE.jsonl... [--streams 8] [--length 4096] [--rate 60000]

TOKENIZER is a folder with a tokenizer.json. Resuming is from sample 10^9 of 20,000 files, the given ones over and over.
A rank that waits is one that takes samples at 1.2 times a rate in tokens/s and gets one more than 10 ms late.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import family
from megacore.data import tokenizer
from megacore.data.model_tokenizer import ModelFiles
from megacore.data.text_streams import StreamedTexts, TextFiles
from megacore.say import say
from megacore.store.tensor_files.companions import TEXT, companions

FILES, POSITION = 20_000, 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rate", type=int, default=60_000, help="tokens/s of a rank (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    given = companions(asked.tokenizer, asked.tokenizer, TEXT)
    files = {name: file.held() for name, file in given.items() if name in tokenizer.FILES}
    texts = TextFiles("texts", tuple(asked.files), 1, ModelFiles(files, {}, 2**24))
    say(f"load of the machine: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    _speed(texts, asked.length, asked.seconds)
    _waits(texts, asked.length, asked.rate, asked.seconds)
    _resume(replace(texts, streams=asked.streams, files=tuple(islice(cycle(texts.files), FILES))), asked.length)


def _speed(texts: TextFiles, length: int, seconds: float) -> None:
    source = StreamedTexts(texts, length, 256, 1)
    source.sample(0)
    begin, spent, count = time.perf_counter(), _cpu(), 0
    while time.perf_counter() - begin < seconds:
        count += 1
        source.sample(count)
    took, spent = time.perf_counter() - begin, _cpu() - spent
    say(f"one process: {count * length / took:,.0f} tokens/s, {count * length / spent:,.0f} a second of CPU")


def _cpu() -> float:
    """Return the seconds of CPU of this process and of those below it."""
    stats = (Path(f"/proc/{process}/stat").read_text() for process in family(os.getpid()))
    ticks = sum(int(each) for stat in stats for each in stat.rpartition(")")[2].split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def _waits(texts: TextFiles, length: int, rate: int, seconds: float) -> None:
    source = StreamedTexts(texts, length, 256, 1)
    source.sample(0)
    source.sample(1)
    time.sleep(3)  # a first step is slow, and batches are made ahead
    begin, late, count = time.perf_counter(), 0, 1
    while (due := (count - 1) * length / (1.2 * rate)) < seconds:
        count += 1
        time.sleep(max(0.0, begin + due - time.perf_counter()))
        asked = time.perf_counter()
        source.sample(count)
        late += time.perf_counter() - asked > 0.01
    say(f"taken at 1.2 x {rate:,} tokens/s: {late} of {count - 1} samples came more than 10 ms late")


def _resume(texts: TextFiles, length: int) -> None:
    each = POSITION // texts.streams
    places = {str(stream): [each, 2, 7_000 + stream, 0, 0, 5, 3] for stream in range(texts.streams)}
    source = StreamedTexts(texts, length, 256, 1)  # has read the tokenizer's token that ends a text
    begin, spent = time.perf_counter(), _cpu()
    source.resume(streams=texts.streams, places=places)
    source.sample(POSITION)
    first = time.perf_counter() - begin
    for stream in range(1, texts.streams):
        source.sample(POSITION + stream)
    took, spent = time.perf_counter() - begin, _cpu() - spent
    say(
        f"resumed at sample {POSITION:,}: the first after {first:.2f} s, one of each of {texts.streams} after "
        f"{took:.2f} s, {spent:.2f} s of CPU"
    )


if __name__ == "__main__":
    main()
