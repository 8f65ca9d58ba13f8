import math
import sys

import pytest

from rollcli import registry
from rollcli.config.load import load_recipe, read_values, rebuild
from rollcli.errors import ConfigError, RecipeNotFound


def problems(name, *overrides):
    """Returns every problem of a recipe as one line each."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_right_recipe(recipe):
    loaded = load_recipe(recipe(), ["seed=4"])
    assert (loaded.name, loaded.recipe.steps, loaded.recipe.seed) == ("r", 3, 4)
    assert loaded.recipe.tasks[0].source.name == "sums"
    assert loaded.recipe.algorithm.name == "grpo"
    assert loaded.overrides == ["seed=4"]
    assert loaded.values["model"] == {"path": "some/model"}


def test_six_mistakes_are_told_at_once_each_at_its_place(recipe):
    name = recipe("""\
model: {path: some/model}
seed: abc
group_sise: 8
steps: 3
tasks:
  - name: a
    source: {name: sums, promt: x}
    rewards:
      - name: math
        wieght: 2
algorithm: {name: gpro}
rollout:
  sampling: {top_p: high}
""")
    known = ", ".join(registry.names("algorithms"))
    algorithm = (
        f"r.yaml:11:13: `algorithm.name`: unknown algorithm `gpro` (did you mean `grpo`?); known: {known}; searched "
        "built-ins and entry points `rollcli.algorithms`; a file is named as `./file.py:attribute`"
    )
    assert problems(name) == [
        "r.yaml:2:1: `seed`: expected a whole number, found `abc`",
        "r.yaml:3:1: unknown key `group_sise` (did you mean `group_size`?)",
        "r.yaml:7:26: unknown key `tasks[0].source.promt` (did you mean `prompt`?)",
        "r.yaml:10:9: unknown key `tasks[0].rewards[0].wieght` (did you mean `weight`?)",
        algorithm,
        "r.yaml:13:14: `rollout.sampling.top_p`: expected a number, found `high`",
    ]


def test_a_problem_carries_its_line(recipe):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe(more="group_sise: 8\n"))
    (problem,) = caught.value.problems
    assert (problem.snippet, problem.column, problem.length) == ("group_sise: 8", 1, len("group_sise"))
    assert problem.suggestion == "group_size"


def test_a_failed_value_draws_no_problem_of_its_default(recipe):
    assert problems(recipe(), "tasks[0].rewards[0].name=mth") == [
        "command line, override 1: `tasks[0].rewards[0].name`: unknown name `mth`; known: "
        f"{', '.join(registry.names('rewards'))} (did you mean `math`?)"
    ]


@pytest.mark.parametrize("text", ["", "# only words\n"])
def test_an_empty_file_lacks_what_is_required(recipe, text):
    assert problems(recipe(text)) == [f"r.yaml:1:1: `{key}`: is required" for key in ("model", "tasks", "steps")]


def test_a_missing_key_of_an_item_is_told_at_the_item(recipe):
    assert problems(recipe("model: {path: m}\nsteps: 1\ntasks:\n  - source: sums\n    rewards: [{name: math}]\n")) == [
        "r.yaml:4:5: `tasks[0].name`: is required"
    ]


def test_what_is_no_text(recipe):
    (line,) = problems(recipe("description: é\n".encode("latin-1")))
    assert line.startswith("r.yaml: cannot be read: 'utf-8' codec")


def test_windows_line_ends_and_byte_order_mark(recipe):
    name = recipe(b"\xef\xbb\xbfmodle: 1\r\nmodel:\r\n  path: m\r\nsteps: 1\r\ntasks: 4\r\n")
    assert problems(name) == [
        "r.yaml:1:1: unknown key `modle` (did you mean `model`?)",
        "r.yaml:5:1: `tasks`: expected a list, found `4`",
    ]


def test_a_folder_and_a_missing_file(recipe, tmp_path):
    recipe()
    for name in ("./", str(tmp_path), "gone.yaml"):
        with pytest.raises(RecipeNotFound):
            load_recipe(name)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system [touch x]", "!mine x"])
def test_tags_construct_nothing(recipe, tmp_path, tag):
    (line,) = problems(recipe(more=f"description: {tag}\n"))
    assert line.startswith("r.yaml:8:14: not valid YAML: could not determine a constructor")
    assert not (tmp_path / "x").exists()


# Overrides


def test_overrides_are_located_by_number(recipe):
    assert problems(recipe(), "seed=1", "algorithm.clp_low=0.2", "steps=x", "nokey", "=3") == [
        "command line, override 2: unknown key `algorithm.clp_low` (did you mean `clip_low`?)",
        "command line, override 3: `steps`: expected a whole number, found `x`",
        "command line, override 4: `nokey` is not of the form key=value",
        "command line, override 5: `=3` is not of the form key=value",
    ]


def test_mistakes_of_recipe_and_command_line_come_together(recipe):
    assert problems(recipe(more="seed: x\n"), "nokey", "steps=0") == [
        "r.yaml:8:1: `seed`: expected a whole number, found `x`",
        "command line, override 1: `nokey` is not of the form key=value",
        "command line, override 2: `steps`: must be greater than 0, is 0",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1", 1.0),
        ("2.5e2", 250.0),
        ("1E5", 1e5),
    ],
)
def test_numbers(recipe, text, value):
    rate = load_recipe(recipe(), [f"policy.optimizer.learning_rate={text}"]).recipe.policy.optimizer.learning_rate
    assert rate == value and type(rate) is float


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"1e5"', "1e5"),
        ("'5'", "5"),
        ("'null'", "null"),
        ("'None'", "None"),
        ("'true'", "true"),
        ('"a: b"', "a: b"),
        ("a=b", "a=b"),
        ("two words", "two words"),
        ("''", ""),
        ("日本", "日本"),
        (r"\${x}", "${x}"),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_texts(recipe, text, value):
    assert load_recipe(recipe(), [f"description={text}"]).recipe.description == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("description=5", """`description`: expected text, found `5` (put it in quotes: `"description='5'"`)"""),
        (
            "description=true",
            """`description`: expected text, found `true` (put it in quotes: `"description='true'"`)""",
        ),
        (
            "tasks[0].source.prompt={q}",
            "`tasks[0].source.prompt`: expected text, found a block of keys "
            """(put it in quotes: `"tasks[0].source.prompt='{q}'"`)""",
        ),
        ("description=null", "`description`: expected text, found nothing (null)"),
        ("description=", "`description`: expected text, found nothing (null)"),
        (
            "description=a: b",
            "`description`: expected text, found a block of keys "
            """(put it in quotes: `"description='a: b'"`)""",
        ),
        ("description=None", "`description`: `None` is text; write `null` for no value"),
        ("policy.threads=None", "`policy.threads`: `None` is text; write `null` for no value"),
        ("steps=1.0", "`steps`: expected a whole number, found `1.0`"),
        ("steps=1e3", "`steps`: expected a whole number, found `1000.0`"),
        ("steps='3'", "`steps`: expected a whole number, found `3`"),
        ("steps=true", "`steps`: expected a whole number, found `true`"),
        ("policy.packing=1", "`policy.packing`: expected true or false, found `1`"),
        ("policy.packing='true'", "`policy.packing`: expected true or false, found `true`"),
        ("tasks[0].weight=true", "`tasks[0].weight`: expected a number, found `true`"),
        ("tasks[0].weight=.nan", "`tasks[0].weight`: expected a number, found `.nan`"),
        ("tasks[0].rewards[0].weight=.nan", "`tasks[0].rewards[0].weight`: expected a number, found `.nan`"),
        ("policy.optimizer=3", "`policy.optimizer`: expected a block of keys, found `3`"),
        ("policy=null", "`policy`: expected a block of keys, found nothing (null)"),
        ("trackers=swanlab", "`trackers`: expected a list, found `swanlab`"),
        (
            "policy.optimizer.schedule=cosin",
            "`policy.optimizer.schedule`: expected one of `constant`, `linear`, `cosine`, found `cosin` "
            "(did you mean `cosine`?)",
        ),
        (
            "trackers=[{name: swanlab, mode: clould}]",
            "`trackers[0].mode`: expected one of `offline`, `local`, `online`, found `clould`",
        ),
        ("placement=0", "`placement`: expected text or a block of keys, found `0`"),
        ("placement={policy: 0.5}", "`placement.policy`: expected text or a whole number, found `0.5`"),
        ("placement=[policy]", "`placement`: expected text or a block of keys, found a list of 1"),
        (
            "policy.engine=fdsp",
            "`policy.engine`: unknown name `fdsp`; known: deepspeed, fsdp, megatron (did you mean `fsdp`?)",
        ),
        ("policy.engine=''", "`policy.engine`: unknown name ``; known: deepspeed, fsdp, megatron"),
        ("pipeline=stf", "`pipeline`: expected one of `rl`, `sft`, found `stf` (did you mean `sft`?)"),
        ("pipeline=3", "`pipeline`: expected one of `rl`, `sft`, found `3`"),
        ("tasks[0]=3", "`tasks[0]`: expected a block of keys, found `3`"),
        ("policy.optimizer.betas=[0.9]", "`policy.optimizer.betas`: must be two numbers in [0, 1), is [0.9]"),
        ("rollout.sampling.temperature=.inf",
         "`rollout.sampling.temperature`: must be greater than 0 to train, is inf"),
        ("policy.optimizer.learning_rate=.inf",
         "`policy.optimizer.learning_rate`: must be greater than 0 and finite, is inf"),
        ("algorithm.masking.min_accuracy=2", "`algorithm.masking.min_accuracy`: must be in [0, 1], is 2.0"),
        ("algorithm.shaping.overlong_buffer=1e6",
         "`algorithm.shaping.overlong_buffer`: is 1e+06 tokens, the whole answer at most 1024: even an empty one would "
         "be penalized"),
        ("rollout.sampling.temperature=0", "`rollout.sampling.temperature`: must be greater than 0 to train, is 0.0"),
        ("rollout.sampling.temperature=-1", "`rollout.sampling.temperature`: must be greater than 0 to train, is -1.0"),
        ("+steps=4", "`+steps=4`: keys take no prefix, write `steps=4`"),
        ("++steps=4", "`++steps=4`: keys take no prefix, write `steps=4`"),
        ("~seed=1", "`~seed=1`: keys take no prefix, write `seed=1`"),
        ("a..b=1", "`a..b` is not a key; write `a.b[0].c`"),
        ("[0]=1", "`[0]` is not a key; write `a.b[0].c`"),
        ("tasks[-1].name=x", "`tasks[-1].name` is not a key; write `a.b[0].c`"),
        ("tasks[1].name=x", "`tasks[1].name`: `tasks` has no item [1]"),
        ("tasks[1]=x", "`tasks[1]`: `tasks` has no item [1]"),
        ("tasks.0.name=x", "`tasks.0.name`: `tasks` is a list; write `tasks[0]` for its first item"),
        ("tasks.name=x", "`tasks.name`: `tasks` is a list; write `tasks[0]` for its first item"),
        ("model[0]=x", "`model[0]`: `model` is a block of keys, not a list"),
        ("a[0]=1", "`a[0]`: `a` is not written in the recipe; give the whole list"),
        ("trackers[0].name=x", "`trackers[0].name`: `trackers` is not written in the recipe; give the whole list"),
        ("model.path.x=1", "`model.path.x`: `model.path` is `some/model`, which has no keys; replace it whole: "
         "`model.path=…`"),
        ("steps=[1", "`[1` is not a value: did not find expected ',' or ']'"),
        ("description={a: 1, a: 2}", "`{a: 1, a: 2}` is not a value: found duplicate key a"),
        ("seed=${steps", "`${steps` is not a value: no viable alternative at input '${steps'"),
        ("seed=${stepz}", "`seed`: Interpolation key 'stepz' not found"),
    ],
)  # fmt: skip
def test_an_override_that_is_wrong(recipe, override, message):
    assert problems(recipe(), override) == [f"command line, override 1: {message}"]


def test_an_override_through_a_list(recipe):
    loaded = load_recipe(recipe(), ["tasks[0].rewards[0].weight=2", "tasks[0].source.options.min_digits=2"])
    task = loaded.recipe.tasks[0]
    assert task.rewards[0].weight == 2.0
    assert task.source.options["min_digits"] == 2
    # Mappings merge key by key, the schema's default included.
    assert task.source.options["operators"] == ["+"] and task.source.options["max_digits"] == 3
    assert loaded.places[("tasks", 0, "rewards", 0, "weight")].source == "command line"
    assert loaded.places[("tasks", 0, "rewards", 0, "name")].source == "r.yaml"


def test_a_list_replaces_the_list_before_it(recipe):
    name = recipe(more="trackers: [{name: swanlab}, {name: tensorboard}]\n")
    loaded = load_recipe(name, ["trackers=[{name: tensorboard}]"])
    assert [tracker.name for tracker in loaded.recipe.trackers] == ["tensorboard"]
    assert ("trackers", 1) not in loaded.places
    assert problems(name, "trackers=[{name: tensorbaord}]") == [
        "command line, override 1: `trackers[0].name`: unknown name `tensorbaord`; known: swanlab, tensorboard "
        "(did you mean `tensorboard`?)"
    ]


def test_a_name_then_its_options(recipe):
    loaded = load_recipe(recipe(), ["algorithm=grpo", "algorithm.clip_low=0.3"])
    assert (loaded.recipe.algorithm.name, loaded.recipe.algorithm.clip_low) == ("grpo", 0.3)
    assert loaded.places[("algorithm", "name")].line == 1 and loaded.places[("algorithm", "clip_low")].line == 2


def test_options_of_the_default_need_no_name(recipe):
    assert load_recipe(recipe(), ["algorithm.clip_low=0.3"]).recipe.algorithm.clip_low == 0.3
    assert load_recipe(recipe(more="algorithm: {clip_low: 0.3}\n")).recipe.algorithm.name == "grpo"


def test_a_name_alone_drops_the_options_before_it(recipe):
    loaded = load_recipe(recipe(more="algorithm: {name: grpo, clip_low: 0.3}\n"), ["algorithm=grpo"])
    assert loaded.recipe.algorithm.clip_low == 0.2


def test_a_word_that_is_no_name_takes_no_keys(recipe):
    assert problems(recipe(more="placement: auto\n"), "placement.policy=0-3") == [
        "command line, override 1: `placement.policy`: `placement` is `auto`, which has no keys; replace it whole: "
        "`placement=…`"
    ]


@pytest.mark.parametrize("more", ["", "policy:\n", "policy: null\n", "policy: {}\n"])
def test_a_block_that_is_empty_takes_keys(recipe, more):
    assert load_recipe(recipe(more=more), ["policy.workers=2"]).recipe.policy.workers == 2


def test_free_blocks_take_any_key(recipe):
    name = recipe(more="policy:\n  engine_args: {a.b: 1}\n")
    loaded = load_recipe(name, ["policy.engine_args.c.d=2", "model.initialize.hidden_size=8", "placement.policy=0-3"])
    assert loaded.recipe.policy.engine_args == {"a.b": 1, "c": {"d": 2}}
    assert loaded.recipe.model.initialize == {"hidden_size": 8}
    assert loaded.recipe.placement == {"policy": "0-3"}


def test_the_last_override_of_a_key_wins(recipe):
    loaded = load_recipe(recipe(), ["steps=4", "steps=5"])
    assert loaded.recipe.steps == 5 and loaded.places[("steps",)].line == 2


# Interpolation


def test_interpolation(recipe, monkeypatch):
    monkeypatch.setenv("SOME_MODEL", "from/outside")
    more = "seed: 5\npolicy: {threads: '${seed}'}\nrollout: {threads: '${policy.threads}'}\n"
    loaded = load_recipe(recipe(more=more), ["model.path=${oc.env:SOME_MODEL}", "prompts_per_step=${steps}"])
    assert (loaded.recipe.policy.threads, loaded.recipe.rollout.threads) == (5, 5)
    assert (loaded.recipe.model.path, loaded.recipe.prompts_per_step) == ("from/outside", 3)
    assert loaded.values["policy"] == {"threads": 5}


def test_an_override_reaches_what_refers_to_it(recipe):
    assert load_recipe(recipe(more="seed: ${steps}\n"), ["steps=9"]).recipe.seed == 9


def test_a_block_may_be_referred_to(recipe):
    more = "policy: {engine_args: {a: [1, 2]}}\nrollout: {engine_args: '${policy.engine_args}'}\n"
    assert load_recipe(recipe(more=more)).recipe.rollout.engine_args == {"a": [1, 2]}


def test_broken_interpolations_are_told_with_all_the_rest(recipe):
    more = "seed: ${stepz}\ngroup_sise: 3\nalgorithm: {name: grpo, clip_low: '${oc.env:NOT_SET_ANYWHERE}'}\n"
    assert problems(recipe(more=more), "prompts_per_step=${prompts_per_step}") == [
        "r.yaml:8:1: `seed`: Interpolation key 'stepz' not found",
        "r.yaml:9:1: unknown key `group_sise` (did you mean `group_size`?)",
        "r.yaml:10:25: `algorithm.clip_low`: KeyError raised while resolving interpolation: "
        "\"Environment variable 'NOT_SET_ANYWHERE' not found\"",
        "command line, override 1: `prompts_per_step`: Recursive interpolation detected",
    ]


def test_an_interpolation_of_another_type_is_told_where_it_is_used(recipe):
    assert problems(recipe(more="seed: ${model.path}\n")) == [
        "r.yaml:8:1: `seed`: expected a whole number, found `some/model`"
    ]


def test_an_unfinished_interpolation_is_told_at_its_place(recipe):
    assert problems(recipe(more="rollout:\n  threads: ${steps\n")) == [
        "r.yaml:9:3: `rollout.threads`: no viable alternative at input '${steps'"
    ]


# Base recipes

BASE = """\
model: {path: base/model}
steps: 100
seed: 1
tasks:
  - {name: base, source: sums, rewards: [{name: math}]}
algorithm: {name: grpo, clip_low: 0.3, clip_high: 0.4}
policy: {workers: 2, threads: 1}
"""


def test_schema_then_base_then_recipe_then_overrides(recipe):
    recipe(BASE, name="base.yaml")
    name = recipe("base: base.yaml\nseed: 2\npolicy: {threads: 3}\nalgorithm: {clip_low: 0.1}\n")
    loaded = load_recipe(name, ["policy.threads=4"])
    made = loaded.recipe
    assert (made.group_size, made.steps, made.seed) == (8, 100, 2)
    assert (made.policy.workers, made.policy.threads) == (2, 4)
    assert (made.algorithm.clip_low, made.algorithm.clip_high) == (0.1, 0.4)
    sources = {key: loaded.places[(key,)].source for key in ("steps", "seed")}
    assert sources == {"steps": "base.yaml", "seed": "r.yaml"}
    assert "base" not in loaded.values


def test_a_block_whose_name_changes_starts_afresh(recipe):
    recipe(BASE, name="base.yaml")
    made = load_recipe(recipe("base: base.yaml\npipeline: sft\nalgorithm: {name: sft}\n")).recipe
    assert made.algorithm.name == "sft"
    assert problems(recipe("base: base.yaml\npipeline: sft\nalgorithm: {name: sft, clip_low: 0.1}\n")) == [
        "r.yaml:3:24: unknown key `algorithm.clip_low` of `sft`; it takes no options"
    ]


def test_a_bare_name_in_the_base_is_a_block_with_that_name(recipe):
    recipe(BASE.replace("{name: grpo, clip_low: 0.3, clip_high: 0.4}", "grpo"), name="base.yaml")
    loaded = load_recipe(recipe("base: base.yaml\nalgorithm: {clip_low: 0.1}\n"))
    assert (loaded.recipe.algorithm.name, loaded.recipe.algorithm.clip_low) == ("grpo", 0.1)
    assert loaded.places[("algorithm", "name")].source == "base.yaml"


def test_lists_of_the_base_are_replaced(recipe):
    recipe(BASE, name="base.yaml")
    made = load_recipe(
        recipe("base: base.yaml\ntasks:\n  - {name: mine, source: sums, rewards: [{name: math}]}\n")
    ).recipe
    assert [task.name for task in made.tasks] == ["mine"]


def test_mistakes_stand_in_the_file_they_are_made_in(recipe):
    recipe(BASE + "sede: 1\n", name="base.yaml")
    assert problems(recipe("base: base.yaml\nstpes: 2\n")) == [
        "base.yaml:8:1: unknown key `sede` (did you mean `seed`?)",
        "r.yaml:2:1: unknown key `stpes` (did you mean `steps`?)",
    ]


def test_one_base_only(recipe):
    recipe("base: other.yaml\n", name="base.yaml")
    assert problems(recipe("base: base.yaml\n")) == [
        "r.yaml:1:1: `base.yaml` has a `base:` of its own; one level is allowed"
    ]
    assert problems(recipe("base: r.yaml\n")) == ["r.yaml:1:1: `r.yaml` has a `base:` of its own; one level is allowed"]


def test_a_base_that_is_not_there(recipe):
    assert problems(recipe("base: gone.yaml\n")) == ["r.yaml:1:1: `base`: no recipe file `gone.yaml`"]
    assert problems(recipe("base: [a]\n")) == ["r.yaml:1:1: `base`: expected the name or path of a recipe"]


def test_a_base_beside_the_recipe_or_by_name(recipe, tmp_path):
    for folder in ("sub", "recipes"):
        (tmp_path / folder).mkdir()
    recipe(BASE, name="sub/base.yaml")
    recipe(BASE.replace("seed: 1", "seed: 8"), name="recipes/common.yaml")
    assert load_recipe(recipe("base: base.yaml\n", name="sub/r.yaml")).recipe.seed == 1
    assert load_recipe(recipe("base: common\n", name="sub/s.yaml")).recipe.seed == 8


# Pipelines


def test_the_sft_pipeline_has_its_own_keys(recipe):
    name = recipe(more="pipeline: sft\nsequences_per_step: 4\n")
    assert load_recipe(name).recipe.sequences_per_step == 4
    assert problems(name, "group_size=4")[0].startswith("command line, override 1: unknown key `group_size`")
    assert problems(recipe(), "sequences_per_step=4")[0].startswith("command line, override 1: unknown key")


def test_a_misspelled_pipeline_is_checked_as_the_one_that_was_meant(recipe):
    assert problems(recipe(more="pipeline: stf\nsequences_per_step: 4\n")) == [
        "r.yaml:8:1: `pipeline`: expected one of `rl`, `sft`, found `stf` (did you mean `sft`?)"
    ]


def test_loading_imports_no_heavy_library(recipe):
    import subprocess

    code = f"import sys; from rollcli.config.load import load_recipe; load_recipe({recipe()!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "transformers", "datasets"} & set(done.stdout.split())


# The other ways in


def test_read_values_fills_in_and_checks_nothing(recipe, tmp_path):
    recipe("a: 1\nb: ${a}\nc: 1e-6\n")
    assert read_values(tmp_path / "r.yaml") == {"a": 1, "b": 1, "c": 1e-6}
    recipe("a: ${b}\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:1:1: `a`: Interpolation key 'b' not found"):
        read_values(tmp_path / "r.yaml")


def test_values_rebuild_the_recipe(recipe):
    loaded = load_recipe(recipe(), ["policy.optimizer.learning_rate=1e-6", "algorithm.kl.coefficient=0"])
    assert rebuild(loaded.values) == loaded.recipe


def test_infinite_limits_are_numbers(recipe):
    made = load_recipe(recipe(), ["policy.optimizer.max_grad_norm=.inf"]).recipe
    assert math.isinf(made.policy.optimizer.max_grad_norm)


def test_another_algorithm_by_override_starts_afresh_and_keeps_what_the_command_line_says(recipe):
    path = recipe(BASE)
    for given in (["algorithm.name=dapo"], ["algorithm=dapo"]):
        assert (
            load_recipe(path, given).recipe.algorithm
            == load_recipe(
                recipe(BASE.replace("{name: grpo, clip_low: 0.3, clip_high: 0.4}", "dapo"), name="other.yaml")
            ).recipe.algorithm
        )
    for given in (["algorithm.clip_low=0.1", "algorithm.name=dapo"], ["algorithm.name=dapo", "algorithm.clip_low=0.1"]):
        made = load_recipe(path, given).recipe.algorithm
        assert (made.name, made.clip_low, made.clip_high) == ("dapo", 0.1, 0.28)
    same = load_recipe(path, ["algorithm.name=grpo"]).recipe.algorithm
    assert (same.clip_low, same.clip_high) == (0.3, 0.4)
