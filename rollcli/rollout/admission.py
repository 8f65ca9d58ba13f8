"""Admission control: how far sampling may run ahead of training, so that nothing finished is ever too old to train.

A group is admitted under some version v of the policy, and its first token comes from v or later. It is due at step
v + k, with k the largest staleness allowed: trained at step s ≤ v + k, none of its tokens is more than k versions old.

Let P groups be trained a step, n be the next step to take a batch, and v the version that now samples (v = n before a
batch is taken, v = n - 1 while it is trained). A group is admitted only if, with it, the groups that wait to be trained
are at most

    (v + k - n + 1) P        those which the steps n … v + k will take.                                            (1)

A batch for step n is any P finished groups whose going leaves, for each step d ≥ n, at most

    (d - n) P                groups that are due by d.                                                             (2)

Claim: no group is ever trained after it is due. Let F(n) say that before step n takes its batch, at most (d - n + 1) P
waiting groups are due by d, for each d ≥ n. Admitting keeps F: a group admitted under v is due at v + k, so it counts
only for d ≥ v + k, where (1) bounds all that wait by (v + k - n + 1) P ≤ (d - n + 1) P. Taking a batch by (2) turns
F(n) into F(n + 1). Under F(n) the P groups that are due first satisfy (2), so waiting for them always ends with a
batch; and F(n) for d = n - 1 says that no group is overdue. ∎

With k = 0 the bound (1) is P while a batch is being collected and 0 while it is trained: synchronous training.
"""

from __future__ import annotations

from collections.abc import Iterable


class Admission:
    """Who waits to be trained, and what may come or go.

    Args:
        per_step: groups that a step trains, P.
        max_staleness: k.
        extra: groups that may wait beyond the P of the next batch, at most k P; None for as many as (1) allows. With
            k = 0 they are started all the same, and whoever uses them aborts those that are left when a batch is full;
            a group that is `urgent`, because it was aborted before, is waited for: no problem is put off for ever.
        steps: steps of the whole run: nothing is admitted that none of them would train.
    """

    def __init__(self, per_step: int, max_staleness: int, extra: int | None, steps: int) -> None:
        self.per_step = per_step
        self.max_staleness = max_staleness
        self.extra = extra
        self.steps = steps
        self.version = 0
        self.next_step = 0
        self._due: dict[int, int] = {}
        self._urgent: set[int] = set()

    def room(self) -> int:
        """Returns how many more groups may be admitted now."""
        left = (self.steps - self.next_step) * self.per_step
        ahead = (self.version + self.max_staleness - self.next_step + 1) * self.per_step
        if self.extra is not None and ahead > 0:
            if self.max_staleness == 0:
                return max(self.per_step + self.extra - len(self._due), 0)
            ahead = min(ahead, self.per_step + self.extra)
        return max(min(left, ahead) - len(self._due), 0)

    def admit(self, number: int, urgent: bool = False) -> None:
        """Takes in group `number`; numbers rise with every admission."""
        self._due[number] = self.version + self.max_staleness
        if urgent:
            self._urgent.add(number)

    def withdraw(self, number: int) -> None:
        """Lets go of a group that will not be trained: it was refused, or given back."""
        del self._due[number]
        self._urgent.discard(number)

    def batch(self, finished: Iterable[int]) -> list[int] | None:
        """Returns the groups that the next step may train, in order of admission; None while it must wait for more.

        Of the finished ones, those that are due first: if these will not do, no others will.
        """
        done = set(finished)
        if len(done) < self.per_step or not self._urgent <= done:
            return None
        going = set(sorted(done, key=lambda number: (number not in self._urgent, number))[: self.per_step])
        remaining = sorted(due for number, due in self._due.items() if number not in going)
        for count, due in enumerate(remaining, start=1):
            if count > (due - self.next_step) * self.per_step and self.max_staleness > 0:
                return None
        return sorted(going)

    def take(self, numbers: Iterable[int]) -> None:
        """Hands a batch over to the next step."""
        for number in numbers:
            self.withdraw(number)
        self.next_step += 1
