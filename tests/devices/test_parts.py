"""What parts add up to, by hand."""

from __future__ import annotations

from rollcli.devices.arithmetic import arithmetic
from rollcli.devices.parts import Part, Setting, peak_gib, peak_stage, role_gib, stage_gib


def test_the_peak_is_what_is_always_there_and_the_largest_stage():
    found = (Part("a", 1, ""), Part("b", 2, "", ("x",)), Part("c", 1, "", ("x", "y")), Part("d", 3, "", ("y",)))
    assert (peak_stage(found), peak_gib(found)) == ("y", 5)
    assert (peak_stage(found[:1]), peak_gib(found[:1])) == (None, 1)


def test_what_is_in_main_memory_or_on_one_worker_is_not_on_every_device():
    found = (Part("a", 1, ""), Part("b", 9, "", host=True), Part("c", 2, "", ("x",), once=True))
    assert stage_gib(found, "x") == 3 and peak_gib(found) == 3
    assert role_gib(found, 3) == 3 + 1 + 1
    assert peak_stage((Part("a", 1, "", ("y",)), Part("b", 9, "", ("x",), host=True))) == "y"


def test_a_bucket_is_as_large_as_asked_the_largest_tensor_or_the_model(rl, qwen, tiny):
    recipe = rl()
    assert Setting(recipe, tiny, arithmetic(recipe, tiny), True).bucket_gib == 4 * 260_032 / 2**30
    assert Setting(recipe, qwen, arithmetic(recipe, qwen), True).bucket_gib == 4 * 152064 * 3584 / 2**30
    recipe.rollout.sync.bucket_mib = 4096
    assert Setting(recipe, qwen, arithmetic(recipe, qwen), True).bucket_gib == 4


def test_the_recipes_dtype_decides_the_width(rl, tiny):
    recipe = rl()
    sizes = arithmetic(recipe, tiny)
    assert [Setting(recipe, tiny, sizes, gpu).width for gpu in (True, False)] == [2, 4]
    recipe.model.dtype = "bfloat16"
    assert Setting(recipe, tiny, sizes, False).width == 2
