"""Leyden: store what AI agents experience and turn it into better agents.

`import leyden` is light: it never loads torch. Start reading at `leyden/loop.py`.
"""

__version__ = "0.1.0"
