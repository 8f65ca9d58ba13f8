"""Whether an environment says that its episode succeeded."""


def success(success: float = 0.0) -> float:
    """Returns the environment's word; with weight 0 it decides accuracy and leaves the reward to the turns."""
    return float(success)
