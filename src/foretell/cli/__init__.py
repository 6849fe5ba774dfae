"""The command line: parse, call one public function, print.

Data goes to stdout and words to stderr. A user's mistake ends with one message and exit code 2;
a traceback is a bug.
"""

from foretell.cli.main import main

__all__ = ["main"]
