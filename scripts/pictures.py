"""Draw the pictures of README and docs: `make pictures`.

The diagrams are drawn from the tables below; the terminals show what the named commands print on this machine. Pictures
are committed, since the pages that show them are read where nothing can be run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.grpo_learning.curves import draw_curves
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
COLUMNS = 150

INK, PAPER, LINE = "#1f2933", "#ffffff", "#52606d"
FILLS = {"user": "#e3f8ff", "cluster": "#f0f4f8", "pod": "#fffbea", "process": "#e3fcec", "volume": "#fce8f3"}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and lines below it, in pixels."""

    x: int
    y: int
    width: int
    height: int
    fill: str
    title: str
    lines: tuple[str, ...] = ()

    def as_svg(self) -> str:
        """The rectangle and its text."""
        text = [f'<text x="{self.x + 14}" y="{self.y + 26}" font-weight="600">{escape(self.title)}</text>']
        text += [
            f'<text x="{self.x + 14}" y="{self.y + 48 + 18 * number}" font-size="13">{escape(line)}</text>'
            for number, line in enumerate(self.lines)
        ]
        rectangle = (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="8" '
            f'fill="{FILLS[self.fill]}" stroke="{LINE}"/>'
        )
        return rectangle + "".join(text)


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line between two points, with a word beside it."""

    start: tuple[int, int]
    end: tuple[int, int]
    word: str = ""

    def as_svg(self) -> str:
        """The line, its head and its word."""
        (x1, y1), (x2, y2) = self.start, self.end
        ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
        line = f'<line {ends} stroke="{LINE}" stroke-width="1.5" marker-end="url(#head)"/>'
        if not self.word:
            return line
        x, y = (x1 + x2) // 2, (y1 + y2) // 2
        return line + f'<text x="{x}" y="{y - 7}" font-size="12" text-anchor="middle">{escape(self.word)}</text>'


BOXES = (
    Box(10, 70, 200, 120, "user", "MoETrainingJob", ("model, data,", "tensor x pipeline x expert", "x context x data")),
    Box(
        300,
        70,
        220,
        120,
        "cluster",
        "operator (kopf)",
        ("derives GPUs, nodes, memory", "refuses what cannot work", "recovers what failed"),
    ),
    Box(600, 20, 560, 280, "cluster", "trainer pods, one for each node"),
    Box(620, 60, 250, 220, "pod", "pod 0"),
    Box(890, 60, 250, 220, "pod", "pod 1"),
    Box(636, 100, 218, 56, "process", "launcher", ("rendezvous, heartbeat, restart",)),
    Box(906, 100, 218, 56, "process", "launcher"),
    *(Box(636 + 74 * n, 186, 68, 76, "process", "rank", (str(n),)) for n in range(3)),
    *(Box(906 + 74 * n, 186, 68, 76, "process", "rank", (str(n + 3),)) for n in range(3)),
    Box(300, 240, 220, 60, "pod", "rollout pods", ("vLLM engines, for GRPO",)),
    Box(
        600,
        340,
        560,
        64,
        "volume",
        "PersistentVolumeClaim",
        ("checkpoints that any layout resumes, Hugging Face export, steps.jsonl",),
    ),
)
ARROWS = (
    Arrow((210, 130), (298, 130), "kubectl apply"),
    Arrow((520, 130), (598, 130), "creates"),
    Arrow((410, 190), (410, 238)),
    Arrow((600, 262), (522, 270), "weights"),
    Arrow((745, 156), (745, 184)),
    Arrow((1015, 156), (1015, 184)),
    Arrow((880, 300), (880, 338), ""),
)


# The trust domains of SECURITY.md; the lines of a box limit the trust inside it.
DOMAINS = (
    Box(10, 10, 1160, 470, "cluster", "pod network: trusted with nothing"),
    Box(
        30,
        60,
        220,
        200,
        "user",
        "operator's namespace",
        (
            "the operator: creates pods,",
            "Services, Secrets and policies",
            "in the namespaces it serves;",
            "reads no Secret but its own",
            "certificate; believes pods",
            "within bounds only",
        ),
    ),
    Box(30, 350, 220, 84, "user", "API users", ("send specs: limits, webhook", "and API server refuse")),
    Box(400, 60, 470, 400, "process", "a namespace: its users are trusted with one another"),
    Box(
        420,
        100,
        200,
        160,
        "pod",
        "job A",
        ("its pods share one secret:", "rendezvous, engines,", "claims on the run folder"),
    ),
    Box(650, 100, 200, 160, "pod", "job B", ("another secret;", "job A cannot take part")),
    Box(
        420,
        350,
        430,
        96,
        "volume",
        "a volume claim: its jobs are trusted with files",
        ("a run is superseded by the job's own tokens only;", "files can be read, changed and deleted"),
    ),
    Box(1000, 100, 150, 160, "user", "a stranger", ("any other pod of", "the cluster")),
)
WAYS = (
    Arrow((250, 150), (418, 150), "port 9400"),
    Arrow((250, 392), (398, 392), "apply"),
    Arrow((520, 260), (520, 348), "MAC on tokens"),
    Arrow((750, 260), (750, 348), "MAC on tokens"),
    Arrow((1000, 150), (872, 150), "NetworkPolicy"),
    Arrow((1000, 220), (872, 220), "else: no secret"),
)


def overview_svg() -> str:
    """Return the diagram that leads from a job to its ranks."""
    return _diagram_svg("A MoETrainingJob becomes pods, launchers and ranks", (1180, 424), BOXES, ARROWS)


def trust_svg() -> str:
    """Return the diagram of trust domains."""
    return _diagram_svg("Operator, namespaces, jobs and volume claims as trust domains", (1180, 490), DOMAINS, WAYS)


def _diagram_svg(label: str, size: tuple[int, int], boxes: tuple[Box, ...], arrows: tuple[Arrow, ...]) -> str:
    width, height = size
    drawn = "".join(box.as_svg() for box in boxes) + "".join(arrow.as_svg() for arrow in arrows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}" '
        f'font-family="ui-sans-serif, system-ui, sans-serif" font-size="15" fill="{INK}">'
        f'<defs><marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4.5" orient="auto">'
        f'<path d="M0,0 L9,4.5 L0,9 z" fill="{LINE}"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>{drawn}</svg>\n'
    )


def terminal_svg(title: str, *commands: str) -> str:
    """Run commands in the root of the tree, and return the picture of a terminal with their output."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for command in commands:
            console.print(Text(f"$ {command}", style="bold"))
            console.print(Text.from_ansi(_run_command(command)))
    # Any fixed-width font of the reader will do: a picture must load none from a server.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title, unique_id="moejob"), flags=re.DOTALL)


def _run_command(command: str) -> str:
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.run(shlex.split(command), cwd=ROOT, env=environment, check=True, capture_output=True)
    return process.stdout.decode().replace(str(ROOT), "~/moejob")


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "overview.svg").write_text(overview_svg())
    (FOLDER / "trust.svg").write_text(trust_svg())
    draw_curves()
    (FOLDER / "demo.svg").write_text(terminal_svg("a laptop, two CPU ranks", "make demo"))
    (FOLDER / "demo-grpo.svg").write_text(terminal_svg("a laptop, and a vLLM engine on its CPU", "make demo-grpo"))
    (FOLDER / "cluster.svg").write_text(terminal_svg("two Kubernetes nodes on one machine", "make cluster-demo"))
    (FOLDER / "plan.svg").write_text(
        terminal_svg("no cluster, no GPU", "moejob plan examples/mixtral-8x7b-sft-16gpu.yaml")
    )


if __name__ == "__main__":
    main()
