"""The divergence task: right on what can be computed by hand, and loud about text that is too short."""

from __future__ import annotations

import math

import pytest
import torch

from turboquant.evals.scores import by_position, compare
from turboquant.text import load_text


def test_compare_by_hand():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    exact, packed = torch.stack((p, p)).log(), torch.stack((q, p)).log() + 3.0  # a constant changes nothing
    kl, same_top, exact_nll, packed_nll, same_top5 = compare(exact, packed, torch.tensor([2, -1]))
    by_hand = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    torch.testing.assert_close(kl, torch.tensor([by_hand, 0.0], dtype=torch.float64), atol=1e-6, rtol=0)
    assert same_top.tolist() == [0.0, 1.0]
    assert exact_nll[0].item() == pytest.approx(math.log(4), abs=1e-6)
    assert packed_nll[0].item() == pytest.approx(math.log(4), abs=1e-6)
    assert exact_nll[1].isnan()
    assert packed_nll[1].isnan()
    assert same_top5.tolist() == [1.0, 1.0]  # of three tokens all are among the five


def test_top_five_agreement_by_hand():
    exact = torch.arange(10.0)[None]  # 9, 8, 7, 6, 5
    other = torch.tensor([[0.0, 1, 2, 3, 9, 8, 7, 6, -1, -2]])  # 4, 5, 6, 7, 3
    assert compare(exact, other, torch.tensor([0]))[4].item() == pytest.approx(3 / 5)


def test_means_by_position():
    values = torch.tensor([1.0, 2, 3, 4, 3, 4, 5, 6])
    assert by_position(values, 2, 4) == [2.0, 3.0, 4.0, 5.0]
    assert by_position(values, 2, 2) == [2.5, 4.5]
    assert by_position(values, 4, 8) == [3.0, 4.0]


def test_pydoc_is_long_and_a_file_is_read(tmp_path):
    assert len(load_text("pydoc")) > 400_000
    path = tmp_path / "text.txt"
    path.write_text("Grüße", encoding="utf-8")
    assert load_text(str(path)) == "Grüße"


@pytest.mark.parametrize("content", [None, " \n"], ids=["missing", "empty"])
def test_text_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"text\.txt"):
        load_text(str(path))
