"""StarPO-S on GRPO: state, thinking, actions, reward policy optimization (RAGEN, arXiv 2504.20073, §4).

The whole interaction is one trajectory: its total reward, relative to the group, goes to every token the model sampled
in any turn. Stabilized by training on the groups whose rewards differ most (the paper's best quarter), a higher upper
clip, and no KL penalty. Of the paper's two forms this is the one without a critic; its other stabilizer, a critic, is
`ppo` with `masking`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollcli.algorithms.grpo import Grpo
from rollcli.algorithms.kl import KlPenalty
from rollcli.algorithms.policy_gradient import Aggregation
from rollcli.config.schema import Problems
from rollcli.data.batch import Batch


@dataclass
class StarPo(Grpo):
    """GRPO over whole interactions, on the most uncertain groups."""

    aggregation: Aggregation = "token-mean"
    """How token losses add up."""
    kl: KlPenalty = field(default_factory=KlPenalty)
    """Penalty for leaving the reference model."""
    clip_high: float = 0.28
    """The ratio's gain stops above 1 plus this."""
    keep_share: float = 0.25
    """Share of a step's groups that is trained, those of the largest standard deviation; 1 trains all (StarPO)."""

    def problems(self) -> Problems:
        """Yields values that make no sense."""
        yield from super().problems()
        if not 0 < self.keep_share <= 1:
            yield "keep_share", f"must be in (0, 1], is {self.keep_share}"

    def prepare(self, batch: Batch) -> None:
        """Leaves out the groups that are most of one mind; ties go to the earlier group."""
        super().prepare(batch)
        groups, places = np.unique(batch.samples["group"], return_inverse=True)
        spreads = np.array([batch.samples["reward"][places == place].std() for place in range(len(groups))])
        kept = np.argsort(-spreads, kind="stable")[: int(np.ceil(self.keep_share * len(groups)))]
        batch.tokens["loss_mask"] &= np.isin(places, kept)[batch.rows]
