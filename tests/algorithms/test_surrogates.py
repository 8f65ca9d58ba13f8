"""The clipped surrogate in each of its four quadrants."""

import pytest
import torch

from rollcli.algorithms.surrogates import clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "active"),
    [
        (1.5, 1.0, -1.2, 0.0, 1.0),  # good and already likelier: no more gain
        (0.5, 1.0, -0.5, -1.0, 0.0),  # good and less likely: pushed up without bound
        (1.5, -1.0, 1.5, 1.0, 0.0),  # bad and likelier: pushed down without bound
        (0.5, -1.0, 0.8, 0.0, 1.0),  # bad and already less likely: no more gain
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.1, 2.0, -2.2, -2.0, 0.0),
    ],
)
def test_quadrants(ratio: float, advantage: float, loss: float, gradient: float, active: float) -> None:
    tensor = torch.tensor([ratio], requires_grad=True)
    value, share = clipped(tensor, torch.tensor([advantage]), 0.2, 0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert tensor.grad.item() == pytest.approx(gradient)
    assert share.tolist() == [active]


def test_bounds_are_offsets_from_one_on_either_side() -> None:
    ratios = torch.tensor([1.5, 1.25, 0.5, 0.95])
    value, _ = clipped(ratios, torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.1, 0.28)
    assert value.tolist() == pytest.approx([-1.28, -1.25, 0.9, 0.95])


def test_zero_advantage_is_neither_loss_nor_clipped() -> None:
    value, share = clipped(torch.tensor([5.0, 0.1]), torch.zeros(2), 0.2, 0.2)
    assert value.abs().tolist() == [0.0, 0.0] and share.tolist() == [0.0, 0.0]
