"""`python -m shoal`, the same program as `shoal`."""

from shoal.cli.main import main

if __name__ == "__main__":
    main()
