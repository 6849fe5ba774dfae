"""The process a script runs in: `python -m foretell.pytorch.intake REQUEST`."""

import sys
from pathlib import Path

from foretell.pytorch.intake.child import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))
