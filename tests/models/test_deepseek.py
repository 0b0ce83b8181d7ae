"""DeepSeek: that the comparison with transformers sees what corrects a router."""

from families import small
from test_transformers import theirs_of


def test_the_correction_of_a_router_is_drawn_in_the_comparison_with_transformers() -> None:
    """With zeros nothing would be corrected."""
    buffers = {name: buffer for name, buffer in theirs_of(small("deepseek_v3"), 0).named_buffers() if "correct" in name}
    assert len(buffers) == 2 and all(buffer.all() for buffer in buffers.values())
