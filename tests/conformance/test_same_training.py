"""Every recipe trains the same with fabric as without it, or is refused before its first step.

``pytest tests/conformance --all-recipes`` runs all recipes in all ways. Else it runs those that declare
QUICK: one of them in all ways, and the others without fabric and in a job in which replicas are killed.
"""

import pytest
from comparison import compare, compare_replicas
from recipe_table import PAGE, Recipe, page, read_recipes
from ways import WAYS, run

RECIPES = read_recipes()
IN_ALL_WAYS = "own_loop"


def ways_of(recipe: Recipe, all_recipes: bool) -> list[str]:
    if all_recipes or recipe.name == IN_ALL_WAYS:
        return list(WAYS)
    # Where the job with kills may differ from the plain run, a job of one replica is compared.
    also = "single" if "killed" in recipe.unlike else ""
    return [way for way in WAYS if way in ("plain", also, "killed")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda x: x.name)
def test_a_recipe_trains_the_same_or_is_refused(recipe, zygotes, tmp_path, request):
    all_recipes = request.config.getoption("--all-recipes")
    if not (recipe.quick or all_recipes):
        pytest.skip("not a quick recipe: give --all-recipes")
    if recipe.missing:
        pytest.skip(f"needs {recipe.missing}")
    zygote = zygotes(recipe.needs)
    if recipe.refused:
        for way in ("single", "killed") if all_recipes else ("single",):
            result = run(way, recipe, zygote, tmp_path / way)
            assert set(result.codes.values()) == {1}, result.output[-3000:]
            assert recipe.refused in " ".join(result.output.split()), result.output[-3000:]
            assert result.committed == 0, "it was refused too late"
        return
    results = {}
    for way in ways_of(recipe, all_recipes):
        results[way] = run(way, recipe, zygote, tmp_path / way)
        assert set(results[way].codes.values()) == {0}, f"{way}\n{results[way].output[-5000:]}"
        if way in recipe.unlike:
            compare_replicas(results[way], way)
        elif way != "plain":
            compare(recipe, results["plain"], results[way], way)


def test_the_page_lists_all_recipes():
    assert PAGE.read_text() == page(RECIPES), "run python tests/conformance/recipe_table.py"


def test_each_recipe_has_a_title_and_an_area():
    assert all(recipe.title.endswith(".") and recipe.area for recipe in RECIPES)
