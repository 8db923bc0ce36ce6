"""Differences of answers, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shmserve.errors import ModelFailed
from shmserve.tools.convert.agreement import OutputDifference, differences


def test_floats_differ_by_the_largest_element_over_all_requests() -> None:
    originals = [{"y": np.array([[1.0, 2.0]], np.float32)}, {"y": np.array([[-8.0, 3.0]], np.float32)}]
    others = [{"y": np.array([[1.5, 1.0]], np.float32)}, {"y": np.array([[-8.0, 3.25]], np.float32)}]
    (found,) = differences(originals, others)
    assert found == OutputDifference("y", 1.0, 8.0, 0.5)
    assert (found.within(0.125), found.within(0.124)) == (True, False)


def test_other_types_differ_by_the_share_of_elements() -> None:
    (found,) = differences([{"label": np.array([[1], [2], [3], [4]])}], [{"label": np.array([1, 2, 3, 0])}])
    assert found == OutputDifference("label", 0.25, 0.0, None)
    texts = [np.array([b"a", b"b"], object), np.array([b"a", b"c"], object)]
    assert differences([{"t": texts[0]}], [{"t": texts[1]}])[0].largest == 0.5


def test_only_equal_infinities_and_nans_agree() -> None:
    for new, largest in (((np.nan, np.inf), 0.0), ((np.nan, 1.0), np.inf), ((0.0, np.inf), np.inf)):
        (found,) = differences([{"y": np.array([np.nan, np.inf])}], [{"y": np.array(new)}])
        assert found.largest == largest


def test_outputs_with_other_names_are_matched_by_position() -> None:
    a, b = np.zeros(2), np.ones(2)
    found = differences([{"x": a, "y": b}], [{"p": a, "q": b}])
    assert [(one.output, one.largest) for one in found] == [("p", 0.0), ("q", 0.0)]
    assert [one.largest for one in differences([{"x": a, "y": b}], [{"y": b, "x": a}])] == [0.0, 0.0]


def test_outputs_that_cannot_be_compared() -> None:
    with pytest.raises(ModelFailed, match="the original has the outputs x, y, and the new model x"):
        differences([{"x": np.zeros(1), "y": np.zeros(1)}], [{"x": np.zeros(1)}])
    with pytest.raises(ModelFailed, match=r"output 'x' is \[3\], and \[2\] in the original"):
        differences([{"x": np.zeros(2)}], [{"x": np.zeros(3)}])
