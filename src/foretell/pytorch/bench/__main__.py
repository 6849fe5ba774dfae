"""`python -m foretell.pytorch.bench`: measure, merge what several runs measured, or sum it up."""

from foretell.pytorch.bench.command import main

raise SystemExit(main())
