"""A judge: a rollout replica of another model, which takes chats and gives back texts."""

from __future__ import annotations

from dataclasses import replace

from rollcli.cluster.rollout_worker import RolloutWorker
from rollcli.cluster.worker import WorkerSpec
from rollcli.config.schema import RewardModelConfig, RlRecipe
from rollcli.data.templates import as_text
from rollcli.engines.base import Completion, GenerateRequest, SamplingParams
from rollcli.engines.models import load_chat_format
from rollcli.rewards.asking import Question
from rollcli.rewards.isolation import RewardFailure


class JudgeWorker(RolloutWorker):
    """One copy of a judge. Requests carry `(key, Question)`; results are texts, or why there is none."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.format = load_chat_format(self.recipe.model)

    def take_recipe(self, recipe: RlRecipe) -> RlRecipe:
        """Returns the recipe as a rollout replica of this judge's model would have it."""
        own = reward_model(recipe, self.spec.role)
        rollout = replace(
            recipe.rollout, engine=own.engine, replicas=own.replicas, parallel=own.parallel,
            engine_args=own.engine_args, max_rows=own.max_rows,
        )  # fmt: skip
        return replace(recipe, model=own.model, rollout=rollout)

    async def submit(self, client: str, requests: list[tuple[int, Question]]) -> None:
        """Queues questions; one that the judge's context has no room for is answered at once."""
        taken = []
        for key, question in requests:
            prompt = self.format.prompt(as_text(question.messages, self.format.tokenizer))
            if len(prompt) + question.max_tokens > self.engine.max_context:
                fault = f"{len(prompt)} tokens of a question and {question.max_tokens} of its answer do not fit"
                fault = f"{fault} the judge's context of {self.engine.max_context}"
                self.mailbox.post(client, key, RewardFailure("judge", fault))
                continue
            ends = (*self.format.stop_token_ids, *self.format.forbidden)
            sampling = SamplingParams(question.max_tokens, question.temperature, stop_token_ids=ends)
            taken.append((key, GenerateRequest("", prompt, question.seed, sampling)))
        if taken:
            await super().submit(client, taken)

    def _deliver(self, finished: list[Completion]) -> None:
        for completion in finished:
            client, key = self._owners.pop(completion.id)
            self.mailbox.post(client, key, self._text(completion))

    def _text(self, completion: Completion) -> str | RewardFailure:
        if completion.stop_reason == "stop":
            return self.format.text(completion.tokens)
        whys = {"length": f"the judge's answer was cut at {len(completion.tokens)} tokens"}
        why = whys.get(completion.stop_reason or "", completion.error or f"ended by `{completion.stop_reason}`")
        return RewardFailure("judge", why)


def reward_model(recipe: RlRecipe, role: str) -> RewardModelConfig:
    """Returns the reward model whose workers have this role."""
    return next(model for model in recipe.reward_models if model.role == role)
