"""The recipe refuses what it does not know, in one line that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.config import RecipeError, load_recipe, make_recipe

SMALL = "run: {steps: 3}\ndata: {train: [a.txt]}\n"


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(SMALL)
    return path


def test_a_resolved_recipe_reads_back_as_itself(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file)
    again = tmp_path / "resolved.yaml"
    again.write_text(recipe.to_yaml())
    assert load_recipe(again) == recipe


def test_overrides_change_one_setting(recipe_file):
    recipe = load_recipe(
        recipe_file, ["optimizer.learning_rate=1e-3", "schedule.targets=['cpu:0', 'cpu:1']"]
    )
    assert recipe.optimizer.learning_rate == 1e-3
    assert recipe.schedule.targets == ("cpu:0", "cpu:1")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rat=1", "did you mean 'optimizer.learning_rate'"),
        ("run.steps=0", "run.steps: Input should be greater than or equal to 1"),
        ("run.epochs=2", "give exactly one of steps and epochs"),
        ("schedule.targets=['tpu:0']", "schedule.targets: String should match pattern"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas: Input should be less than 1"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: Input should be a finite"),
        ("run.seed=9223372036854775808", "run.seed: Input should be less than"),
        ("run.steps.more=1", "'steps' is not a section"),
        ("steps", "expected section.name=value"),
        ("run.name=[", "is not a YAML value"),
        ("data.train=[]", "data.train: name at least one file or folder"),
    ],
)
def test_a_wrong_override_is_one_line(recipe_file, override, said):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"- a\n", b"a: [\n", b"", b"1: 2\n", b"\xff\xfe", None])
def test_a_file_that_is_no_recipe_is_one_line(tmp_path, text):
    path = tmp_path / "r.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_section_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match="unknown setting 'optimiser'; did you mean 'optimizer'"):
        make_recipe({"run": {"steps": 1}, "optimiser": {}})


def test_a_runs_recipe_is_read_from_any_folder(tmp_path, monkeypatch):
    """What stands here gets its whole path; names of sources and of hub models stay."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    tree = {
        "target": {"path": "model"},
        "drafter": {"initial": "../none"},
        "data": {"train": ["a.txt", "stdlib:train", "gone.txt"], "held_out": ["./b.txt"]},
        "run": {"steps": 1},
    }
    recipe = make_recipe(tree).at_home_anywhere()
    assert recipe.target.path == str(tmp_path / "model")
    assert recipe.data.train == (str(tmp_path / "a.txt"), "stdlib:train", "gone.txt")
    assert recipe.data.held_out == (str(tmp_path / "b.txt"),)
    assert recipe.drafter.initial == "../none"
    hub = make_recipe(tree | {"target": {"path": "Qwen/Qwen3-8B"}}).at_home_anywhere()
    assert hub.target.path == "Qwen/Qwen3-8B"
    assert make_recipe({**tree, "target": {}}).at_home_anywhere().target.path == "bundled"


@pytest.mark.parametrize("name", ["tiny-cpu", "qwen3-0.6b-1gpu", "qwen3-8b-8gpu"])
def test_the_shipped_recipes_are_recipes(name):
    recipe = load_recipe(Path(__file__).parents[3] / "recipes" / f"{name}.yaml")
    assert recipe.name == name
