"""The recipe of a run: its values, and everything that follows from them.

    read_source (load.py)      YAML and arguments -> Source: merged and checked key by key
    Settings (settings.py)     its values with types, for the checks before files are read
    build                      Source and Facts -> Recipe: derived values set, then frozen

Only `build` makes a `Recipe`, and nothing changes it. A loop in Python that needs another value
makes another recipe (`change`), in which everything that follows is computed again.

Protects: a run from values that change while it runs.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any, cast

from omegaconf import DictConfig, OmegaConf
from pydantic_core import core_schema

from env import Json
from kit.recipe.derive import Facts, derive, replace_servers
from kit.recipe.keys import escape, flatten, is_below, select_nested, set_nested
from kit.recipe.load import Source, resolve
from kit.recipe.redaction import redact
from kit.recipe.settings import Settings, make_settings
from kit.recipe.user_functions import RecipeFunctions, load_recipe_functions


class Unchecked:
    """An annotation of a field whose value pydantic takes as it is."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> core_schema.CoreSchema:
        return core_schema.any_schema()


class Recipe(Settings):
    """A recipe that passed its checks, with every value that follows from it.

    source: as it was written. nested: all values with ${...}. resolved: all values.
    """

    source: Annotated[Source, Unchecked]
    nested: Json
    resolved: Json
    functions: Annotated[RecipeFunctions, Unchecked]
    facts: Annotated[Facts, Unchecked]

    @property
    def last_step(self) -> int:
        """Return the number of the last training step."""
        return self.trainer.total_training_steps or 0

    def change(self, *arguments: str) -> Recipe:
        """Make a recipe with other values, each as key=value of the command line.

        Everything that follows is computed again. Rows, model files and processes stay as they are
        (docs/guides/python.md). Raises ConfigError, UserFunctionError.
        """
        return build(self.source.override(arguments), self.command, self.facts)

    def for_verl(self, section: str = "") -> DictConfig:
        """Copy verl's configuration, or a section of it, for verl's classes.

        They may change it. Other processes do not know the kit's resolvers, so it is resolved.
        """
        values = select_nested(self.resolved, section) if section else self.resolved
        escaped: Any = escape(values)
        return cast(DictConfig, OmegaConf.create(escaped))

    def redacted(self) -> Json:
        """Return all values, resolved and without secrets. Those of the environment stay ${...}."""
        return redact(self.nested, self.resolved)


def build(
    source: Source,
    command: str = "train",
    facts: Facts | None = None,
    functions: RecipeFunctions | None = None,
) -> Recipe:
    """Make the recipe of a source: derive the values that follow, and freeze them.

    facts: what its files and rows say; None: a recipe whose files are not read. functions: those of
    the source; None: load them here. Raises ConfigError, UserFunctionError.
    """
    facts = facts or Facts()
    settings = make_settings(source, command)
    nested = copy.deepcopy(source.values)
    for key, value in derive(settings, facts).items():
        set_nested(nested, key, escape(value))
    replace_servers(nested["gym"], facts)
    resolved = resolve(nested)
    functions = functions or load_recipe_functions(settings)
    return Recipe.model_validate(
        resolved
        | {"command": command, "source": source, "nested": nested, "resolved": resolved}
        | {"functions": functions, "facts": facts}
    )


def find_differences(recipe: Recipe) -> dict[str, tuple[object, object]]:
    """Return {dotted key: (value, default)} of the values that verl would not give these keys.

    verl's default of a key may refer to another key, such as
    `${oc.select:actor_rollout_ref.rollout.n,1}`. Then the value of that key in the recipe counts.
    Secrets are hidden.
    """
    leaves = flatten(recipe.redacted())
    defaults = flatten(recipe.source.defaults)
    references = [key for key, default in defaults.items() if "${" in str(default)]
    usual = copy.deepcopy(recipe.resolved)
    for key in references:
        set_nested(usual, key, defaults[key])
    resolved = flatten(resolve(usual))
    changes: dict[str, tuple[object, object]] = {}
    for key, value in leaves.items():
        default = resolved.get(key) if is_below(key, *references) else defaults.get(key)
        if value != default:
            changes[key] = (value, default)
    return changes
