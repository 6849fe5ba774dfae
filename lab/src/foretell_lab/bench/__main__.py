"""`python -m foretell_lab.bench`."""

from foretell_lab.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
