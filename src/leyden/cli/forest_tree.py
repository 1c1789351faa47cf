"""A forest drawn in the terminal, one line per branch, depth-first. It writes to a console and decides nothing."""

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from leyden.cli.report.forest import branch_line, summary_lines
from leyden.traces.picture import Branch, Picture

MAX_LEVELS = 16
"""Levels drawn: each takes four columns of the terminal."""


def show(data: Picture, console: Console) -> None:
    """Print the counts, then the tree."""
    console.print(Text(data["title"], style="bold"))
    for line in summary_lines(data):
        console.print(line, markup=False, soft_wrap=True)
    if data["branches"]:
        console.print(draw(data))
    if data["num_left_out"]:
        console.print(f"{data['num_left_out']} more branches are not shown; --json has the same limit", markup=False)


def draw(data: Picture) -> Tree:
    """The branches as a rich tree without a visible root."""
    root = Tree("", hide_root=True)
    path: list[Tree] = [root]
    num_deeper = 0
    for branch in data["branches"]:
        if branch["level"] >= MAX_LEVELS:
            num_deeper += 1
            continue
        del path[branch["level"] + 1 :]
        path.append(path[-1].add(_label(branch)))
    if num_deeper:
        root.add(Text(f"{num_deeper} branches lie deeper than {MAX_LEVELS} branchings and are not drawn", style="dim"))
    return root


def _label(branch: Branch) -> Text:
    if branch["num_trained"]:
        style = "green"
    elif branch["num_sampled"]:
        style = "red"
    else:
        style = ""
    line = Text(branch_line(branch), style=style)
    line.append(f"\n{branch['text']}", style="dim")
    for one in branch["diverged"]:
        line.append(f"\n{one['kind'].replace('_', ' ')} at {one['position']}", style="bold yellow")
        line.append(f"\n  before: {one['earlier']}\n  now:    {one['later']}", style="yellow")
    if branch["num_diverged"] > len(branch["diverged"]):
        line.append(f"\nand {branch['num_diverged'] - len(branch['diverged'])} more divergences", style="yellow")
    return line
