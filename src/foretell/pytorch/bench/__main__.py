"""`python -m foretell.pytorch.bench`: measure operators within a time limit."""

from foretell.pytorch.bench.command import main

raise SystemExit(main())
