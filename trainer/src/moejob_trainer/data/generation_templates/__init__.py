"""Published chat templates with marks around the assistant's text, for templates that are published without marks.

Each writes what the published one writes, but for the end of GLM's last turn. They are known by their text alone: the
same family comes with several, and a guess would train on the wrong tokens.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

# SHA-256 of the published text, with line breaks as Jinja reads them.
_MARKED = {
    "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8": "qwen3",
    "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64": "deepseek_r1",
    "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3": "glm4_moe",
    "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146": "gpt_oss",
}
KNOWN = "those published with Qwen3, DeepSeek-R1, GLM-4.5 and gpt-oss"


def hash_template(template: str) -> str:
    """Hash a template; Jinja reads both kinds of line breaks alike, and none at the end."""
    return hashlib.sha256(template.replace("\r\n", "\n").removesuffix("\n").encode()).hexdigest()


@cache
def find_marked_template(template: str) -> str | None:
    """The same template with marks, when it is one that we know."""
    name = _MARKED.get(hash_template(template))
    return name and resources.files(__name__).joinpath(f"{name}.jinja").read_text(encoding="utf-8")
