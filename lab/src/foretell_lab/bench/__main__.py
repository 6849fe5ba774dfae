"""`python -m foretell_lab.bench`: join tables of measured operators, or sum one up.

python -m foretell_lab.bench --merge a.csv b.csv -o h200.csv.gz
python -m foretell_lab.bench --summary h200.csv.gz
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from foretell.errors import ForetellError
from foretell_lab.bench import digest, runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake."""
    parser = argparse.ArgumentParser("python -m foretell_lab.bench", description=__doc__)
    parser.add_argument("-o", "--out", type=Path, default=Path("bench.csv"), help="joined table")
    verbs = parser.add_mutually_exclusive_group(required=True)
    verbs.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join runs")
    verbs.add_argument("--summary", type=Path, metavar="FILE", help="print what a table tells")
    asked = parser.parse_args(arguments)
    try:
        if asked.summary:
            print(digest.summary(asked.summary))
        else:
            runs.merge(asked.merge, asked.out)
    except ForetellError as why:
        print(why, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
