"""The limit of open files: raised where that is allowed, refused before ranks would wait for sockets without a word."""

import resource
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from megacore import open_files
from megacore.parallel.weights.layout import MeshShape


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_it_grows_with_the_world_only_where_ranks_talk_over_gloo() -> None:
    small, large = MeshShape(dp=8, tp=8), MeshShape(dp=2048, tp=8)
    assert open_files.needed(large, "cpu") - open_files.needed(small, "cpu") > large.world
    assert open_files.needed(large, "cuda") == open_files.needed(small, "cuda") == open_files.OWN
    assert open_files.needed(large, "cuda", nodes=2048) == open_files.OWN + large.world


def test_the_limit_is_raised_and_said(limits: tuple[int, int]) -> None:
    files = min(limits[1], 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files - 100, limits[1]))
    assert open_files.allow(files - 100) is None
    said = open_files.allow(files - 10)
    assert said == f"The limit of open files was {files - 100:,}, and is {files - 10:,} for this run."
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files - 10, limits[1])


def test_what_is_not_allowed_is_a_problem_with_a_way_out() -> None:
    with patch.object(open_files, "limits", lambda: (1024, 4096)):
        assert list(open_files.problems(4096)) == []
        (said,) = open_files.problems(5000)
        assert open_files.allow(5000) is None
    assert "up to 5,000 files" in said and "allows 4,096: raise the hard limit" in said
