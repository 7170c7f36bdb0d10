"""The images, their names and labels. Pure; knows nothing of the programs that build them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = "https://github.com/moejob/moejob"
# Every file of every layer is of this second, 1980-01-01: earlier than any, and one that zip files can say.
TIMESTAMP = 315532800


class UnknownImageError(Exception):
    """An image that no recipe makes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One image: the folder of its Dockerfile, and the stage that it is. Its last layer is code of ours."""

    name: str
    folder: str
    target: str

    @property
    def dockerfile(self) -> str:
        """Seen from the root of the tree, which is the context of every build."""
        return f"images/{self.folder}/Dockerfile"


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("operator", "operator", "operator"),
        Recipe("trainer", "trainer", "gpu"),
        Recipe("trainer-cpu", "trainer", "cpu"),
        Recipe("trainer-colocated", "trainer", "colocated"),
        Recipe("trainer-colocated-cpu", "trainer", "colocated-cpu"),
        Recipe("rollout", "rollout", "gpu"),
        Recipe("rollout-cpu", "rollout", "cpu"),
    )
}


@dataclass(frozen=True, slots=True)
class Tree:
    """The sources that images are made of: their version, and the commit they come from."""

    version: str
    revision: str


@dataclass(frozen=True, slots=True)
class Order:
    """One image to build of a checkout, `context`; `arguments` name bases other than the Dockerfile's own."""

    recipe: Recipe
    reference: str
    labels: Mapping[str, str]
    arguments: Mapping[str, str]
    context: Path = ROOT

    @property
    def dockerfile(self) -> str:
        """Return the text of its Dockerfile, to the end of this image: buildah labels the last stage."""
        whole = (self.context / self.recipe.dockerfile).read_text()
        before, named, after = whole.partition(f" AS {self.recipe.target}\n")
        return before + named + after.partition("\nFROM ")[0]


def chosen(names: str) -> tuple[Recipe, ...]:
    """The recipes of these names, which blanks separate."""
    unknown = [name for name in names.split() if name not in RECIPES]
    if unknown:
        raise UnknownImageError(f"no image is called {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    return tuple(RECIPES[name] for name in names.split())


def repository(name: str) -> str:
    """Return what an image is called before its tag, the registry left out: the names in the chart's values."""
    return f"moejob-{name}"


def reference(recipe: Recipe, prefix: str, tag: str) -> str:
    """The full name of an image, such as registry.example.com/ml/moejob-operator:0.1.0."""
    before = f"{prefix.rstrip('/')}/" if prefix else ""
    return f"{before}{repository(recipe.name)}:{tag}"


def labels(tree: Tree) -> dict[str, str]:
    """The labels that change from build to build; the Dockerfile has the others."""
    return {
        "org.opencontainers.image.version": tree.version,
        "org.opencontainers.image.revision": tree.revision,
        "org.opencontainers.image.source": SOURCE,
    }


def closure_key(order: Order) -> str:
    """Changes with whatever the dependency layer of this Dockerfile is made of."""
    closure = f"requirements/{order.recipe.folder}.txt"
    known = hashlib.sha256(repr(sorted(order.arguments.items())).encode())
    tools = ("images/install", "images/compile.py", "images/debian.py")
    for part in (closure, "requirements/sbom.txt", "requirements/uv.txt", *tools):
        known.update((order.context / part).read_bytes())
    return known.hexdigest()[:12]
